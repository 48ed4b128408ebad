"""Network part of the wire protocol: interfaces of a node, and networks of its engines."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from agents.wire.fields import FieldReader, InvalidMessageError

JsonObject = Mapping[str, Any]


@dataclass(frozen=True)
class NetworkInterface:
    """A network interface of the node; ``chosen``: the one for connections from other nodes."""

    name: str
    address: str
    prefix: int
    speed_mbit: int | None
    chosen: bool
    addresses: tuple[str, ...] = ()  # each with prefix length; the first is ``address``

    @classmethod
    def from_wire(cls, row: JsonObject) -> NetworkInterface:
        read = FieldReader(row)
        address, prefix = parse_address(read.name("address", 64)), read.integer("prefix", maximum=128)
        return cls(
            read.name("name", 32),
            address,
            prefix,
            read.integer_or_none("speed_mbit"),
            read.boolean("chosen"),
            read.list_of("addresses", _parse_interface_address, 64)
            or (_parse_interface_address(f"{address}/{prefix}"),),
        )


def parse_network_info(row: JsonObject) -> dict[str, Any]:
    """Return the network fields of a hello as JSON; fields that are not reported are omitted."""
    read = FieldReader(row)
    found: dict[str, Any] = {}
    if "interfaces" in read:
        reported = read.list_of("interfaces", NetworkInterface.from_wire, 512)
        found["interfaces"] = [vars(each) | {"addresses": list(each.addresses)} for each in reported]
    if "fabric_devices" in read:
        found["fabric_devices"] = list(read.names("fabric_devices", 4096))
    if "networks" in read:
        found["networks"] = read.mapping_of("networks", parse_networks, 16)
    return found


def parse_address(text: str) -> str:
    """Return the address unchanged. Raise InvalidMessageError unless it is a unicast host address."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        raise InvalidMessageError(f"{text[:64]!a} is not an address") from None
    if address.is_unspecified or address.is_multicast:
        raise InvalidMessageError(f"{address} is not a unicast address")
    return text


def _parse_interface_address(text: Any) -> str:
    address, slash, bits = text.partition("/") if isinstance(text, str) else ("", "", "")
    try:
        ipaddress.ip_interface(f"{parse_address(address)}{slash}{bits}")
    except ValueError:
        raise InvalidMessageError(f"{address[:64]!a} is not an address with a prefix length") from None
    return str(text)


def parse_networks(rows: Any) -> list[dict[str, Any]] | None:
    """Return the networks of one engine; None when not reported. Invalid (user-defined) ones are skipped."""
    return (
        None
        if rows is None
        else list(FieldReader({"networks": rows}).valid_items("networks", _parse_network, 1024))
    )


def _parse_network(row: Any) -> dict[str, Any]:
    read = FieldReader(row)
    subnets = read.list_of("subnets", _parse_subnet, 64)
    return {
        "name": read.name("name"),
        "driver": read.name_or_none("driver", 64),
        "subnets": list(subnets),
    }


def _parse_subnet(row: Any) -> dict[str, Any]:
    """Return a subnet with the first and last address that its engine assigns."""
    read = FieldReader(row)
    try:
        subnet = ipaddress.ip_network(read.name("subnet", 64))
        span = [ipaddress.ip_address(each) for each in read.names("range", 2, 64)]
        gateway = read.name_or_none("gateway", 64) or None
        if gateway is not None:
            ipaddress.ip_address(gateway)
    except ValueError as problem:
        raise InvalidMessageError(f"subnets: {str(problem)[:80]!a}") from None
    if len(span) != 2 or any(end not in subnet for end in span) or int(span[0]) > int(span[1]):
        raise InvalidMessageError("subnets: a range lies outside its network")
    return {"subnet": str(subnet), "range": [str(each) for each in span], "gateway": gateway}
