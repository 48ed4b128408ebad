"""Typed messages of the wire protocol: hello, GPUs, networks, samples. Unknown values are None.

The annotation of each field defines what it may contain (``agents.wire.fields.Message``).
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from agents.wire.fields import (
    MAX_SAFE_INTEGER,
    FieldReader,
    InvalidMessageError,
    Message,
    check_integer,
    clean_text,
    wire,
)

CUDA_VERSION = re.compile(r"[0-9]{1,3}\.[0-9]{1,3}")
GPU_HEALTH_STATES = ("ok", "lost", "quarantined")
MAX_GPUS = 256
MAX_TASKS = 4096
MAX_ATTEMPT = 1_000_000
MAX_PORT = 65_535
MAX_TIMESTAMP_S = 1e11
"""Upper bound of Unix times; all values up to it convert to a date."""
MAX_MIB = 2**50
MAX_PUBLIC_ID_LENGTH = 64
MAX_UUID_LENGTH = 96
MAX_GPU_WATTS = 10_000.0
"""Larger values are measurement errors."""


def if_reported(read: FieldReader, key: str, method: Callable[..., Any], *arguments: Any) -> Any:
    """Return what ``method`` reads; None for a field that the agent does not report."""
    return method(read, key, *arguments) if key in read else None


Flag = Annotated[bool, wire(FieldReader.boolean)]
Uuid = Annotated[str, wire(FieldReader.name, MAX_UUID_LENGTH)]
PublicId = Annotated[str, wire(FieldReader.name, MAX_PUBLIC_ID_LENGTH)]
Number = Annotated[int, wire(FieldReader.integer, 0, MAX_ATTEMPT)]
"""Number of an attempt or a task."""
ShortName = Annotated[str, wire(FieldReader.name, 64)]
ShortNameOrNone = Annotated[str | None, wire(FieldReader.name_or_none, 64)]
LineOrNone = Annotated[str | None, wire(FieldReader.text_or_none, 500)]
CountOrNone = Annotated[int | None, wire(FieldReader.integer_or_none)]
MibOrNone = Annotated[int | None, wire(FieldReader.integer_or_none, 0, MAX_MIB)]
MeasuredMib = Annotated[int | None, wire(FieldReader.number_or_none, 0, MAX_MIB)]
Quantity = Annotated[float | None, wire(FieldReader.number_or_none, 0)]
GpuHealth = Annotated[str, wire(FieldReader.choice, GPU_HEALTH_STATES)]
NumaNode = Annotated[int | None, wire(FieldReader.integer_or_none, 0, 32_767)]


@dataclass(frozen=True)
class GpuInfo(Message):
    """A GPU of the node; older agents omit the later fields."""

    uuid: Uuid
    index: Annotated[int, wire(FieldReader.integer, 0, MAX_PORT)]
    model: Annotated[str, wire(FieldReader.name, 100)]
    memory_mib: CountOrNone
    simulated: Flag
    health: GpuHealth
    health_message: LineOrNone = None
    nvlink_island: NumaNode = None
    compute_capability: Annotated[float | None, wire(FieldReader.number_or_none, 0, 1000)] = None
    mig_profile: Annotated[str | None, wire(FieldReader.name_or_none, 32)] = None
    driver_reserved_mib: CountOrNone = None
    bus_id: Annotated[str | None, wire(FieldReader.name_or_none, 32)] = None
    numa_node: NumaNode = None
    fatal: Flag = False
    ecc_uncorrected: Annotated[int | None, wire(FieldReader.integer_or_none, 0, MAX_SAFE_INTEGER)] = None


@dataclass(frozen=True)
class GpuLink(Message):
    """Link of two GPUs (UUIDs): number of NVLinks (0 none, None unknown) and PCIe level."""

    a: Uuid
    b: Uuid
    nvlinks: Annotated[int | None, wire(FieldReader.integer_or_none, 0, 1000)]
    level: Annotated[str | None, wire(FieldReader.name_or_none, 12)]


def _read_image_cuda(read: FieldReader, key: str) -> str | None:
    """Return a CUDA version; None for other text, which image authors choose."""
    cuda = read.name_or_none(key, 64)
    return cuda if cuda is not None and CUDA_VERSION.fullmatch(cuda) else None


@dataclass(frozen=True)
class ImageInfo(Message):
    """An image on the node; ``image_id`` is its config digest."""

    image_id: Annotated[str, wire(FieldReader.name)]
    runtime: Annotated[str, wire(FieldReader.name, 16)]
    refs: Annotated[tuple[str, ...], wire(FieldReader.names, 256, 1024)]
    digests: Annotated[tuple[str, ...], wire(FieldReader.names, 256, 1024)]
    size_mib: MibOrNone
    cuda: Annotated[str | None, wire(_read_image_cuda)] = None  # minimum CUDA version of the driver: 12.4


@dataclass(frozen=True)
class GpuSharing(Message):
    """Whether a node enforces GPU shares, and a message how, or why not."""

    enforced: Flag
    message: Annotated[str, wire(FieldReader.text, 500)]


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
    def from_wire(cls, row: Any) -> NetworkInterface:
        read = FieldReader(row)
        address, prefix = _parse_address(read.name("address", 64)), read.integer("prefix", maximum=128)
        return cls(
            read.name("name", 32),
            address,
            prefix,
            read.integer_or_none("speed_mbit"),
            read.boolean("chosen"),
            read.list_of("addresses", _parse_interface_address, 64)
            or (_parse_interface_address(f"{address}/{prefix}"),),
        )


def parse_network_info(row: Any) -> dict[str, Any]:
    """Return the network fields of a hello as JSON; fields that are not reported are omitted."""
    read = FieldReader(row)
    found: dict[str, Any] = {}
    if "interfaces" in read:
        reported = read.list_of("interfaces", NetworkInterface.from_wire, 512)
        found["interfaces"] = [vars(each) | {"addresses": list(each.addresses)} for each in reported]
    if "fabric_devices" in read:
        found["fabric_devices"] = list(read.names("fabric_devices", 4096))
    if "networks" in read:
        found["networks"] = read.mapping_of("networks", _parse_networks, 16)
    return found


def _parse_address(text: str) -> str:
    """Return the address unchanged. Raise InvalidMessageError unless it is a unicast host address."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        raise InvalidMessageError(f"{text[:64]!a} is not an address") from None
    if address.is_unspecified or address.is_multicast or "%" in text:  # a zone means nothing elsewhere
        raise InvalidMessageError(f"{address} is not a unicast address")
    return text


def _parse_interface_address(text: Any) -> str:
    address, slash, bits = text.partition("/") if isinstance(text, str) else ("", "", "")
    try:
        ipaddress.ip_interface(f"{_parse_address(address)}{slash}{bits}")
    except ValueError:
        raise InvalidMessageError(f"{address[:64]!a} is not an address with a prefix length") from None
    return str(text)


def _parse_networks(rows: Any) -> list[dict[str, Any]] | None:
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
    except ValueError as error:
        raise InvalidMessageError(f"subnets: {str(error)[:80]!a}") from None
    if len(span) != 2 or any(end not in subnet for end in span) or int(span[0]) > int(span[1]):
        raise InvalidMessageError("subnets: a range lies outside its network")
    return {"subnet": str(subnet), "range": [str(each) for each in span], "gateway": gateway}


def read_images(read: FieldReader, key: str = "images") -> tuple[ImageInfo, ...]:
    """Return the images of a message; invalid ones are skipped, because users import some themselves."""
    return tuple(read.valid_items(key, ImageInfo.from_wire, 20_000))


def _read_loopback(read: FieldReader, key: str) -> str:
    return _parse_address(read.name_or_none(key, 64) or "127.77.0.1")


def _read_port_range(read: FieldReader, key: str) -> tuple[int, int]:
    ports = read.list_of(key, _parse_port, 2)
    if len(ports) != 2 or ports[0] > ports[1]:
        raise InvalidMessageError(f"{key} is not a first and a last port")
    return ports[0], ports[1]


def _parse_port(value: Any) -> int:
    return check_integer(value, 1024, MAX_PORT)


def _parse_runtime(row: Any) -> tuple[str, str | None]:
    read = FieldReader(row)
    return read.name("kind", 16), read.text_or_none("version", 64)


def _parse_version(value: Any) -> str | None:
    return None if value is None else clean_text(value, 300)


def _parse_version_warning(value: Any) -> str:
    return clean_text(value, 500)


def _parse_boolean(value: Any) -> bool:
    if not isinstance(value, bool):
        raise InvalidMessageError("a value is not true or false")
    return value


def _parse_storage(row: Any) -> dict[str, Any]:
    read = FieldReader(row)
    return {
        "use": read.name("use", 16),
        "path": read.name("path", 4096),
        "filesystem": read.name("filesystem", 32),
        "size_mib": read.integer_or_none("size_mib", maximum=MAX_MIB),
        "free_mib": read.integer_or_none("free_mib", maximum=MAX_MIB),
        "quotas": read.boolean("quotas"),
    }


@dataclass(frozen=True)
class Hello(Message):
    """First message of an agent; ``clock_s`` is the node's Unix time when it was written."""

    protocol: Annotated[int, wire(FieldReader.integer, 0, 10_000)]
    agent_version: Annotated[str, wire(FieldReader.name, 32)]
    cluster: ShortName
    boot_id: ShortName
    hostname: Annotated[str, wire(FieldReader.text, 255)]
    python: Annotated[str, wire(FieldReader.text, 64)]
    clock_s: Annotated[float, wire(FieldReader.number, 0, MAX_TIMESTAMP_S)]
    cpu_count: Annotated[int, wire(FieldReader.integer, 0, 100_000)]
    memory_mib: CountOrNone
    disk_free_mib: MibOrNone
    loopback: Annotated[str, wire(_read_loopback)]
    runtimes: Annotated[tuple[tuple[str, str | None], ...], wire(FieldReader.list_of, _parse_runtime, 16)]
    gpus: Annotated[tuple[GpuInfo, ...], wire(FieldReader.list_of, GpuInfo.from_wire, MAX_GPUS)]
    driver: ShortNameOrNone
    version_warnings: Annotated[tuple[str, ...], wire(FieldReader.list_of, _parse_version_warning, 64)]
    images: Annotated[tuple[ImageInfo, ...], wire(read_images)]
    highest_epoch: Annotated[int, wire(FieldReader.integer, 0, MAX_SAFE_INTEGER)]
    # whether the runtime ``process`` gives each task its own account
    per_user_isolation: Annotated[bool, wire(FieldReader.boolean, True)]
    # optional features and spec keys that the agent supports
    capabilities: Annotated[tuple[str, ...], wire(FieldReader.names, 256, 64)]
    # None: the agent does not report them
    links: Annotated[
        tuple[GpuLink, ...] | None, wire(if_reported, FieldReader.list_of, GpuLink.from_wire, 20_000)
    ] = None
    gpu_driver_error: LineOrNone = None  # why GPUs could not be listed; ``gpus`` is then meaningless
    # by tool; None: not installed or unknown
    versions: Annotated[Mapping[str, str | None], wire(FieldReader.mapping_of, _parse_version, 64)] = field(
        default_factory=dict
    )
    # empty: the agent does not report them
    interfaces: Annotated[
        tuple[NetworkInterface, ...], wire(FieldReader.list_of, NetworkInterface.from_wire, 512)
    ] = ()
    # first and last port for rendezvous
    rendezvous_ports: Annotated[tuple[int, int] | None, wire(if_reported, _read_port_range)] = None
    # file systems of volumes: use, path, filesystem, MiB, quotas
    storage: Annotated[tuple[Mapping[str, Any], ...], wire(FieldReader.list_of, _parse_storage, 64)] = ()
    agent_digest: ShortNameOrNone = None  # SHA-256 of the running archive
    # highest CUDA version of the driver; None: no driver or not reported
    max_cuda_version: Annotated[str | None, wire(FieldReader.name_or_none, 16, CUDA_VERSION)] = None
    # version of the loader, 0 when it reports none; None: not reported
    loader_version: Annotated[int | None, wire(FieldReader.integer_or_none, 0, 1_000_000)] = None
    # None: no GPUs, or not supported by the agent
    gpu_sharing: Annotated[GpuSharing | None, wire(FieldReader.object_or_none, GpuSharing.from_wire)] = None
    # fabric devices that it may pass to gangs; None: not reported
    fabric_devices: Annotated[tuple[str, ...] | None, wire(if_reported, FieldReader.names, 4096)] = None
    # by engine, user-defined networks: name, driver, subnets
    networks: Annotated[
        Mapping[str, Any] | None, wire(if_reported, FieldReader.mapping_of, _parse_networks, 16)
    ] = None
    # by runtime, whether network policies are enforced
    egress: Annotated[Mapping[str, bool], wire(FieldReader.mapping_of, _parse_boolean, 16)] = field(
        default_factory=dict
    )
    # by runtime without networks of its own, whether ports of a task are closed to tasks of other accounts
    closes_ports: Annotated[Mapping[str, bool], wire(FieldReader.mapping_of, _parse_boolean, 16)] = field(
        default_factory=dict
    )


@dataclass(frozen=True)
class GpuProcess(Message):
    """A process on a GPU; ``foreign``: it belongs to no job, then with account and command."""

    pid: Annotated[int, wire(FieldReader.integer)]
    memory_mib: MeasuredMib
    job: ShortNameOrNone
    attempt: Annotated[int | None, wire(FieldReader.integer_or_none, 0, MAX_ATTEMPT)]
    foreign: Flag
    account: Annotated[str | None, wire(FieldReader.text_or_none, 64)] = None
    command: Annotated[str | None, wire(FieldReader.text_or_none, 128)] = None


@dataclass(frozen=True)
class GpuSample(Message):
    """One sample of a GPU. ``energy_joules``: its energy counter since its driver was loaded."""

    uuid: Uuid
    utilisation_percent: Annotated[float | None, wire(FieldReader.number_or_none, 0, 100)]
    memory_used_mib: MeasuredMib
    power_watts: Annotated[float | None, wire(FieldReader.number_or_none, 0, MAX_GPU_WATTS)]
    temperature_c: Annotated[float | None, wire(FieldReader.number_or_none, -1000, 10_000)]
    health: GpuHealth
    processes: Annotated[tuple[GpuProcess, ...], wire(FieldReader.list_of, GpuProcess.from_wire, 4096)]
    energy_joules: Quantity = None


@dataclass(frozen=True)
class TaskSample(Message):
    job: PublicId
    attempt: Number
    task: Number
    cpu_percent: Quantity
    memory_mib: MeasuredMib


@dataclass(frozen=True)
class NodeSample(Message):
    """One sample of a node; ``at_s`` is the node's Unix time."""

    at_s: Annotated[float, wire(FieldReader.number, 0, MAX_TIMESTAMP_S)]
    cpu_percent: Quantity
    memory_used_mib: MeasuredMib
    disk_free_mib: MeasuredMib
    gpus: Annotated[tuple[GpuSample, ...], wire(FieldReader.list_of, GpuSample.from_wire, MAX_GPUS)] = ()
    tasks: Annotated[tuple[TaskSample, ...], wire(FieldReader.list_of, TaskSample.from_wire, MAX_TASKS)] = ()
