"""The words on the wire as types: what a node says of itself, its GPUs, its containers. Unknown is None.

Each ``from_wire`` is the one declaration of what an object may hold, and raises Malformed for anything else.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from agents.network_facts import InterfaceState, address_of, networks_of
from agents.wire import LARGEST_EXACT, LARGEST_INT4, Fields, Malformed, sentence, whole_number

Wire = Mapping[str, Any]

CUDA = re.compile(r"[0-9]{1,3}\.[0-9]{1,3}")
HEALTHS = ("ok", "lost", "quarantined")
MOST_GPUS = 256
MOST_TASKS = 4096
MOST_ATTEMPT = 1_000_000
MOST_PORT = 65_535
LATEST_S = 1e11
"""Unix time; every moment up to it has a date."""
MOST_MIB = 2**50
PUBLIC_ID_CHARACTERS = 64
UUID_CHARACTERS = 96


@dataclass(frozen=True)
class GpuState:
    """A GPU as the node lists it. An agent that does not know one of the later facts leaves it out."""

    uuid: str
    index: int
    model: str
    memory_mib: int | None
    simulated: bool
    health: str
    health_sentence: str | None = None
    island: int | None = None
    compute_capability: float | None = None
    mig_profile: str | None = None
    reserved_mib: int | None = None
    bus_id: str | None = None
    numa: int | None = None
    fatal: bool = False
    ecc_uncorrected: int | None = None

    @classmethod
    def from_wire(cls, row: Wire) -> GpuState:
        read = Fields(row)
        return cls(
            uuid=read.name("uuid", UUID_CHARACTERS),
            index=read.whole("index", most=MOST_PORT),
            model=read.name("model", 100),
            memory_mib=read.whole_or_none("memory_mib"),
            simulated=read.flag("simulated"),
            health=read.one_of("health", HEALTHS),
            health_sentence=read.sentence_or_none("health_sentence", 500),
            island=read.whole_or_none("island", most=32_767),
            compute_capability=read.number_or_none("compute_capability", 0, 1000),
            mig_profile=read.name_or_none("mig_profile", 32),
            reserved_mib=read.whole_or_none("reserved_mib"),
            bus_id=read.name_or_none("bus_id", 32),
            numa=read.whole_or_none("numa", most=32_767),
            fatal=read.flag("fatal"),
            ecc_uncorrected=read.whole_or_none("ecc_uncorrected", most=LARGEST_EXACT),
        )


@dataclass(frozen=True)
class GpuPair:
    """Two GPUs by UUID and what is between them: NVLinks (0: none, None: some), and a level of the PCIe bus."""

    a: str
    b: str
    nvlinks: int | None
    level: str | None

    @classmethod
    def from_wire(cls, row: Wire) -> GpuPair:
        read = Fields(row)
        return cls(
            read.name("a", UUID_CHARACTERS),
            read.name("b", UUID_CHARACTERS),
            read.whole_or_none("nvlinks", most=1000),
            read.name_or_none("level", 12),
        )


@dataclass(frozen=True)
class ImageState:
    """An image on the node; ``image_id`` is its config digest."""

    image_id: str
    runtime: str
    refs: tuple[str, ...]
    digests: tuple[str, ...]
    size_mib: int | None
    cuda: str | None = None  # what it asks of the driver, such as 12.4

    @classmethod
    def from_wire(cls, row: Wire) -> ImageState:
        read = Fields(row)
        cuda = read.name_or_none("cuda", 64)
        return cls(
            image_id=read.name("image_id"),
            runtime=read.name("runtime", 16),
            refs=read.names("refs", 256, 1024),
            digests=read.names("digests", 256, 1024),
            size_mib=read.whole_or_none("size_mib", most=MOST_MIB),
            cuda=cuda if cuda is not None and CUDA.fullmatch(cuda) else None,  # makers of images write it
        )


@dataclass(frozen=True)
class Shares:
    """Whether a node holds tasks to their shares of a GPU, and a sentence of how, or why not."""

    enforced: bool
    sentence: str

    @classmethod
    def from_wire(cls, row: Wire) -> Shares:
        read = Fields(row)
        return cls(read.flag("enforced"), read.sentence("sentence", 500))


@dataclass(frozen=True)
class Hello:
    """The first answer of an agent; ``clock_s`` is the node's Unix time when it was written."""

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
    gpus: tuple[GpuState, ...]
    driver: str | None
    below_floor: tuple[str, ...]
    images: tuple[ImageState, ...]
    highest_epoch: int
    separates_people: bool  # whether the runtime ``process`` gives each task an account of its own
    takes: tuple[str, ...]  # keys of a spec beyond those of the first agents
    links: tuple[GpuPair, ...] | None = None  # None: its agent does not look at them
    gpus_silent: str | None = None  # why it cannot say which GPUs it has; then ``gpus`` says nothing
    versions: Mapping[str, str | None] = field(
        default_factory=dict
    )  # by tool; None: not there, or it does not say
    interfaces: tuple[InterfaceState, ...] = ()  # empty: its agent does not look at them
    gang_ports: tuple[int, int] | None = None  # first and last port at which ranks of gangs may meet
    storage: tuple[Mapping[str, Any], ...] = ()  # disks behind volumes: use, path, filesystem, MiB, quotas
    program: str | None = None  # SHA-256 of the archive that runs: whether it is the newest
    cuda_driver: str | None = None  # the newest CUDA that its driver knows; None: no driver, or not told
    loader: int | None = None  # the version of what starts the agent, 0 of one that says none; None: not told
    shares: Shares | None = None  # None: without GPUs, or its agent does not enforce any
    fabric: tuple[str, ...] | None = None  # the devices of a fabric that it lends; None: it does not say
    networks: Mapping[str, Any] | None = None  # by engine, those that people made: name, driver, subnets
    egress: Mapping[str, bool] = field(default_factory=dict)  # by runtime, whether it holds tasks to a policy

    @classmethod
    def from_wire(cls, row: Wire) -> Hello:
        read = Fields(row)
        return cls(
            protocol=read.whole("protocol", most=10_000),
            agent_version=read.name("agent_version", 32),
            cluster=read.name("cluster", 64),
            boot_id=read.name("boot_id", 64),
            hostname=read.sentence("hostname", 255),
            python=read.sentence("python", 64),
            clock_s=read.number("clock_s", 0, LATEST_S),
            cpu_count=read.whole("cpu_count", most=100_000),
            memory_mib=read.whole_or_none("memory_mib"),
            disk_free_mib=read.whole_or_none("disk_free_mib", most=MOST_MIB),
            loopback=address_of(read.name_or_none("loopback", 64) or "127.77.0.1"),
            runtimes=read.list_of("runtimes", _runtime, 16),
            gpus=read.list_of("gpus", GpuState.from_wire, MOST_GPUS),
            driver=read.name_or_none("driver", 64),
            below_floor=read.list_of("below_floor", _floor, 64),
            images=images_of(row),
            highest_epoch=read.whole("highest_epoch", most=LARGEST_EXACT),
            separates_people=read.flag("separates_people", default=True),
            takes=read.names("takes", 256, 64),
            links=read.list_of("links", GpuPair.from_wire, 20_000) if "links" in read else None,
            gpus_silent=read.sentence_or_none("gpus_silent", 500),
            versions=read.pairs_of("versions", _version, 64),
            interfaces=read.list_of("interfaces", InterfaceState.from_wire, 512),
            gang_ports=_span(read),
            storage=read.list_of("storage", _storage, 64),
            program=read.name_or_none("program", 64),
            cuda_driver=read.name_or_none("cuda_driver", 16, CUDA),
            loader=read.whole_or_none("loader", most=1_000_000),
            shares=Shares.from_wire(row["shares"]) if "shares" in read else None,
            fabric=read.names("fabric", 4096) if "fabric" in read else None,
            networks=read.pairs_of("networks", networks_of, 16) if "networks" in read else None,
            egress=read.pairs_of("egress", _flag, 16),
        )


def images_of(row: Wire) -> tuple[ImageState, ...]:
    """The images that a hello or an answer lists. People bring some themselves: one we cannot read is left out."""
    return tuple(Fields(row).readable("images", ImageState.from_wire, 20_000))


def _runtime(row: Any) -> tuple[str, str | None]:
    read = Fields(row)
    return read.name("kind", 16), read.sentence_or_none("version", 64)


def _version(value: Any) -> str | None:
    return None if value is None else sentence(value, 300)


def _floor(value: Any) -> str:
    return sentence(value, 500)


def _storage(row: Any) -> dict[str, Any]:
    read = Fields(row)
    return {
        "use": read.name("use", 16),
        "path": read.name("path", 4096),
        "filesystem": read.name("filesystem", 32),
        "size_mib": read.whole_or_none("size_mib", most=MOST_MIB),
        "free_mib": read.whole_or_none("free_mib", most=MOST_MIB),
        "quotas": read.flag("quotas"),
    }


def _span(read: Fields) -> tuple[int, int] | None:
    ports = read.list_of("gang_ports", _port, 2)
    if "gang_ports" not in read:
        return None
    if len(ports) != 2 or ports[0] > ports[1]:
        raise Malformed("gang_ports is not a first and a last port")
    return ports[0], ports[1]


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise Malformed("a value is neither true nor false")
    return value


def _port(value: Any) -> int:
    return whole_number(value, 1024, MOST_PORT)


@dataclass(frozen=True)
class ContainerState:
    """A task on the node, live or ended and not yet removed."""

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
    saved_ago_s: float | None  # before the answer; None: it never said so, or its agent does not know
    progress: float | None  # units it has done so far; None likewise
    progress_ago_s: float | None  # it wrote that so long before the answer
    fault: str | None = None  # what ended it: mps_lost, disk_limit_exceeded
    disk_mib: int | None = None  # what it might write outside its volumes; None: not limited, or not told
    disk_used_mib: int | None = (
        None  # what it had written when it was ended for that; None: more than is counted
    )

    @classmethod
    def from_wire(cls, row: Wire) -> ContainerState:
        read = Fields(row)
        return cls(
            name=read.name("name", 120),
            cluster=read.name("cluster", 64),
            job=read.name("job", PUBLIC_ID_CHARACTERS),
            attempt=read.whole("attempt", most=MOST_ATTEMPT),
            task=read.whole("task", most=MOST_ATTEMPT),
            digest=read.name_or_none("digest") or "",
            runtime=read.name("runtime", 16),
            state=read.one_of("state", STATES),
            exit_code=read.whole_or_none("exit_code", -LARGEST_INT4),
            oom=read.flag("oom"),
            peak_memory_mib=read.whole_or_none("peak_memory_mib"),
            started_s=read.number_or_none("started_s", 0, LATEST_S),
            ended_s=read.number_or_none("ended_s", 0, LATEST_S),
            ports=ports_of(read),
            gpus=read.list_of("gpus", _held, MOST_GPUS),
            rebooted=read.flag("rebooted"),
            owner=read.name_or_none("owner", PUBLIC_ID_CHARACTERS) or "",
            project=read.name_or_none("project", PUBLIC_ID_CHARACTERS) or "",
            saved_ago_s=read.number_or_none("saved_ago_s"),
            progress=read.number_or_none("progress"),
            progress_ago_s=read.number_or_none("progress_ago_s"),
            fault=read.name_or_none("fault", 32),
            disk_mib=read.whole_or_none("disk_mib", most=MOST_MIB),
            disk_used_mib=read.whole_or_none("disk_used_mib", most=MOST_MIB),
        )


STATES = ("created", "running", "exited")


def ports_of(read: Fields) -> dict[int, int]:
    """Ports of a task with the ports of the node's loopback address that lead there."""
    found = read.pairs_of("ports", lambda each: whole_number(each, 1, MOST_PORT), 256)
    if not all(port.isascii() and port.isdecimal() and int(port) <= MOST_PORT for port in found):
        raise Malformed("ports has a name that is no port")
    return {int(port): number for port, number in found.items()}


def _held(row: Any) -> tuple[str, int]:
    read = Fields(row)
    return read.name("uuid", UUID_CHARACTERS), read.whole("milli", 1, 1000)


@dataclass(frozen=True)
class GpuUser:
    """A process on a GPU; ``foreign`` when it belongs to no job of ours, then with account and program's name."""

    pid: int
    memory_mib: int | None
    job: str | None
    attempt: int | None
    foreign: bool
    account: str | None = None
    command: str | None = None

    @classmethod
    def from_wire(cls, row: Wire) -> GpuUser:
        read = Fields(row)
        return cls(
            read.whole("pid"),
            read.number_or_none("memory_mib", 0, MOST_MIB),
            read.name_or_none("job", PUBLIC_ID_CHARACTERS),
            read.whole_or_none("attempt", most=MOST_ATTEMPT),
            read.flag("foreign"),
            read.sentence_or_none("account", 64),
            read.sentence_or_none("command", 128),
        )


MOST_GPU_WATTS = 10_000.0
"""No GPU draws more; what a node tells above it is wrong."""


@dataclass(frozen=True)
class GpuSample:
    """A GPU at one moment."""

    uuid: str
    utilisation_percent: float | None
    memory_used_mib: int | None
    power_watts: float | None
    temperature_c: float | None
    health: str
    processes: tuple[GpuUser, ...]
    energy_joules: float | None = None
    """The GPU's own counter, since its driver was loaded."""

    @classmethod
    def from_wire(cls, row: Wire) -> GpuSample:
        read = Fields(row)
        return cls(
            uuid=read.name("uuid", UUID_CHARACTERS),
            utilisation_percent=read.number_or_none("utilisation_percent", 0, 100),
            memory_used_mib=read.number_or_none("memory_used_mib", 0, MOST_MIB),
            power_watts=read.number_or_none("power_watts", 0, MOST_GPU_WATTS),
            temperature_c=read.number_or_none("temperature_c", -1000, 10_000),
            health=read.one_of("health", HEALTHS),
            processes=read.list_of("processes", GpuUser.from_wire, 4096),
            energy_joules=read.number_or_none("energy_joules", 0),
        )


@dataclass(frozen=True)
class TaskSample:
    """A task at one moment."""

    job: str
    attempt: int
    task: int
    cpu_percent: float | None
    memory_mib: int | None

    @classmethod
    def from_wire(cls, row: Wire) -> TaskSample:
        read = Fields(row)
        return cls(
            read.name("job", PUBLIC_ID_CHARACTERS),
            read.whole("attempt", most=MOST_ATTEMPT),
            read.whole("task", most=MOST_ATTEMPT),
            read.number_or_none("cpu_percent", 0),
            read.number_or_none("memory_mib", 0, MOST_MIB),
        )


@dataclass(frozen=True)
class NodeSample:
    """A node at one moment; ``at_s`` is the node's Unix time."""

    at_s: float
    cpu_percent: float | None
    memory_used_mib: int | None
    disk_free_mib: int | None
    gpus: tuple[GpuSample, ...] = field(default=())
    tasks: tuple[TaskSample, ...] = field(default=())

    @classmethod
    def from_wire(cls, row: Wire) -> NodeSample:
        read = Fields(row)
        return cls(
            at_s=read.number("at_s", 0, LATEST_S),
            cpu_percent=read.number_or_none("cpu_percent", 0),
            memory_used_mib=read.number_or_none("memory_used_mib", 0, MOST_MIB),
            disk_free_mib=read.number_or_none("disk_free_mib", 0, MOST_MIB),
            gpus=read.list_of("gpus", GpuSample.from_wire, MOST_GPUS),
            tasks=read.list_of("tasks", TaskSample.from_wire, MOST_TASKS),
        )
