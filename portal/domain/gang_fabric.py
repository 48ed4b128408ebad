"""What a pool names for gangs on several nodes, and which of it a node has: pure judgments on what its agent told."""

from __future__ import annotations

import fnmatch
import ipaddress
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from portal.domain.states import RuntimeKind

_INTERFACE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,14}")
_NETWORK = re.compile(r"(?!fw-|(host|none)$)[A-Za-z0-9][A-Za-z0-9_.-]{0,62}")
_DEVICE = re.compile(r"/dev(/(?![.-])([A-Za-z0-9_.*?-]|\[[A-Za-z0-9_-]+\]){1,64}){1,4}")
_ADAPTERS = re.compile(r"[=^]{0,2}[A-Za-z0-9_]+(:[0-9]+)?(,[A-Za-z0-9_]+(:[0-9]+)?)*")
MAX_DEVICES = 64
CONTAINER_INTERFACE = "eth0"
"""The interface of a task in a network of its engine."""

AgentInfo = Mapping[str, Any]
"""A hello, or a part of it."""


@dataclass(frozen=True)
class GangFabric:
    """What a pool names; blank and empty: nothing.

    ``interface`` is the name of an interface, or the network (10.9.0.0/16) in which nodes reach each other;
    ``network`` one of the engine, which such tasks join in place of their node's; ``devices`` paths, or patterns,
    below /dev; ``adapters`` what NCCL_IB_HCA says.
    """

    interface: str = ""
    network: str = ""
    devices: tuple[str, ...] = ()
    adapters: str = ""

    def to_json(self) -> dict[str, Any]:
        """As the record and its audit keep it."""
        return {
            "fabric_interface": self.interface,
            "fabric_network": self.network,
            "fabric_devices": list(self.devices),
            "fabric_adapters": self.adapters,
        }


@dataclass(frozen=True)
class InterfaceAddress:
    """How a node is reached by others: its interface, and its address there."""

    interface: str
    address: str


def fabric_errors(fabric: GangFabric) -> dict[str, str]:
    """What is wrong with what somebody typed, as a message by field; empty: nothing."""
    found = {}
    if fabric.interface and not _is_interface(fabric.interface):
        found["fabric_interface"] = "Neither the name of an interface nor a network such as 10.9.0.0/16."
    if fabric.network and not _NETWORK.fullmatch(fabric.network):
        found["fabric_network"] = "Not a name that a network of an engine of yours can have."
    if fabric.interface and fabric.network:
        found["fabric_interface"] = (
            "In a network of the engine a task has an interface of its own: leave one blank."
        )
    wrong = next((each for each in fabric.devices if not _DEVICE.fullmatch(each)), None)
    if wrong is not None:
        found["fabric_devices"] = f"{wrong} is no device below /dev."
    elif len(fabric.devices) > MAX_DEVICES:
        found["fabric_devices"] = f"At most {MAX_DEVICES} devices."
    if fabric.adapters and not _ADAPTERS.fullmatch(fabric.adapters):
        found["fabric_adapters"] = "Not what NCCL_IB_HCA takes, such as mlx5_0,mlx5_1."
    return found


def _is_interface(text: str) -> bool:
    return bool(_INTERFACE.fullmatch(text)) if "/" not in text else _subnet(text) is not None


def _subnet(text: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network | None:
    try:
        return ipaddress.ip_network(text)
    except ValueError:
        return None


def node_address(
    interfaces: Sequence[AgentInfo], override: str, pool_interface: str
) -> InterfaceAddress | None:
    """How others reach a node that told of these interfaces; None: not at all.

    An administrator's choice for the node comes first, then what its pool names, then what its agent found.
    """
    if override or (pool_interface and "/" not in pool_interface):
        return next(
            (_first_address(each) for each in interfaces if each["name"] == (override or pool_interface)),
            None,
        )
    if not pool_interface:
        return next((_first_address(each) for each in interfaces if each["chosen"]), None)
    subnet = _subnet(pool_interface)
    own = [(each, ipaddress.ip_interface(address).ip) for each in interfaces for address in _addresses(each)]
    return next(
        (InterfaceAddress(str(each["name"]), str(ip)) for each, ip in own if subnet and ip in subnet), None
    )


def _first_address(interface: AgentInfo) -> InterfaceAddress:
    return InterfaceAddress(str(interface["name"]), str(interface["address"]))


def _addresses(interface: AgentInfo) -> Sequence[str]:
    """Agents of before tell one."""
    return interface.get("addresses") or (str(interface["address"]),)


def missing_requirements(
    agent_info: AgentInfo, runtime: str, interface_override: str, fabric: GangFabric
) -> str:
    """What a node has not of what its pool names, as sentences; blank: nothing, or its agent does not say.

    What is not told is left to the start, where the node itself refuses.
    """
    lacks = []
    interfaces = agent_info.get("interfaces")
    if (
        fabric.interface
        and not interface_override
        and interfaces
        and node_address(interfaces, "", fabric.interface) is None
    ):
        what = "no address in" if "/" in fabric.interface else "no interface"
        lacks.append(f"It has {what} {fabric.interface}.")
    if runtime == RuntimeKind.PROCESS.value:
        if fabric.network or fabric.devices:
            lacks.append("It runs plain processes, which join no network and are handed no devices.")
        return " ".join(lacks)
    told = (agent_info.get("networks") or {}).get(runtime)
    if fabric.network and told is not None:
        named = next((each for each in told if each["name"] == fabric.network), None)
        if named is None:
            lacks.append(f"Its {runtime} has no network {fabric.network}.")
        elif not named["subnets"]:
            lacks.append(f"Its network {fabric.network} gives out no addresses that are known beforehand.")
    here = agent_info.get("fabric")
    missing = [] if here is None else [each for each in fabric.devices if not _has_device(here, each)]
    if missing:
        lacks.append(f"It lends no {', '.join(missing)}.")
    return " ".join(lacks)


def _has_device(devices: Collection[str], pattern: str) -> bool:
    return pattern in devices or any(fnmatch.fnmatchcase(each, pattern) for each in devices)


def allocatable_addresses(network: AgentInfo) -> list[str]:
    """Addresses of an engine's network for those that must be known beforehand, best first; at most 256.

    Engines give them out from the first one on, so these come from the last one down, and no further than the middle.
    The last one of all is that of everybody in IPv4, and the gateway's is taken.
    """
    found: list[str] = []
    for each in network["subnets"]:
        subnet = ipaddress.ip_network(each["subnet"])
        first, last = (ipaddress.ip_address(end) for end in each["range"])
        taken = {
            subnet[-1],
            subnet[0],
            ipaddress.ip_address(each["gateway"]) if each.get("gateway") else None,
        }
        middle = int(first) + (int(last) - int(first)) // 2
        numbers = range(int(last), max(middle, int(last) - 260), -1)
        found += [str(ip) for ip in (type(first)(number) for number in numbers) if ip not in taken]
    return found[:256]


def format_endpoint(address: str, port: int) -> str:
    """Where a gang meets, for people: an address of IPv6 stands in brackets."""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
