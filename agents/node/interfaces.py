"""The network interfaces of this machine, and the one by which nodes reach each other."""

from __future__ import annotations

import fcntl
import ipaddress
import os
import socket
import struct
from typing import Dict, List, NamedTuple, Optional

from agents.node.machine import read_text

_SIOCGIFADDR, _SIOCGIFNETMASK = 0x8915, 0x891B
_FOLDER = "/sys/class/net"
_NO_ROUTE_METRIC = 1 << 32


class Interface(NamedTuple):
    """One interface with an IPv4 address. ``chosen``: by it the ranks of gangs meet, unless people say otherwise."""

    name: str
    address: str
    prefix: int  # bits of the network
    speed_mbit: Optional[int]  # None: it does not say
    chosen: bool


def interfaces() -> List[Interface]:
    """The interfaces by which other machines may be reached, by name.

    Loopback is none of them, nor are the bridges of engines unless the default route leads there. Chosen is the one
    of the default route with the lowest metric; where there is none, the fastest.
    """
    addresses = {
        name: network
        for _, name in socket.if_nameindex()
        if name != "lo" and (network := _network(name)) is not None
    }
    metrics = _default_metrics()
    addresses = {
        name: network
        for name, network in addresses.items()
        if name in metrics or not os.path.isdir(os.path.join(_FOLDER, name, "bridge"))
    }
    speeds = {name: _speed_mbit(name) for name in addresses}
    order = sorted(
        addresses, key=lambda name: (metrics.get(name, _NO_ROUTE_METRIC), -(speeds[name] or 0), name)
    )
    return [
        Interface(name, str(network.ip), network.network.prefixlen, speeds[name], chosen=name == order[0])
        for name, network in sorted(addresses.items())
    ]


def _network(name: str) -> Optional[ipaddress.IPv4Interface]:
    """The first IPv4 address of an interface; None when it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        request = struct.pack("256s", name.encode()[:15])
        try:
            address = fcntl.ioctl(asking.fileno(), _SIOCGIFADDR, request)[20:24]
            mask = fcntl.ioctl(asking.fileno(), _SIOCGIFNETMASK, request)[20:24]
        except OSError:
            return None
    return ipaddress.IPv4Interface(f"{socket.inet_ntoa(address)}/{socket.inet_ntoa(mask)}")


def _default_metrics() -> Dict[str, int]:
    """The lowest metric of a default route by interface."""
    metrics: Dict[str, int] = {}
    for line in (read_text("/proc/net/route") or "").splitlines()[1:]:
        words = line.split()
        if words[1] == "00000000" and words[7] == "00000000":
            metrics[words[0]] = min(int(words[6]), metrics.get(words[0], _NO_ROUTE_METRIC))
    return metrics


def _speed_mbit(name: str) -> Optional[int]:
    text = (read_text(os.path.join(_FOLDER, name, "speed")) or "").strip()
    return int(text) if text.isdigit() else None
