"""What a pool may name for gangs on several nodes, and what this node has of it: interface, network, devices."""

from __future__ import annotations

import glob
import ipaddress
import os
import stat
from typing import Any, Dict, Iterable, List, Mapping, Sequence

from agents.node.errors import AgentError, invalid_spec
from agents.node.network.interfaces import list_interfaces
from agents.node.runtimes import Runtime
from agents.node.spec.task_spec import parse_fabric


def expand_device_patterns(patterns: Iterable[str], allowed: Sequence[str]) -> List[str]:
    """The devices that these names and patterns mean here, each once, in their order.

    Refused for one that this node does not lend (``lent``: devices, or folders of them), has not, or that is no
    character device. Folders among the matches of a pattern are passed over.
    """
    found: Dict[str, None] = {}
    for pattern in patterns:
        plain = not glob.has_magic(pattern)
        matches = (
            [pattern] if plain else [path for path in sorted(glob.glob(pattern)) if not os.path.isdir(path)]
        )
        for path in matches:
            if not _is_allowed(os.path.realpath(path), allowed):
                raise invalid_spec(f"{path} is not among the fabric devices that this node lends to jobs.")
        if not matches or not os.path.exists(matches[0]):
            raise invalid_spec(f"This node has no {pattern}.")
        for path in matches:
            if not stat.S_ISCHR(os.stat(path).st_mode):
                raise invalid_spec(f"{path} is no character device.")
            found[path] = None
    return list(found)


def list_fabric_devices(allowed: Sequence[str]) -> List[str]:
    """Every character device that this node lends."""
    patterns = [pattern for each in allowed for pattern in (each, f"{each}/*", f"{each}/*/*")]
    paths = sorted({path for pattern in patterns for path in glob.glob(pattern)})
    real = [path for path in paths if _is_allowed(os.path.realpath(path), allowed)]
    return [path for path in real if stat.S_ISCHR(os.stat(path).st_mode)]


def _is_allowed(real: str, allowed: Sequence[str]) -> bool:
    roots = {os.path.realpath(each) for each in allowed}
    return real.startswith("/dev/") and any(real == root or real.startswith(root + "/") for root in roots)


def check_fabric(raw: Any, runtimes: Mapping[str, Runtime], allowed_devices: Sequence[str]) -> Dict[str, Any]:
    """Whether this node has what its pool names (the field ``fabric`` of a preflight), with a message."""
    named = parse_fabric(raw)
    runtime = runtimes.get(named.runtime)
    lacks: List[str] = []
    if named.interface and not _has_interface(named.interface):
        lacks.append(f"There is no interface {named.interface} with an address.")
    try:
        devices = expand_device_patterns(named.devices, allowed_devices)
    except AgentError as refusal:
        lacks.append(refusal.message)
    if runtime is None or runtime.kind == "process":
        if named.network or named.devices:
            lacks.append("Plain processes join no network and are handed no devices: that takes an engine.")
    elif named.network and named.network not in [each["name"] for each in runtime.external_networks() or ()]:
        lacks.append(f"{runtime.kind} has no network {named.network}.")
    if lacks:
        return {"name": "fabric", "ok": False, "message": " ".join(lacks)}
    words = [each for each in (named.interface, named.network, *devices) if each]
    return {"name": "fabric", "ok": True, "message": f"What the pool names is here: {', '.join(words)}."}


def _has_interface(named: str) -> bool:
    """``named`` is the name of an interface, or a network in which an address of one lies."""
    told = list_interfaces()
    if "/" not in named:
        return any(each.name == named for each in told)
    network = ipaddress.ip_network(named)
    return any(ipaddress.ip_interface(own).ip in network for each in told for own in each.addresses)
