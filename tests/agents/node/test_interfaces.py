"""Which addresses of IPv6 other nodes may count on."""

from __future__ import annotations

from agents.node.interfaces import lasting_ipv6

TABLE = """\
00000000000000000000000000000001 01 80 10 80       lo
fe8000000000000000fc00fffe000001 02 40 20 80     eth0
fd000000000000000000000000000002 02 40 00 82     eth0
fd000000000000000000000000000003 02 40 00 01     eth0
fd000000000000000000000000000004 02 40 00 a0     eth0
fd000000000000000000000000000005 02 40 00 c0     eth0
20010db8000000000000000000000007 03 40 00 80      ib0
"""


def test_those_of_one_wire_or_of_one_day_are_left_out() -> None:
    found = [(name, str(address)) for name, address in lasting_ipv6(TABLE)]
    assert found == [("eth0", "fd00::2/64"), ("ib0", "2001:db8::7/64")]
