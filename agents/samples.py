"""The words on the wire as types: what a node says of itself, its GPUs, its containers. Unknown is None."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Wire = Mapping[str, Any]


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
        return cls(
            uuid=str(row["uuid"]),
            index=int(row["index"]),
            model=str(row["model"]),
            memory_mib=row.get("memory_mib"),
            simulated=bool(row["simulated"]),
            health=str(row["health"]),
            health_sentence=_text(row.get("health_sentence")),
            island=measured(row.get("island")),
            compute_capability=measured(row.get("compute_capability")),
            mig_profile=_text(row.get("mig_profile")),
            reserved_mib=measured(row.get("reserved_mib")),
            bus_id=_text(row.get("bus_id")),
            numa=measured(row.get("numa")),
            fatal=bool(row.get("fatal")),
            ecc_uncorrected=measured(row.get("ecc_uncorrected")),
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
        return cls(str(row["a"]), str(row["b"]), measured(row["nvlinks"]), _text(row["level"]))


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
        return cls(
            image_id=str(row["image_id"]),
            runtime=str(row["runtime"]),
            refs=tuple(row["refs"]),
            digests=tuple(row["digests"]),
            size_mib=row.get("size_mib"),
            cuda=_text(row.get("cuda")),
        )


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
        return cls(
            str(row["name"]),
            str(row["address"]),
            int(row["prefix"]),
            measured(row.get("speed_mbit")),
            bool(row["chosen"]),
            tuple(map(str, row.get("addresses") or (f"{row['address']}/{row['prefix']}",))),
        )


@dataclass(frozen=True)
class Shares:
    """Whether a node holds tasks to their shares of a GPU, and a sentence of how, or why not."""

    enforced: bool
    sentence: str

    @classmethod
    def from_wire(cls, row: Wire) -> Shares:
        return cls(bool(row["enforced"]), str(row["sentence"]))


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
        return cls(
            protocol=int(row["protocol"]),
            agent_version=str(row["agent_version"]),
            cluster=str(row["cluster"]),
            boot_id=str(row["boot_id"]),
            hostname=str(row["hostname"]),
            python=str(row["python"]),
            clock_s=float(row["clock_s"]),
            cpu_count=int(row["cpu_count"]),
            memory_mib=row.get("memory_mib"),
            disk_free_mib=row.get("disk_free_mib"),
            loopback=str(row.get("loopback", "127.77.0.1")),
            runtimes=tuple((str(each["kind"]), each.get("version")) for each in row["runtimes"]),
            gpus=tuple(GpuState.from_wire(each) for each in row["gpus"]),
            driver=row.get("driver"),
            below_floor=tuple(row["below_floor"]),
            images=tuple(ImageState.from_wire(each) for each in row["images"]),
            highest_epoch=int(row["highest_epoch"]),
            separates_people=bool(row.get("separates_people", True)),
            takes=tuple(map(str, row.get("takes", ()))),
            links=tuple(map(GpuPair.from_wire, row["links"])) if "links" in row else None,
            gpus_silent=_text(row.get("gpus_silent")),
            versions={str(name): _text(version) for name, version in row.get("versions", {}).items()},
            interfaces=tuple(map(InterfaceState.from_wire, row.get("interfaces", ()))),
            gang_ports=_span(row.get("gang_ports")),
            storage=tuple(dict(each) for each in row.get("storage", ())),
            program=_text(row.get("program")),
            cuda_driver=_text(row.get("cuda_driver")),
            loader=measured(row.get("loader")),
            shares=Shares.from_wire(row["shares"]) if row.get("shares") else None,
            fabric=tuple(map(str, row["fabric"])) if row.get("fabric") is not None else None,
            networks=dict(row["networks"]) if row.get("networks") is not None else None,
            egress={str(kind): bool(holds) for kind, holds in (row.get("egress") or {}).items()},
        )


def _span(told: Any) -> tuple[int, int] | None:
    return None if told is None else (int(told[0]), int(told[1]))


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
        return cls(
            name=str(row["name"]),
            cluster=str(row["cluster"]),
            job=str(row["job"]),
            attempt=int(row["attempt"]),
            task=int(row["task"]),
            digest=str(row["digest"]),
            runtime=str(row["runtime"]),
            state=str(row["state"]),
            exit_code=row.get("exit_code"),
            oom=row.get("oom"),
            peak_memory_mib=row.get("peak_memory_mib"),
            started_s=row.get("started_s"),
            ended_s=row.get("ended_s"),
            ports={int(port): int(number) for port, number in row["ports"].items()},
            gpus=tuple((str(each["uuid"]), int(each["milli"])) for each in row["gpus"]),
            rebooted=bool(row.get("rebooted")),
            owner=str(row.get("owner") or ""),
            project=str(row.get("project") or ""),
            saved_ago_s=measured(row.get("saved_ago_s")),
            progress=measured(row.get("progress")),
            progress_ago_s=measured(row.get("progress_ago_s")),
            fault=_text(row.get("fault")),
            disk_mib=measured(row.get("disk_mib")),
            disk_used_mib=measured(row.get("disk_used_mib")),
        )


LARGEST = 1e15


def _text(value: Any) -> str | None:
    return None if value is None else str(value)


def measured(value: Any) -> Any:
    """A number that was measured, or None. ValueError for anything else: frames of all nodes are made of these."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not -LARGEST < value < LARGEST:
        raise ValueError(f"{str(value)[:40]!r} is no measurement")
    return value


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
        return cls(
            uuid=str(row["uuid"]),
            utilisation_percent=measured(row.get("utilisation_percent")),
            memory_used_mib=measured(row.get("memory_used_mib")),
            power_watts=measured(row.get("power_watts")),
            temperature_c=measured(row.get("temperature_c")),
            health=str(row["health"]),
            processes=tuple(
                GpuUser(
                    int(each["pid"]),
                    measured(each["memory_mib"]),
                    None if each["job"] is None else str(each["job"]),
                    None if each["attempt"] is None else int(each["attempt"]),
                    bool(each["foreign"]),
                    _text(each.get("account")),
                    _text(each.get("command")),
                )
                for each in row["processes"]
            ),
            energy_joules=measured(row.get("energy_joules")),
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
        return cls(
            str(row["job"]),
            int(row["attempt"]),
            int(row["task"]),
            measured(row["cpu_percent"]),
            measured(row["memory_mib"]),
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
        return cls(
            at_s=float(measured(row["at_s"]) or 0.0),
            cpu_percent=measured(row.get("cpu_percent")),
            memory_used_mib=measured(row.get("memory_used_mib")),
            disk_free_mib=measured(row.get("disk_free_mib")),
            gpus=tuple(GpuSample.from_wire(each) for each in row["gpus"]),
            tasks=tuple(TaskSample.from_wire(each) for each in row["tasks"]),
        )
