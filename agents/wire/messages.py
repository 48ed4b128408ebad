"""Typed messages of the wire protocol: hello, GPUs, containers, samples. Unknown values are None.

Each ``from_wire`` defines what an object may contain, and raises InvalidMessageError for anything else.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from agents.wire.fields import (
    MAX_INT32,
    MAX_SAFE_INTEGER,
    FieldReader,
    InvalidMessageError,
    check_integer,
    clean_text,
)
from agents.wire.networks import NetworkInterface, parse_address, parse_networks

JsonObject = Mapping[str, Any]

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


@dataclass(frozen=True)
class GpuInfo:
    """A GPU of the node; older agents omit the later fields."""

    uuid: str
    index: int
    model: str
    memory_mib: int | None
    simulated: bool
    health: str
    health_message: str | None = None
    nvlink_island: int | None = None
    compute_capability: float | None = None
    mig_profile: str | None = None
    driver_reserved_mib: int | None = None
    bus_id: str | None = None
    numa_node: int | None = None
    fatal: bool = False
    ecc_uncorrected: int | None = None

    @classmethod
    def from_wire(cls, row: JsonObject) -> GpuInfo:
        read = FieldReader(row)
        return cls(
            uuid=read.name("uuid", MAX_UUID_LENGTH),
            index=read.integer("index", maximum=MAX_PORT),
            model=read.name("model", 100),
            memory_mib=read.integer_or_none("memory_mib"),
            simulated=read.boolean("simulated"),
            health=read.choice("health", GPU_HEALTH_STATES),
            health_message=read.text_or_none("health_message", 500),
            nvlink_island=read.integer_or_none("nvlink_island", maximum=32_767),
            compute_capability=read.number_or_none("compute_capability", 0, 1000),
            mig_profile=read.name_or_none("mig_profile", 32),
            driver_reserved_mib=read.integer_or_none("driver_reserved_mib"),
            bus_id=read.name_or_none("bus_id", 32),
            numa_node=read.integer_or_none("numa_node", maximum=32_767),
            fatal=read.boolean("fatal"),
            ecc_uncorrected=read.integer_or_none("ecc_uncorrected", maximum=MAX_SAFE_INTEGER),
        )


@dataclass(frozen=True)
class GpuLink:
    """Link of two GPUs (UUIDs): number of NVLinks (0 none, None unknown) and PCIe level."""

    a: str
    b: str
    nvlinks: int | None
    level: str | None

    @classmethod
    def from_wire(cls, row: JsonObject) -> GpuLink:
        read = FieldReader(row)
        return cls(
            read.name("a", MAX_UUID_LENGTH),
            read.name("b", MAX_UUID_LENGTH),
            read.integer_or_none("nvlinks", maximum=1000),
            read.name_or_none("level", 12),
        )


@dataclass(frozen=True)
class ImageInfo:
    """An image on the node; ``image_id`` is its config digest."""

    image_id: str
    runtime: str
    refs: tuple[str, ...]
    digests: tuple[str, ...]
    size_mib: int | None
    cuda: str | None = None  # minimum CUDA version of the driver, such as 12.4

    @classmethod
    def from_wire(cls, row: JsonObject) -> ImageInfo:
        read = FieldReader(row)
        cuda = read.name_or_none("cuda", 64)
        return cls(
            image_id=read.name("image_id"),
            runtime=read.name("runtime", 16),
            refs=read.names("refs", 256, 1024),
            digests=read.names("digests", 256, 1024),
            size_mib=read.integer_or_none("size_mib", maximum=MAX_MIB),
            cuda=cuda
            if cuda is not None and CUDA_VERSION.fullmatch(cuda)
            else None,  # free text of image authors
        )


@dataclass(frozen=True)
class GpuSharing:
    """Whether a node enforces GPU shares, and a message how, or why not."""

    enforced: bool
    message: str

    @classmethod
    def from_wire(cls, row: JsonObject) -> GpuSharing:
        read = FieldReader(row)
        return cls(read.boolean("enforced"), read.text("message", 500))


@dataclass(frozen=True)
class Hello:
    """First message of an agent; ``clock_s`` is the node's Unix time when it was written."""

    protocol: int
    agent_version: str
    cluster: str
    boot_id: str
    hostname: str
    python: str
    clock_s: float
    cpu_count: int
    memory_mib: int | None
    disk_free_mib: int | None
    loopback: str
    runtimes: tuple[tuple[str, str | None], ...]
    gpus: tuple[GpuInfo, ...]
    driver: str | None
    version_warnings: tuple[str, ...]
    images: tuple[ImageInfo, ...]
    highest_epoch: int
    per_user_isolation: bool  # whether the runtime ``process`` gives each task its own account
    capabilities: tuple[str, ...]  # optional features and spec keys that the agent supports
    links: tuple[GpuLink, ...] | None = None  # None: the agent does not report them
    gpu_driver_error: str | None = None  # why GPUs could not be listed; ``gpus`` is then meaningless
    versions: Mapping[str, str | None] = field(
        default_factory=dict
    )  # by tool; None: not installed or unknown
    interfaces: tuple[NetworkInterface, ...] = ()  # empty: the agent does not report them
    rendezvous_ports: tuple[int, int] | None = None  # first and last port for rendezvous
    storage: tuple[Mapping[str, Any], ...] = ()  # file systems of volumes: use, path, filesystem, MiB, quotas
    agent_digest: str | None = None  # SHA-256 of the running archive
    max_cuda_version: str | None = None  # highest CUDA version of the driver; None: no driver or not reported
    loader_version: int | None = None  # version of the loader, 0 when it reports none; None: not reported
    gpu_sharing: GpuSharing | None = None  # None: no GPUs, or not supported by the agent
    fabric_devices: tuple[str, ...] | None = (
        None  # fabric devices that it may pass to gangs; None: not reported
    )
    networks: Mapping[str, Any] | None = None  # by engine, user-defined networks: name, driver, subnets
    # by runtime, whether network policies are enforced
    egress: Mapping[str, bool] = field(default_factory=dict)

    @classmethod
    def from_wire(cls, row: JsonObject) -> Hello:
        read = FieldReader(row)
        return cls(
            protocol=read.integer("protocol", maximum=10_000),
            agent_version=read.name("agent_version", 32),
            cluster=read.name("cluster", 64),
            boot_id=read.name("boot_id", 64),
            hostname=read.text("hostname", 255),
            python=read.text("python", 64),
            clock_s=read.number("clock_s", 0, MAX_TIMESTAMP_S),
            cpu_count=read.integer("cpu_count", maximum=100_000),
            memory_mib=read.integer_or_none("memory_mib"),
            disk_free_mib=read.integer_or_none("disk_free_mib", maximum=MAX_MIB),
            loopback=parse_address(read.name_or_none("loopback", 64) or "127.77.0.1"),
            runtimes=read.list_of("runtimes", _parse_runtime, 16),
            gpus=read.list_of("gpus", GpuInfo.from_wire, MAX_GPUS),
            driver=read.name_or_none("driver", 64),
            version_warnings=read.list_of("version_warnings", _parse_version_warning, 64),
            images=parse_images(row),
            highest_epoch=read.integer("highest_epoch", maximum=MAX_SAFE_INTEGER),
            per_user_isolation=read.boolean("per_user_isolation", default=True),
            capabilities=read.names("capabilities", 256, 64),
            links=read.list_of("links", GpuLink.from_wire, 20_000) if "links" in read else None,
            gpu_driver_error=read.text_or_none("gpu_driver_error", 500),
            versions=read.mapping_of("versions", _parse_version, 64),
            interfaces=read.list_of("interfaces", NetworkInterface.from_wire, 512),
            rendezvous_ports=_parse_port_range(read),
            storage=read.list_of("storage", _parse_storage, 64),
            agent_digest=read.name_or_none("agent_digest", 64),
            max_cuda_version=read.name_or_none("max_cuda_version", 16, CUDA_VERSION),
            loader_version=read.integer_or_none("loader_version", maximum=1_000_000),
            gpu_sharing=GpuSharing.from_wire(row["gpu_sharing"]) if "gpu_sharing" in read else None,
            fabric_devices=read.names("fabric_devices", 4096) if "fabric_devices" in read else None,
            networks=read.mapping_of("networks", parse_networks, 16) if "networks" in read else None,
            egress=read.mapping_of("egress", _parse_boolean, 16),
        )


def parse_images(row: JsonObject) -> tuple[ImageInfo, ...]:
    """Return the images of a message; invalid ones are skipped, because users import some themselves."""
    return tuple(FieldReader(row).valid_items("images", ImageInfo.from_wire, 20_000))


def _parse_runtime(row: Any) -> tuple[str, str | None]:
    read = FieldReader(row)
    return read.name("kind", 16), read.text_or_none("version", 64)


def _parse_version(value: Any) -> str | None:
    return None if value is None else clean_text(value, 300)


def _parse_version_warning(value: Any) -> str:
    return clean_text(value, 500)


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


def _parse_port_range(read: FieldReader) -> tuple[int, int] | None:
    ports = read.list_of("rendezvous_ports", _parse_port, 2)
    if "rendezvous_ports" not in read:
        return None
    if len(ports) != 2 or ports[0] > ports[1]:
        raise InvalidMessageError("rendezvous_ports is not a first and a last port")
    return ports[0], ports[1]


def _parse_boolean(value: Any) -> bool:
    if not isinstance(value, bool):
        raise InvalidMessageError("a value is not true or false")
    return value


def _parse_port(value: Any) -> int:
    return check_integer(value, 1024, MAX_PORT)


@dataclass(frozen=True)
class ContainerStatus:
    """A task on the node, running, or ended and not yet removed."""

    name: str
    cluster: str
    job: str
    attempt: int
    task: int
    digest: str
    runtime: str
    state: str  # created, running, exited
    exit_code: int | None
    oom: bool | None
    peak_memory_mib: int | None
    started_s: float | None
    ended_s: float | None
    ports: dict[int, int]
    gpus: tuple[tuple[str, int], ...]
    rebooted: bool
    owner: str
    project: str
    # at the time of the reply; None: none reported, or not supported by the agent
    checkpoint_age_s: float | None
    progress: float | None  # units done so far; None as above
    progress_age_s: float | None  # age of ``progress`` at the time of the reply
    fault: str | None = None  # what ended it: mps_daemon_lost, disk_limit_exceeded
    disk_mib: int | None = None  # disk limit outside volumes; None: unlimited or not reported
    disk_used_mib: int | None = None  # written when the limit was exceeded; None: too many files to count

    @classmethod
    def from_wire(cls, row: JsonObject) -> ContainerStatus:
        read = FieldReader(row)
        return cls(
            name=read.name("name", 120),
            cluster=read.name("cluster", 64),
            job=read.name("job", MAX_PUBLIC_ID_LENGTH),
            attempt=read.integer("attempt", maximum=MAX_ATTEMPT),
            task=read.integer("task", maximum=MAX_ATTEMPT),
            digest=read.name_or_none("digest") or "",
            runtime=read.name("runtime", 16),
            state=read.choice("state", CONTAINER_STATES),
            exit_code=read.integer_or_none("exit_code", -MAX_INT32),
            oom=read.boolean("oom"),
            peak_memory_mib=read.integer_or_none("peak_memory_mib"),
            started_s=read.number_or_none("started_s", 0, MAX_TIMESTAMP_S),
            ended_s=read.number_or_none("ended_s", 0, MAX_TIMESTAMP_S),
            ports=parse_ports(read),
            gpus=read.list_of("gpus", _parse_gpu_allocation, MAX_GPUS),
            rebooted=read.boolean("rebooted"),
            owner=read.name_or_none("owner", MAX_PUBLIC_ID_LENGTH) or "",
            project=read.name_or_none("project", MAX_PUBLIC_ID_LENGTH) or "",
            checkpoint_age_s=read.number_or_none("checkpoint_age_s"),
            progress=read.number_or_none("progress"),
            progress_age_s=read.number_or_none("progress_age_s"),
            fault=read.name_or_none("fault", 32),
            disk_mib=read.integer_or_none("disk_mib", maximum=MAX_MIB),
            disk_used_mib=read.integer_or_none("disk_used_mib", maximum=MAX_MIB),
        )


CONTAINER_STATES = ("created", "running", "exited")


def parse_ports(read: FieldReader) -> dict[int, int]:
    """Return ports of a task with the loopback ports of the node that lead to them."""
    found = read.mapping_of("ports", lambda each: check_integer(each, 1, MAX_PORT), 256)
    if not all(port.isascii() and port.isdecimal() and int(port) <= MAX_PORT for port in found):
        raise InvalidMessageError("ports has a key that is not a port")
    return {int(port): number for port, number in found.items()}


def _parse_gpu_allocation(row: Any) -> tuple[str, int]:
    read = FieldReader(row)
    return read.name("uuid", MAX_UUID_LENGTH), read.integer("milli", 1, 1000)


@dataclass(frozen=True)
class GpuProcess:
    """A process on a GPU; ``foreign``: it belongs to no job, then with account and command."""

    pid: int
    memory_mib: int | None
    job: str | None
    attempt: int | None
    foreign: bool
    account: str | None = None
    command: str | None = None

    @classmethod
    def from_wire(cls, row: JsonObject) -> GpuProcess:
        read = FieldReader(row)
        return cls(
            read.integer("pid"),
            read.number_or_none("memory_mib", 0, MAX_MIB),
            read.name_or_none("job", MAX_PUBLIC_ID_LENGTH),
            read.integer_or_none("attempt", maximum=MAX_ATTEMPT),
            read.boolean("foreign"),
            read.text_or_none("account", 64),
            read.text_or_none("command", 128),
        )


MAX_GPU_WATTS = 10_000.0
"""Larger values are measurement errors."""


@dataclass(frozen=True)
class GpuSample:
    """One sample of a GPU."""

    uuid: str
    utilisation_percent: float | None
    memory_used_mib: int | None
    power_watts: float | None
    temperature_c: float | None
    health: str
    processes: tuple[GpuProcess, ...]
    energy_joules: float | None = None
    """The GPU's energy counter since its driver was loaded."""

    @classmethod
    def from_wire(cls, row: JsonObject) -> GpuSample:
        read = FieldReader(row)
        return cls(
            uuid=read.name("uuid", MAX_UUID_LENGTH),
            utilisation_percent=read.number_or_none("utilisation_percent", 0, 100),
            memory_used_mib=read.number_or_none("memory_used_mib", 0, MAX_MIB),
            power_watts=read.number_or_none("power_watts", 0, MAX_GPU_WATTS),
            temperature_c=read.number_or_none("temperature_c", -1000, 10_000),
            health=read.choice("health", GPU_HEALTH_STATES),
            processes=read.list_of("processes", GpuProcess.from_wire, 4096),
            energy_joules=read.number_or_none("energy_joules", 0),
        )


@dataclass(frozen=True)
class TaskSample:
    """One sample of a task."""

    job: str
    attempt: int
    task: int
    cpu_percent: float | None
    memory_mib: int | None

    @classmethod
    def from_wire(cls, row: JsonObject) -> TaskSample:
        read = FieldReader(row)
        return cls(
            read.name("job", MAX_PUBLIC_ID_LENGTH),
            read.integer("attempt", maximum=MAX_ATTEMPT),
            read.integer("task", maximum=MAX_ATTEMPT),
            read.number_or_none("cpu_percent", 0),
            read.number_or_none("memory_mib", 0, MAX_MIB),
        )


@dataclass(frozen=True)
class NodeSample:
    """One sample of a node; ``at_s`` is the node's Unix time."""

    at_s: float
    cpu_percent: float | None
    memory_used_mib: int | None
    disk_free_mib: int | None
    gpus: tuple[GpuSample, ...] = field(default=())
    tasks: tuple[TaskSample, ...] = field(default=())

    @classmethod
    def from_wire(cls, row: JsonObject) -> NodeSample:
        read = FieldReader(row)
        return cls(
            at_s=read.number("at_s", 0, MAX_TIMESTAMP_S),
            cpu_percent=read.number_or_none("cpu_percent", 0),
            memory_used_mib=read.number_or_none("memory_used_mib", 0, MAX_MIB),
            disk_free_mib=read.number_or_none("disk_free_mib", 0, MAX_MIB),
            gpus=read.list_of("gpus", GpuSample.from_wire, MAX_GPUS),
            tasks=read.list_of("tasks", TaskSample.from_wire, MAX_TASKS),
        )
