"""Which addresses belong to the public internet: our own list, which no version of Python or its data changes.

From the special-purpose registries of IANA (RFC 6890 and its updates) and the metadata services of clouds.
"""

from __future__ import annotations

import ipaddress
from enum import Enum

IpAddress = ipaddress.IPv4Address | ipaddress.IPv6Address


class Reach(Enum):
    PUBLIC = "public"
    PRIVATE = "private"  # inside a network, where an administrator may permit it
    NEVER = "never"  # link-local, metadata of clouds, multicast, tunnels, documentation, reserved


def _networks(text: str) -> tuple[ipaddress.IPv4Network | ipaddress.IPv6Network, ...]:
    return tuple(ipaddress.ip_network(each) for each in text.split())


_METADATA = _networks(
    "169.254.0.0/16 100.100.100.200/32 192.0.0.192/32 168.63.129.16/32 fd00:ec2::/32 fd20:ce::/32 fe80::/10"
)
_PRIVATE = _networks("10.0.0.0/8 172.16.0.0/12 192.168.0.0/16 100.64.0.0/10 127.0.0.0/8 fc00::/7 ::1/128")
_RESERVED = _networks(
    "0.0.0.0/8 192.0.0.0/24 192.0.2.0/24 192.31.196.0/24 192.52.193.0/24 192.88.99.0/24 192.175.48.0/24 "
    "198.18.0.0/15 198.51.100.0/24 203.0.113.0/24 224.0.0.0/4 240.0.0.0/4 "
    # of the global unicast range: IETF protocols (Teredo, benchmarks, ORCHID), documentation, 6to4, AS112
    "2001::/23 2001:db8::/32 2002::/16 3fff::/20 2620:4f:8000::/48"
)
_GLOBAL_UNICAST = ipaddress.IPv6Network("2000::/3")
_MAPPED = ipaddress.IPv6Network("::ffff:0:0/96")
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")


def embedded_ipv4(address: ipaddress.IPv6Address) -> ipaddress.IPv4Address | None:
    """Return the IPv4 address to which an IPv4-mapped address or one of NAT64's well-known prefix leads."""
    if address in _MAPPED or address in _NAT64:
        return ipaddress.IPv4Address(int(address) & 0xFFFF_FFFF)
    return None


def reach_of(address: IpAddress) -> Reach:
    """Return where an address leads.

    An IPv4-mapped address, and one of the well-known prefix of NAT64 (RFC 6052), lead where the IPv4 address in it
    leads. Other forms that carry an IPv4 address (IPv4-compatible, 6to4, Teredo, local NAT64) are refused.
    """
    if isinstance(address, ipaddress.IPv6Address):
        address = ipaddress.IPv6Address(int(address))  # without a zone
        if (inner := embedded_ipv4(address)) is not None:
            reach = reach_of(inner)
            return reach if reach is Reach.PUBLIC or address in _MAPPED else Reach.NEVER
    if any(address in each for each in _METADATA):
        return Reach.NEVER
    if any(address in each for each in _PRIVATE):
        return Reach.PRIVATE
    if any(address in each for each in _RESERVED):
        return Reach.NEVER
    outside = isinstance(address, ipaddress.IPv6Address) and address not in _GLOBAL_UNICAST
    return Reach.NEVER if outside else Reach.PUBLIC
