"""The snapshot of the cluster that every decision starts from: frozen rows, checked at the border.

Ids are public ids (short strings), GPU ids are the UUIDs the nodes tell. GPU amounts are ``milli``
(thousandths of one GPU), memory is MiB, times are float seconds since the epoch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, NewType

from portal.domain.throughput import LayoutSpeed

JobId = NewType("JobId", str)
ProjectId = NewType("ProjectId", str)
UserId = NewType("UserId", str)
PoolId = NewType("PoolId", str)
NodeId = NewType("NodeId", str)
GpuUuid = NewType("GpuUuid", str)

WHOLE_MILLI = 1000
"""One whole GPU."""


class GpuShare(NamedTuple):
    """What a task holds of one GPU: 1000 milli is the GPU alone, less is a share of it."""

    uuid: GpuUuid
    milli: int


class TaskRequest(NamedTuple):
    """What one task asks of a node: ``gpus`` GPUs with ``milli`` of each, or a share of each by its memory.

    ``share_mib`` not None asks for that much memory of each GPU; its milli then depend on the GPU's memory.
    """

    gpus: int
    milli: int
    cpu_milli: int
    memory_mib: int
    gpu_model: str | None = None
    min_gpu_memory_mib: int | None = None
    share_mib: int | None = None
    mig_profile: str | None = None  # only slices of this profile; None is whole GPUs only
    min_compute_capability: float | None = None

    @property
    def is_fractional(self) -> bool:
        """True when it asks for parts of GPUs, beside which others may stand."""
        return self.gpus > 0 and (self.share_mib is not None or self.milli < WHOLE_MILLI)


@dataclass(frozen=True, slots=True)
class TopologyConstraint:
    """How close together tasks must or should stand, by levels of a topology (outermost first)."""

    topology: str
    required: str | None = None  # a level within one domain of which all must stand
    preferred: str | None = None  # a level that is tried first, before those above it


@dataclass(frozen=True, slots=True)
class GroupRow:
    """A part of a gang: a leaf holds tasks, an inner group holds groups. ``parent`` None is the gang itself.

    ``least`` is how many of its tasks (leaf) or groups (inner) must stand for it to be whole; None is all.
    """

    name: str
    parent: str | None = None
    min_members: int | None = None
    topology_constraint: TopologyConstraint | None = None


@dataclass(frozen=True, slots=True)
class TopologyRow:
    """A fabric: its levels are keys of node labels, outermost first (block, rack, ...)."""

    name: str
    levels: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PoolRow:
    """A group of nodes that a quota speaks about. ``placement`` None means the policy's strategy.

    ``knobs`` are the knobs of the policy that have another value in this pool, by name.
    """

    id: PoolId
    name: str
    placement: str | None = None  # "pack" | "fragmentation" | "spread"
    settings: tuple[tuple[str, float | str], ...] = ()
    allow_host_network: bool = False  # gangs on several nodes may use the network of these


@dataclass(frozen=True, slots=True)
class GpuRow:
    """One GPU of a node. ``used_milli`` counts every allocation not yet proven gone."""

    uuid: GpuUuid
    index: int
    model: str
    memory_mib: int
    used_milli: int = 0
    exclusive: bool = False  # a whole allocation stands on it, so no share may join
    healthy: bool = True
    nvlink_island: int | None = (
        None  # GPUs of one node with equal numbers are joined by NVLink; None is not known
    )
    mig_profile: str | None = None  # of a slice, such as 1g.10gb; None is a whole GPU
    compute_capability: float | None = None  # such as 9.0; None is not known


@dataclass(frozen=True, slots=True)
class NodeRow:
    """One node. The ``used`` amounts count what tasks were promised, not what they really use."""

    id: NodeId
    name: str
    pool: PoolId
    schedulable: bool
    reachable: bool
    cpu_milli: int
    cpu_used_milli: int
    memory_mib: int
    memory_used_mib: int
    gpus: tuple[GpuRow, ...] = ()
    labels: tuple[tuple[str, str], ...] = ()
    max_tasks: int | None = None  # how many tasks it may carry at all
    missing_requirements: str = ""  # of what its pool names for gangs on several nodes, as sentences
    driver_cuda: str | None = None  # the newest that its driver knows; None is not told


@dataclass(frozen=True, slots=True)
class ProjectRow:
    """A project in the tree; ``parent`` None is a top project."""

    id: ProjectId
    name: str
    parent: ProjectId | None
    created_s: float


UNLIMITED_MILLI = 10**12
"""A guarantee without end, in thousandths of a GPU."""


@dataclass(frozen=True, slots=True)
class ResourceQuota:
    """The three numbers of a quota for CPU (thousandths of a core) or memory (MiB); None is no bound."""

    guaranteed: int | None = None
    limit: int | None = None
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class QuotaRow:
    """What a project is promised in a pool. ``limit_milli`` None is no limit.

    ``user_limit_milli`` is the most that one person may hold there at once through the project and those below
    it; None is no limit. A project without a row for a pool has guaranteed 0, no limits, weight 1 and priority 0.
    CPU and memory count only where their ``Bounds`` are given.
    """

    project: ProjectId
    pool: PoolId
    guaranteed_milli: int
    limit_milli: int | None
    weight: float = 1.0
    priority: int = 0
    cpu: ResourceQuota | None = None
    memory: ResourceQuota | None = None
    reclaim_min_runtime_s: float | None = None  # protects its running jobs so long; None is the policy's
    user_limit_milli: int | None = None


@dataclass(frozen=True, slots=True)
class UsageRow:
    """Decayed GPU-seconds (whole GPUs x seconds) of one person in one project and pool.

    A project's own usage is the sum over its rows; ``user`` None is usage of nobody in particular.
    ``scheduler.core.shares.usage.decayed_gpu_seconds`` makes the number from ledger intervals.
    """

    project: ProjectId
    pool: PoolId
    user: UserId | None
    gpu_seconds: float


@dataclass(frozen=True, slots=True)
class RunningTask:
    """Where one rank stands and what it was promised there.

    ``rank`` None counts on from the task before it. ``stopping``: this task alone is leaving already.
    """

    node: NodeId
    gpus: tuple[GpuShare, ...]
    cpu_milli: int
    memory_mib: int
    rank: int | None = None
    group: str | None = None  # the leaf group, in a gang that has groups
    stopping: bool = False
    share_mib: int | None = None


@dataclass(frozen=True, slots=True)
class RunningRow:
    """A job that holds resources. ``stopping`` means its end is already ordered: it only has to let go.

    ``stopping_for`` is the waiting job that it makes room for, when it was asked to leave for one.
    """

    job: JobId
    project: ProjectId
    user: UserId
    pool: PoolId
    priority: int
    preemptible: bool
    started_s: float
    time_limit_s: float | None
    tasks: tuple[RunningTask, ...]
    stopping: bool = False
    preempted_for: JobId | None = None
    checkpoint_s: float | None = None  # when it last saved its work
    name: str = ""
    min_tasks: int | None = None  # fewest tasks it can work with; None is all of them
    groups: tuple[GroupRow, ...] = ()
    topology_constraint: TopologyConstraint | None = None
    submitted_s: float | None = None  # None is when it started
    stale_since_s: float | None = None  # since when fewer tasks are alive than it needs
    stale_gang_grace_s: float | None = None  # None is the policy's
    nominated_tasks: tuple[RunningTask, ...] = ()  # where it is to stand once it has left, if it is moved
    gpu_model: str | None = None  # what a new place for it must offer, if it is moved
    min_gpu_memory_mib: int | None = None
    avoid_nodes: tuple[NodeId, ...] = ()
    node_affinity: NodeId | None = None
    predicted_end_s: float | None = None  # when it is expected to end; None is unknown
    isolation_excluded_nodes: tuple[
        NodeId, ...
    ] = ()  # of those it avoids, where somebody stands with whom it shares no node
    mig_profile: str | None = None
    min_compute_capability: float | None = None


class JobDependency(NamedTuple):
    """A job that has not ended yet, after which another is to start."""

    job: JobId
    name: str
    project: ProjectId


@dataclass(frozen=True, slots=True)
class PendingRow:
    """A job that waits. All ``tasks`` start together or none does; the amounts are per task.

    An elastic job (``min_tasks``) starts with fewer and grows one by one; while it runs, a row with the same
    id stands for the ranks that wait. ``groups`` make a gang of parts that must each be whole.

    ``milli_per_gpu`` 1000 asks for whole GPUs, less for a share of each of ``gpus_per_task`` GPUs.
    ``node_affinity`` names the one node that holds its home volume. Of the ``avoid_nodes``, those that are
    ``unfit_nodes`` can never run it (another kind of runtime); the others are avoided for a while.
    """

    job: JobId
    name: str
    project: ProjectId
    user: UserId
    pools: tuple[PoolId, ...]
    submitted_s: float
    priority: int
    preemptible: bool
    tasks: int
    gpus_per_task: int
    milli_per_gpu: int
    gpu_model: str | None
    min_gpu_memory_mib: int | None
    cpu_milli: int
    memory_mib: int
    time_limit_s: float | None
    held: bool = False
    not_before_s: float | None = None
    avoid_nodes: tuple[NodeId, ...] = ()
    node_affinity: NodeId | None = None
    version: int = 0
    ineligible_nodes: tuple[NodeId, ...] = ()
    min_tasks: int | None = None  # elastic: so many of all its tasks are enough to start; None is all
    ranks: tuple[int, ...] = ()  # which ranks wait, in the order they are placed; none is 0 to tasks - 1
    task_requests: tuple[
        TaskRequest, ...
    ] = ()  # what each waiting rank asks, where they differ; else the amounts above
    groups: tuple[GroupRow, ...] = ()
    group_of_rank: tuple[str, ...] = ()  # the leaf group of each waiting rank
    topology_constraint: TopologyConstraint | None = None
    share_mib: int | None = None  # instead of ``milli_per_gpu``: so much memory of each GPU
    preemption_delay_s: float | None = None  # it makes others leave only once it waited so long
    nominated_tasks: tuple[
        RunningTask, ...
    ] = ()  # places that an earlier plan keeps for it, until others have left
    predicted_duration_s: float | None = None  # how long it is expected to run; None is unknown
    mig_profile: str | None = None  # it asks for slices of this profile, alone; None for whole GPUs
    min_compute_capability: float | None = None
    dependencies: tuple[
        JobDependency, ...
    ] = ()  # it starts once these have ended; those that have are left out
    ignore_dependency_failure: bool = False  # however they end; else they must complete
    layout_speeds: tuple[
        LayoutSpeed, ...
    ] = ()  # how fast work like it ran on layouts that are known; none is unknown
    isolation_excluded_nodes: tuple[
        NodeId, ...
    ] = ()  # of those it avoids, where somebody stands with whom it shares no node
    required_cuda: str = (
        ""  # what its environment's image asks of drivers, which made older ones' nodes unfit
    )
    launcher: str | None = None  # one whose tasks must reach each other: other pools' nodes are unfit for it

    @property
    def task_request(self) -> TaskRequest:
        """What each task asks, where they are alike."""
        return TaskRequest(
            self.gpus_per_task, self.milli_per_gpu, self.cpu_milli, self.memory_mib, self.gpu_model,
            self.min_gpu_memory_mib, self.share_mib, self.mig_profile, self.min_compute_capability,
        )  # fmt: skip

    @property
    def task_milli(self) -> int:
        """What one task asks, in thousandths of a GPU."""
        return self.gpus_per_task * self.milli_per_gpu

    @property
    def total_milli(self) -> int:
        """What the whole gang asks, in thousandths of a GPU."""
        return self.tasks * self.task_milli

    @property
    def required_tasks(self) -> int:
        """How many of its tasks must start together: one of those that join a job that runs."""
        return 1 if self.ranks else self.tasks if self.min_tasks is None else self.min_tasks

    @property
    def required_milli(self) -> int:
        """What these ask, in thousandths of a GPU."""
        return self.required_tasks * self.task_milli


@dataclass(frozen=True, slots=True)
class ReservationRow:
    """Nodes kept for some projects, and those below them, from ``from_s`` to ``to_s``; for nobody: maintenance."""

    id: str
    name: str
    nodes: tuple[NodeId, ...]
    projects: tuple[ProjectId, ...]
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything a decision may know. Rows come in any order: the decision does not depend on it."""

    now_s: float
    pools: tuple[PoolRow, ...]
    nodes: tuple[NodeRow, ...]
    projects: tuple[ProjectRow, ...]
    quotas: tuple[QuotaRow, ...] = ()
    usage: tuple[UsageRow, ...] = ()
    running: tuple[RunningRow, ...] = ()
    pending: tuple[PendingRow, ...] = ()
    topologies: tuple[TopologyRow, ...] = ()
    reservations: tuple[ReservationRow, ...] = ()
