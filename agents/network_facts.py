"""What a node says of its networks: interfaces by which others reach it, and networks that its engines know."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from agents.wire import Fields, Malformed

Wire = Mapping[str, Any]


@dataclass(frozen=True)
class InterfaceState:
    """A network interface of the node; ``chosen`` is the one by which it takes other nodes to reach it."""

    name: str
    address: str
    prefix: int
    speed_mbit: int | None
    chosen: bool
    addresses: tuple[str, ...] = ()  # each with the bits of its network; the first is ``address``

    @classmethod
    def from_wire(cls, row: Wire) -> InterfaceState:
        read = Fields(row)
        address, prefix = address_of(read.name("address", 64)), read.whole("prefix", most=128)
        return cls(
            read.name("name", 32),
            address,
            prefix,
            read.whole_or_none("speed_mbit"),
            read.flag("chosen"),
            read.list_of("addresses", _interface, 64) or (_interface(f"{address}/{prefix}"),),
        )


def network_facts(row: Wire) -> dict[str, Any]:
    """What a hello tells of the networks of its node, as JSON; of each only where it is told."""
    read = Fields(row)
    found: dict[str, Any] = {}
    if "interfaces" in read:
        told = read.list_of("interfaces", InterfaceState.from_wire, 512)
        found["interfaces"] = [vars(each) | {"addresses": list(each.addresses)} for each in told]
    if "fabric" in read:
        found["fabric"] = list(read.names("fabric", 4096))
    if "networks" in read:
        found["networks"] = read.pairs_of("networks", networks_of, 16)
    return found


def address_of(text: str) -> str:
    """The address of a machine, as it was sent. Malformed for anything else."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        raise Malformed(f"{text[:64]!a} is no address") from None
    if address.is_unspecified or address.is_multicast:
        raise Malformed(f"{address} is not the address of a machine")
    return text


def _interface(text: Any) -> str:
    address, slash, bits = text.partition("/") if isinstance(text, str) else ("", "", "")
    try:
        ipaddress.ip_interface(f"{address_of(address)}{slash}{bits}")
    except ValueError:
        raise Malformed(f"{address[:64]!a} is no address with the bits of its network") from None
    return str(text)


def networks_of(rows: Any) -> list[dict[str, Any]] | None:
    """The networks of one engine; None where it does not say. People make them: one we cannot read is left out."""
    return None if rows is None else list(Fields({"networks": rows}).readable("networks", _network, 1024))


def _network(row: Any) -> dict[str, Any]:
    read = Fields(row)
    subnets = read.list_of("subnets", _subnet, 64)
    return {
        "name": read.name("name"),
        "driver": read.name_or_none("driver", 64),
        "subnets": list(subnets),
    }


def _subnet(row: Any) -> dict[str, Any]:
    """A network with the first and last address that its engine gives out there."""
    read = Fields(row)
    try:
        subnet = ipaddress.ip_network(read.name("subnet", 64))
        span = [ipaddress.ip_address(each) for each in read.names("range", 2, 64)]
        gateway = read.name_or_none("gateway", 64) or None
        if gateway is not None:
            ipaddress.ip_address(gateway)
    except ValueError as problem:
        raise Malformed(f"subnets: {str(problem)[:80]!a}") from None
    if len(span) != 2 or any(end not in subnet for end in span) or int(span[0]) > int(span[1]):
        raise Malformed("subnets: a range lies outside its network")
    return {"subnet": str(subnet), "range": [str(each) for each in span], "gateway": gateway}
