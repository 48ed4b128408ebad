"""The network and devices that a pool names for multi-node gangs, and which of them a node has.

Pure functions.
"""

from __future__ import annotations

import fnmatch
import ipaddress
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from portal.domain.states import RuntimeKind
from portal.domain.stored_texts import stored_text

_INTERFACE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,14}")
_NETWORK = re.compile(r"(?!fw-|(host|none)$)[A-Za-z0-9][A-Za-z0-9_.-]{0,62}")
_DEVICE = re.compile(r"/dev(/(?![.-])([A-Za-z0-9_.*?-]|\[[A-Za-z0-9_-]+\]){1,64}){1,4}")
_ADAPTERS = re.compile(r"[=^]{0,2}[A-Za-z0-9_]+(:[0-9]+)?(,[A-Za-z0-9_]+(:[0-9]+)?)*")
MAX_DEVICES = 64
CONTAINER_INTERFACE = "eth0"
"""The interface of a task in a container engine network."""

AgentInfo = Mapping[str, Any]
"""The hello message of an agent, or a part of it."""


@dataclass(frozen=True)
class GangFabric:
    """What a pool configures for multi-node gangs; blank or empty: not configured.

    ``interface`` is an interface name, or the subnet (10.9.0.0/16) in which nodes reach each other.
    ``network`` is a container engine network that such tasks join instead of the host network. ``devices``
    are paths or patterns below /dev. ``adapters`` is the value of NCCL_IB_HCA.
    """

    interface: str = ""
    network: str = ""
    devices: tuple[str, ...] = ()
    adapters: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return the values by the names of their database columns, as rows and audit entries store them."""
        values = asdict(self) | {"devices": list(self.devices)}
        return {f"fabric_{name}": value for name, value in values.items()}


@dataclass(frozen=True)
class InterfaceAddress:
    """The interface and address at which other nodes reach a node."""

    interface: str
    address: str


def fabric_errors(fabric: GangFabric) -> dict[str, str]:
    """Return a message by field for each invalid value; empty if all are valid."""
    found = {}
    if fabric.interface and not _is_interface(fabric.interface):
        found["fabric_interface"] = "Enter an interface name or a network such as 10.9.0.0/16."
    if fabric.network and not _NETWORK.fullmatch(fabric.network):
        found["fabric_network"] = "This is not a valid name of a container network."
    if fabric.interface and fabric.network:
        found["fabric_interface"] = (
            "Tasks in a container network have their own interface: leave one of the two blank."
        )
    wrong = next((each for each in fabric.devices if not _DEVICE.fullmatch(each)), None)
    if wrong is not None:
        found["fabric_devices"] = f"{wrong} is not a device below /dev."
    elif len(fabric.devices) > MAX_DEVICES:
        found["fabric_devices"] = f"At most {MAX_DEVICES} devices."
    if fabric.adapters and not _ADAPTERS.fullmatch(fabric.adapters):
        found["fabric_adapters"] = "This is not a valid value of NCCL_IB_HCA, such as mlx5_0,mlx5_1."
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
    """Return the interface and address at which other nodes reach a node, or None.

    The administrator's override for the node comes first, then the pool's setting, then the agent's own
    choice. ``interfaces`` are those that the agent reported.
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
    """Older agents report one address only."""
    return interface.get("addresses") or (str(interface["address"]),)


def missing_requirements(
    agent_info: AgentInfo, runtime: str, interface_override: str, fabric: GangFabric
) -> str:
    """Return what a node lacks of its pool's fabric, as sentences; blank if nothing.

    What the agent does not report is not checked here; the node itself refuses the start.
    """
    lacks = []
    interfaces = agent_info.get("interfaces")
    if (
        fabric.interface
        and not interface_override
        and interfaces
        and node_address(interfaces, "", fabric.interface) is None
    ):
        what = fabric.interface
        lacks.append(stored_text(f"It has {'no address in' if '/' in what else 'no interface'} {what}."))
    if runtime == RuntimeKind.PROCESS.value:
        if fabric.network or fabric.devices:
            lacks.append(
                stored_text("It runs plain processes, which cannot use container networks or devices.")
            )
        return " ".join(lacks)
    reported = (agent_info.get("networks") or {}).get(runtime)
    if fabric.network and reported is not None:
        named = next((each for each in reported if each["name"] == fabric.network), None)
        if named is None:
            lacks.append(stored_text(f"Its {runtime} has no network {fabric.network}."))
        elif not named["subnets"]:
            lacks.append(stored_text(f"Its network {fabric.network} does not support static addresses."))
    here = agent_info.get("fabric_devices")
    missing = [] if here is None else [each for each in fabric.devices if not _has_device(here, each)]
    if missing:
        devices = ", ".join(missing)
        lacks.append(stored_text(f"It does not allow {devices}."))
    return " ".join(lacks)


def _has_device(devices: Collection[str], pattern: str) -> bool:
    return pattern in devices or any(fnmatch.fnmatchcase(each, pattern) for each in devices)


def allocatable_addresses(network: AgentInfo) -> list[str]:
    """Return the addresses of an engine network that may be assigned in advance, best first; at most 256.

    Engines assign addresses from the start of the range, so these are taken from its end, down to the middle.
    The subnet's first and last address and the gateway are excluded.
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
    """Format host and port; an IPv6 address is put in brackets."""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
