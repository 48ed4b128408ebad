"""Which addresses this machine has, and on which of IPv6 other nodes may count."""

from __future__ import annotations

import subprocess

from agents.node.host.interfaces import local_networks, stable_ipv6_addresses

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
    found = [(name, str(address)) for name, address in stable_ipv6_addresses(TABLE)]
    assert found == [("eth0", "fd00::2/64"), ("ib0", "2001:db8::7/64")]


def test_every_local_ipv4_address_is_a_local_network() -> None:
    shown = subprocess.run(["hostname", "--all-ip-addresses"], capture_output=True, text=True, timeout=10)
    own = {f"{each}/32" for each in shown.stdout.split() if ":" not in each}
    assert own | {"127.0.0.0/8"} <= set(local_networks())
