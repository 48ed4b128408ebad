"""The network interfaces of this machine, and the one by which nodes reach each other."""

from __future__ import annotations

import fcntl
import ipaddress
import os
import socket
import struct
from typing import Dict, List, NamedTuple, Optional, Sequence, Tuple, Union

from agents.node.host.procfs import read_text

_SIOCGIFADDR, _SIOCGIFNETMASK = 0x8915, 0x891B
_SYSFS_NET = "/sys/class/net"
_NO_METRIC = 1 << 32
_NO_ROUTE = 2, _NO_METRIC
_SCOPE_GLOBAL = 0x00
_TEMPORARY, _FAILED, _DEPRECATED, _TENTATIVE = 0x01, 0x08, 0x20, 0x40
_UNSTABLE_FLAGS = _TEMPORARY | _FAILED | _DEPRECATED | _TENTATIVE
"""Flags of linux/if_addr.h."""
_Address = Union[ipaddress.IPv4Interface, ipaddress.IPv6Interface]


class Interface(NamedTuple):
    """One interface with an address. ``chosen``: by it the ranks of gangs meet, unless people say otherwise."""

    name: str
    address: str  # the first of its addresses
    prefix: int  # bits of the network
    speed_mbit: Optional[int]  # None: it does not say
    chosen: bool
    addresses: Sequence[str] = ()  # each with its bits, such as 10.0.0.7/24: the IPv4 one, then those of IPv6


def list_interfaces() -> List[Interface]:
    """The interfaces by which other machines may be reached, by name.

    Loopback is none of them, nor are the bridges of engines unless the default route leads there. Chosen is the one
    of the default route with the lowest metric, of IPv4 before IPv6; where there is none, the fastest.
    """
    metrics = _default_metrics()
    found = {name: own for name, own in _addresses().items() if name in metrics or not _is_bridge(name)}
    speeds = {name: _speed_mbit(name) for name in found}
    order = sorted(found, key=lambda name: (metrics.get(name, _NO_ROUTE), -(speeds[name] or 0), name))
    return [
        Interface(
            name,
            str(own[0].ip),
            own[0].network.prefixlen,
            speeds[name],
            chosen=name == order[0],
            addresses=[str(each) for each in own],
        )
        for name, own in sorted(found.items())
    ]


def host_addresses() -> List[str]:
    """Every address of this machine but loopback, those of bridges too, without the bits of its network."""
    return [str(each.ip) for own in _addresses().values() for each in own]


def local_networks() -> List[str]:
    """Every IPv4 address of this machine as a network: all of each interface, loopback too."""
    found: List[str] = []
    address = ""
    for line in (read_text("/proc/net/fib_trie") or "").splitlines():
        words = line.split()
        if words[:1] == ["|--"]:
            address = words[1]
        elif words[1:] == ["host", "LOCAL"]:
            found.append(address + words[0])
    return sorted(set(found))


def default_gateways(table: str) -> List[str]:
    """The gateways of the default routes in the text of ``/proc/net/route``."""
    rows = (line.split() for line in table.splitlines())
    found = (words[2] for words in rows if len(words) > 7 and words[1] == words[7] == "00000000")
    return [str(ipaddress.IPv4Address(bytes.fromhex(each)[::-1])) for each in found if int(each, 16)]


def _addresses() -> Dict[str, List[_Address]]:
    """The addresses of each interface but loopback, for those that have any; of IPv4 the first alone."""
    found: Dict[str, List[_Address]] = {}
    for _, name in socket.if_nameindex():
        first = _ipv4_address(name)
        if first is not None:
            found[name] = [first]
    for name, address in stable_ipv6_addresses(read_text("/proc/net/if_inet6") or ""):
        found.setdefault(name, []).append(address)
    found.pop("lo", None)
    return found


def stable_ipv6_addresses(table: str) -> List[Tuple[str, ipaddress.IPv6Interface]]:
    """Interface and address for each line of the kernel's table that others may use for long.

    Neither addresses of one wire alone (fe80::), nor such as are not sure yet, are not to be used any more, or are
    made anew from time to time.
    """
    found = []
    for line in table.splitlines():
        address, _, prefix, scope, flags, name = line.split()
        if int(scope, 16) == _SCOPE_GLOBAL and not int(flags, 16) & _UNSTABLE_FLAGS:
            own = ipaddress.IPv6Address(int(address, 16))
            found.append((name, ipaddress.IPv6Interface(f"{own}/{int(prefix, 16)}")))
    return sorted(found)


def _is_bridge(name: str) -> bool:
    return os.path.isdir(os.path.join(_SYSFS_NET, name, "bridge"))


def _ipv4_address(name: str) -> Optional[ipaddress.IPv4Interface]:
    """The first IPv4 address of an interface; None when it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        request = struct.pack("256s", name.encode()[:15])
        try:
            address = fcntl.ioctl(asking.fileno(), _SIOCGIFADDR, request)[20:24]
            mask = fcntl.ioctl(asking.fileno(), _SIOCGIFNETMASK, request)[20:24]
        except OSError:
            return None
    return ipaddress.IPv4Interface(f"{socket.inet_ntoa(address)}/{socket.inet_ntoa(mask)}")


def _default_metrics() -> Dict[str, Tuple[int, int]]:
    """By interface, the lowest of its default routes: 0 of IPv4 or 1 of IPv6, and the metric."""
    found: List[Tuple[str, Tuple[int, int]]] = []
    for line in (read_text("/proc/net/route") or "").splitlines()[1:]:
        words = line.split()
        if words[1] == "00000000" and words[7] == "00000000":
            found.append((words[0], (0, int(words[6]))))
    for line in (read_text("/proc/net/ipv6_route") or "").splitlines():
        words = line.split()
        if not int(words[0], 16) and words[1] == "00" and words[9] != "lo":
            found.append((words[9], (1, int(words[5], 16))))
    metrics: Dict[str, Tuple[int, int]] = {}
    for name, metric in found:
        metrics[name] = min(metric, metrics.get(name, _NO_ROUTE))
    return metrics


def _speed_mbit(name: str) -> Optional[int]:
    text = (read_text(os.path.join(_SYSFS_NET, name, "speed")) or "").strip()
    return int(text) if text.isdigit() else None
