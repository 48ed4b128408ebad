"""Fabric of multi-node gangs: interface, network and devices of a pool, and which of them exist here."""

from __future__ import annotations

import glob
import ipaddress
import os
import stat
from typing import Any, Dict, Iterable, List, Mapping, Sequence

from agents.node.errors import AgentError, invalid_spec
from agents.node.host.interfaces import list_interfaces
from agents.node.runtimes import Runtime
from agents.node.spec.task_spec import parse_fabric


def expand_device_patterns(patterns: Iterable[str], allowed: Sequence[str]) -> List[str]:
    """Return the devices that names and patterns match, without duplicates, in order.

    Refuse a device that is not allowed (``allowed``: devices or folders), is missing, or is no character
    device. Folders that match a pattern are skipped.
    """
    found: Dict[str, None] = {}
    for pattern in patterns:
        plain = not glob.has_magic(pattern)
        matches = (
            [pattern] if plain else [path for path in sorted(glob.glob(pattern)) if not os.path.isdir(path)]
        )
        for path in matches:
            if not _is_allowed(os.path.realpath(path), allowed):
                raise invalid_spec(f"{path} is not one of the fabric devices that this node allows for jobs.")
        if not matches or not os.path.exists(matches[0]):
            raise invalid_spec(f"This node has no {pattern}.")
        for path in matches:
            if not stat.S_ISCHR(os.stat(path).st_mode):
                raise invalid_spec(f"{path} is not a character device.")
            found[path] = None
    return list(found)


def list_fabric_devices(allowed: Sequence[str]) -> List[str]:
    """Return all allowed character devices."""
    patterns = [pattern for each in allowed for pattern in (each, f"{each}/*", f"{each}/*/*")]
    paths = sorted({path for pattern in patterns for path in glob.glob(pattern)})
    real = [path for path in paths if _is_allowed(os.path.realpath(path), allowed)]
    return [path for path in real if stat.S_ISCHR(os.stat(path).st_mode)]


def _is_allowed(real: str, allowed: Sequence[str]) -> bool:
    roots = {os.path.realpath(each) for each in allowed}
    return real.startswith("/dev/") and any(real == root or real.startswith(root + "/") for root in roots)


def check_fabric(raw: Any, runtimes: Mapping[str, Runtime], allowed_devices: Sequence[str]) -> Dict[str, Any]:
    """Return a check of the fabric that the pool names (field ``fabric`` of a preflight)."""
    named = parse_fabric(raw)
    runtime = runtimes.get(named.runtime)
    lacks: List[str] = []
    if named.interface and not _has_interface(named.interface):
        lacks.append(f"There is no interface {named.interface} with an address.")
    try:
        devices = expand_device_patterns(named.devices, allowed_devices)
    except AgentError as error:
        lacks.append(error.message)
    if runtime is None or runtime.kind == "process":
        if named.network or named.devices:
            lacks.append(
                "Plain processes cannot use container networks or devices: this needs a container runtime."
            )
    elif named.network and named.network not in [each["name"] for each in runtime.external_networks() or ()]:
        lacks.append(f"{runtime.kind} has no network {named.network}.")
    words = [] if lacks else [each for each in (named.interface, named.network, *devices) if each]
    message = " ".join(lacks) or f"All requirements of the pool are met: {', '.join(words)}."
    return {"name": "fabric", "ok": not lacks, "message": message}


def _has_interface(named: str) -> bool:
    """Return True when ``named`` is an interface, or a network that contains an address of one."""
    reported = list_interfaces()
    if "/" not in named:
        return any(each.name == named for each in reported)
    network = ipaddress.ip_network(named)
    return any(ipaddress.ip_interface(own).ip in network for each in reported for own in each.addresses)
