"""Where addresses lead: the special-purpose registries, and every form that carries an IPv4 address."""

from __future__ import annotations

import ipaddress

import pytest

from portal.domain.special_addresses import Reach, reach_of

PUBLIC = ["1.1.1.1", "100.63.255.255", "172.32.0.1", "198.20.0.1", "2600::1", "2001:4860:4860::8888",
          "64:ff9b::808:808", "::ffff:1.1.1.1"]  # fmt: skip
PRIVATE = ["10.0.0.8", "172.31.255.255", "192.168.1.1", "127.0.0.1", "127.255.0.1", "100.64.0.1", "::1", "fc00::1",
           "fdff::1", "::ffff:10.0.0.1", "::ffff:127.0.0.1"]  # fmt: skip
NEVER = ["0.0.0.0", "0.1.2.3", "169.254.169.254", "::ffff:169.254.169.254", "100.100.100.200", "168.63.129.16",
         "192.0.0.192", "192.0.2.1", "192.88.99.1", "198.18.0.1", "198.19.255.255", "198.51.100.1", "203.0.113.9",
         "224.0.0.1", "239.255.255.250", "240.0.0.1", "255.255.255.255", "::", "fe80::1", "fe80::1%eth0", "fec0::1",
         "ff02::1", "100::1", "2001::1", "2001:2::1", "2001:10::1", "2001:db8::1", "3fff::1", "5f00::1", "4000::1",
         "fd00:ec2::254", "fd20:ce::254", "::ffff:0:10.0.0.1"]  # fmt: skip
CARRIED = ["127.0.0.1", "10.0.0.8", "169.254.169.254", "100.64.0.1", "192.168.0.1"]


@pytest.mark.parametrize(
    ("reach", "addresses"), [(Reach.PUBLIC, PUBLIC), (Reach.PRIVATE, PRIVATE), (Reach.NEVER, NEVER)]
)
def test_where_an_address_leads(reach: Reach, addresses: list[str]) -> None:
    assert {each: reach_of(ipaddress.ip_address(each)) for each in addresses} == dict.fromkeys(
        addresses, reach
    )


@pytest.mark.parametrize("inner", CARRIED)
def test_no_form_of_ipv6_leads_to_an_inner_address(inner: str) -> None:
    number = int(ipaddress.IPv4Address(inner))
    forms = {
        "compatible ::/96": number,
        "translated ::ffff:0:0:0/96": 0xFFFF << 48 | number,
        "NAT64 64:ff9b::/96": 0x64FF9B << 96 | number,
        "local NAT64 64:ff9b:1::/48, last bits": 0x64FF9B0001 << 80 | number,
        "local NAT64, RFC 6052 /48": 0x64FF9B0001 << 80 | (number >> 16) << 64 | (number & 0xFFFF) << 40,
        "6to4 2002::/16": 0x2002 << 112 | number << 80 | 1,
        "Teredo 2001::/32": 0x20010000 << 96 | number ^ 0xFFFF_FFFF,
        "Teredo server": 0x20010000 << 96 | number << 64,
    }
    reached = {name: reach_of(ipaddress.IPv6Address(each)) for name, each in forms.items()}
    assert reached == dict.fromkeys(forms, Reach.NEVER)


def test_whatever_python_calls_special_is_not_public() -> None:
    for text in (*PUBLIC, *PRIVATE, *NEVER):
        address = ipaddress.ip_address(text)
        if not address.is_global and not getattr(address, "ipv4_mapped", None):
            assert reach_of(address) is not Reach.PUBLIC, text
