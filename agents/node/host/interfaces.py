"""Network interfaces of this machine, and the default one between nodes."""

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
    """An interface with an address. ``chosen``: used for rendezvous unless configured otherwise."""

    name: str
    address: str  # the first of its addresses
    prefix: int  # prefix length
    speed_mbit: Optional[int]  # None: unknown
    chosen: bool
    addresses: Sequence[str] = ()  # with prefix length, such as 10.0.0.7/24: IPv4, then IPv6


def list_interfaces() -> List[Interface]:
    """Return the interfaces by which other machines may connect, by name.

    Excludes loopback, and bridges without the default route. The chosen one has the default route with the
    lowest metric, IPv4 before IPv6; without a default route it is the fastest.
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
    """Return all addresses of this machine except loopback, including bridges, without prefix length."""
    return [str(each.ip) for own in _addresses().values() for each in own]


def local_networks() -> List[str]:
    """Return all local IPv4 addresses as networks, including loopback."""
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
    """Return the gateways of default routes in the text of ``/proc/net/route``."""
    rows = (line.split() for line in table.splitlines())
    found = (words[2] for words in rows if len(words) > 7 and words[1] == words[7] == "00000000")
    return [str(ipaddress.IPv4Address(bytes.fromhex(each)[::-1])) for each in found if int(each, 16)]


def _addresses() -> Dict[str, List[_Address]]:
    """Return addresses by interface except loopback; only the first IPv4 address."""
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
    """Return (interface, address) for the lines of the kernel's table with stable global addresses.

    Excludes link-local, tentative, deprecated and temporary addresses.
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
    """Return the first IPv4 address of an interface, or None."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        request = struct.pack("256s", name.encode()[:15])
        try:
            address = fcntl.ioctl(asking.fileno(), _SIOCGIFADDR, request)[20:24]
            mask = fcntl.ioctl(asking.fileno(), _SIOCGIFNETMASK, request)[20:24]
        except OSError:
            return None
    return ipaddress.IPv4Interface(f"{socket.inet_ntoa(address)}/{socket.inet_ntoa(mask)}")


def _default_metrics() -> Dict[str, Tuple[int, int]]:
    """Return the best default route per interface as (0 for IPv4 or 1 for IPv6, metric)."""
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
