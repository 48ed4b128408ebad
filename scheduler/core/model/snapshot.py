"""The snapshot of the cluster that every decision starts from: frozen rows, validated before use.

Ids are public ids (short strings); GPU ids are the UUIDs that nodes report. GPU amounts are ``milli``
(thousandths of one GPU), memory is MiB, times are float seconds since the epoch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, NewType

from portal.domain.jobs.feasibility import ANY_GPU, GpuKind
from portal.domain.jobs.feasibility import WHOLE_MILLI as WHOLE_MILLI
from portal.domain.jobs.feasibility import GpuConstraints as GpuConstraints
from portal.domain.scheduling.throughput import LayoutSpeed

JobId = NewType("JobId", str)
ProjectId = NewType("ProjectId", str)
UserId = NewType("UserId", str)
PoolId = NewType("PoolId", str)
NodeId = NewType("NodeId", str)
GpuUuid = NewType("GpuUuid", str)


class GpuShare(NamedTuple):
    """What a task holds of one GPU: 1000 milli is the whole GPU, less is a share."""

    uuid: GpuUuid
    milli: int


class TaskRequest(NamedTuple):
    """What one task requests of a node: ``gpus`` GPUs with ``milli`` of each, CPU and memory.

    ``milli`` 1000 is whole GPUs, less a share of each, and 1000 without GPUs. With ``share_mib`` it requests that
    much memory of each GPU; the milli then depend on the GPU's memory.
    """

    gpus: int
    milli: int
    cpu_milli: int
    memory_mib: int
    constraints: GpuConstraints = ANY_GPU
    share_mib: int | None = None

    @property
    def total_milli(self) -> int:
        """Thousandths of a GPU on all its GPUs."""
        return self.gpus * self.milli

    @property
    def uses_whole_gpus(self) -> bool:
        return self.milli == WHOLE_MILLI and self.share_mib is None

    @property
    def is_fractional(self) -> bool:
        """True if it requests shares of GPUs, which other tasks may share."""
        return self.gpus > 0 and (self.share_mib is not None or self.milli < WHOLE_MILLI)

    def change(self, fields: Mapping[str, Any]) -> TaskRequest:
        """Return the request with other values of ``REQUEST_FIELDS``. Raise KeyError for another field."""
        limits = {name: value for name, value in fields.items() if name in GpuConstraints._fields}
        amounts = {_AMOUNTS[name]: value for name, value in fields.items() if name not in limits}
        constraints = self.constraints._replace(**limits) if limits else self.constraints
        changed = self._replace(**amounts, constraints=constraints)
        return changed if changed.gpus else changed._replace(milli=WHOLE_MILLI, share_mib=None)


_AMOUNTS = {"gpus_per_task": "gpus", "milli_per_gpu": "milli"} | {
    name: name for name in ("cpu_milli", "memory_mib", "share_mib")
}
"""The amounts of a request by their names in a job."""
REQUEST_FIELDS = frozenset({*_AMOUNTS, *GpuConstraints._fields})
"""The fields of a job that are part of its request."""


@dataclass(frozen=True, slots=True)
class TopologyConstraint:
    """How close together tasks must or should be placed, as levels of a topology (outermost first)."""

    topology: str
    required: str | None = None  # level within one domain of which all tasks must be placed
    preferred: str | None = None  # level that is tried first, before the levels above it


@dataclass(frozen=True, slots=True)
class GroupRow:
    """A part of a gang: a leaf holds tasks, an inner group holds groups. ``parent`` None is the gang itself.

    ``min_members`` is how many of its tasks (leaf) or groups (inner) must run; None is all.
    """

    name: str
    parent: str | None = None
    min_members: int | None = None
    topology_constraint: TopologyConstraint | None = None


@dataclass(frozen=True, slots=True)
class TopologyRow:
    """A network topology: its levels are keys of node labels, outermost first (block, rack, ...)."""

    name: str
    levels: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PoolRow:
    """Nodes that share one quota. ``placement`` None means the policy's strategy.

    ``settings`` are the policy settings, by name, that this pool overrides.
    """

    id: PoolId
    name: str
    placement: str | None = None  # "pack" | "fragmentation" | "spread"
    settings: tuple[tuple[str, float | str], ...] = ()
    allow_host_network: bool = False  # multi-node gangs may use the host network of its nodes


@dataclass(frozen=True, slots=True)
class GpuRow:
    """One GPU of a node. ``used_milli`` counts every allocation that is not released yet."""

    uuid: GpuUuid
    index: int
    model: str
    memory_mib: int
    used_milli: int = 0
    exclusive: bool = False  # held by a whole-GPU allocation, so no share may be added
    healthy: bool = True
    nvlink_island: int | None = None
    """GPUs of a node with equal numbers are connected by NVLink; None is unknown."""
    mig_profile: str | None = None  # of a slice, such as 1g.10gb; None is a whole GPU
    compute_capability: float | None = None  # such as 9.0; None is unknown

    @property
    def kind(self) -> GpuKind:
        """The properties that requests distinguish."""
        return GpuKind(self.model, self.memory_mib, self.mig_profile or "", self.compute_capability or 0.0)


@dataclass(frozen=True, slots=True)
class NodeRow:
    """One node. The ``used`` amounts count allocations, not measured use."""

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
    max_tasks: int | None = None  # None is no limit
    missing_requirements: str = ""  # of its pool for multi-node gangs, as a message
    driver_cuda: str | None = None  # newest CUDA version that its driver supports; None is unknown
    slow_network: bool = False  # measured links much slower than those of its pool


@dataclass(frozen=True, slots=True)
class ProjectRow:
    """A project in the tree; ``parent`` None is a top project."""

    id: ProjectId
    name: str
    parent: ProjectId | None
    created_s: float


UNLIMITED_MILLI = 10**12
"""A guaranteed quota without bound, in thousandths of a GPU."""


@dataclass(frozen=True, slots=True)
class ResourceQuota:
    """A quota of CPU (thousandths of a core) or memory (MiB); None is no bound."""

    guaranteed: int | None = None
    limit: int | None = None
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class QuotaRow:
    """The quota of a project in a pool. ``limit_milli`` None is no limit.

    ``user_limit_milli`` is the most that one user may hold in the pool at once through the project and its
    descendants; None is no limit. A project without a row for a pool has guaranteed 0, no limits, weight 1
    and priority 0. CPU and memory count only where they are given.
    """

    project: ProjectId
    pool: PoolId
    guaranteed_milli: int
    limit_milli: int | None
    weight: float = 1.0
    priority: int = 0
    cpu: ResourceQuota | None = None
    memory: ResourceQuota | None = None
    reclaim_min_runtime_s: float | None = None  # protection of its running jobs; None is the policy's
    user_limit_milli: int | None = None


@dataclass(frozen=True, slots=True)
class UsageRow:
    """Decayed GPU-seconds (whole GPUs x seconds) of one user in one project and pool.

    A project's own usage is the sum over its rows; ``user`` None is usage without a user.
    Each second counts ``0.5 ** (age / usage_half_life_s)`` (``portal/selectors/scheduling/decayed_usage.py``).
    """

    project: ProjectId
    pool: PoolId
    user: UserId | None
    gpu_seconds: float


@dataclass(frozen=True, slots=True)
class RunningTask:
    """The placement of one rank and its allocation.

    ``rank`` None is the rank after that of the previous task. ``stopping``: this task alone is being stopped.
    """

    node: NodeId
    gpus: tuple[GpuShare, ...]
    cpu_milli: int
    memory_mib: int
    rank: int | None = None
    group: str | None = None  # the leaf group, in a gang that has groups
    stopping: bool = False
    share_mib: int | None = None

    def request(self, constraints: GpuConstraints) -> TaskRequest:
        """Return the request of what it holds, on GPUs that ``constraints`` accept."""
        milli = self.gpus[0].milli if self.gpus else WHOLE_MILLI
        return TaskRequest(
            len(self.gpus), milli, self.cpu_milli, self.memory_mib, constraints, self.share_mib
        )


@dataclass(frozen=True, slots=True)
class RunningRow:
    """A job that holds resources. ``stopping``: its stop is ordered, but it still holds them.

    ``preempted_for`` is the pending job that it was evicted for.
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
    min_tasks: int | None = None  # fewest tasks it can run with; None is all of them
    groups: tuple[GroupRow, ...] = ()
    topology_constraint: TopologyConstraint | None = None
    submitted_s: float | None = None  # None is its start
    stale_since_s: float | None = None  # since when it has had fewer live tasks than it needs
    stale_gang_grace_s: float | None = None  # None is the policy's
    nominated_tasks: tuple[RunningTask, ...] = ()  # its new placement, if it is being migrated
    constraints: GpuConstraints = ANY_GPU  # on a new placement, if it is migrated
    avoid_nodes: tuple[NodeId, ...] = ()
    node_affinity: NodeId | None = None
    predicted_end_s: float | None = None  # when it is expected to end; None is unknown
    isolation_excluded_nodes: tuple[NodeId, ...] = ()
    """The part of ``avoid_nodes`` excluded by network isolation."""
    allow_mixed_gpus: bool = False

    @property
    def needs_same_gpus(self) -> bool:
        """Whether its tasks must use GPUs of one model on one fabric."""
        return not self.allow_mixed_gpus and (len(self.tasks) > 1 or self.min_tasks is not None)


class JobDependency(NamedTuple):
    """A job that has not ended yet and must end before another one starts."""

    job: JobId
    name: str
    project: ProjectId


@dataclass(frozen=True, slots=True)
class PendingRow:
    """A pending job. All ``tasks`` start together or none does; ``request`` is that of each task, and of the largest
    one where ``task_requests`` differ.

    An elastic job (``min_tasks``) starts with fewer and grows task by task; while it runs, a row with the
    same id describes its pending ranks. ``groups`` divide a gang into parts, each with a minimum of its own.

    ``node_affinity`` is the one node that holds its home volume. ``ineligible_nodes`` are those of
    ``avoid_nodes`` that can never run it (such as another runtime); the others are avoided for a while.
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
    request: TaskRequest
    time_limit_s: float | None
    held: bool = False
    not_before_s: float | None = None
    avoid_nodes: tuple[NodeId, ...] = ()
    node_affinity: NodeId | None = None
    version: int = 0
    ineligible_nodes: tuple[NodeId, ...] = ()
    min_tasks: int | None = None  # elastic: enough tasks to start; None is all
    ranks: tuple[int, ...] = ()  # pending ranks in placement order; empty is 0 to tasks - 1
    task_requests: tuple[TaskRequest, ...] = ()
    """The request of each pending rank, where they differ; else empty."""
    groups: tuple[GroupRow, ...] = ()
    group_of_rank: tuple[str, ...] = ()  # the leaf group of each pending rank
    topology_constraint: TopologyConstraint | None = None
    preemption_delay_s: float | None = None  # how long it must wait before it may evict; None is the policy's
    nominated_tasks: tuple[RunningTask, ...] = ()
    """Nominated by an earlier plan, until the evicted jobs are gone."""
    predicted_duration_s: float | None = None  # expected run time; None is unknown
    dependencies: tuple[JobDependency, ...] = ()
    """Starts after these have ended; those that ended are left out."""
    ignore_dependency_failure: bool = False  # whether they may fail; else they must complete
    layout_speeds: tuple[LayoutSpeed, ...] = ()
    """Measured throughput of similar work by layout; empty is unknown."""
    isolation_excluded_nodes: tuple[NodeId, ...] = ()
    """The part of ``avoid_nodes`` excluded by network isolation."""
    required_cuda: str = ""  # newest CUDA its image requires; nodes with older drivers are ineligible
    launcher: str | None = None  # set if tasks must reach each other, in a pool with host network
    preferred_nodes: tuple[str, ...] = ()
    """The name of a node for each rank; used if they can take all its tasks. Empty is no preference."""
    queue_rank: int = 0  # order among jobs of its user, project and priority; smaller goes first
    allow_mixed_gpus: bool = False  # its tasks may use GPUs of different models, on different fabrics

    @property
    def needs_same_gpus(self) -> bool:
        """Whether its tasks, with those that run already, must use GPUs of one model on one fabric."""
        return not self.allow_mixed_gpus and (self.tasks > 1 or bool(self.ranks))

    @property
    def total_milli(self) -> int:
        if self.task_requests:
            return sum(ask.total_milli for ask in self.task_requests)
        return self.tasks * self.request.total_milli

    @property
    def required_tasks(self) -> int:
        """How many tasks must start together; 1 for ranks that join a running job."""
        return 1 if self.ranks else self.tasks if self.min_tasks is None else self.min_tasks

    @property
    def required_milli(self) -> int:
        """The GPU demand of the required tasks, in thousandths of a GPU."""
        if self.task_requests and self.required_tasks == self.tasks:
            return self.total_milli
        return self.required_tasks * self.request.total_milli

    def change(self, fields: Mapping[str, Any]) -> PendingRow:
        """Return the row with other values of its fields, or of ``REQUEST_FIELDS``."""
        asked = {name: value for name, value in fields.items() if name in REQUEST_FIELDS}
        own = {name: value for name, value in fields.items() if name not in asked}
        return replace(self, **own, request=self.request.change(asked)) if asked else replace(self, **own)


@dataclass(frozen=True, slots=True)
class ReservationRow:
    """Nodes reserved for projects and their descendants during a period; without projects: maintenance."""

    id: str
    name: str
    nodes: tuple[NodeId, ...]
    projects: tuple[ProjectId, ...]
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything a decision may use. The order of rows does not matter."""

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


class TaskShape(NamedTuple):
    """All that decides where one task fits: its request, and the nodes and GPUs that it may use.

    Where the request has ``share_mib``, the milli depend on the node, and ``milli`` is unused.
    """

    request: TaskRequest
    avoid_nodes: tuple[NodeId, ...] = ()
    node_affinity: NodeId | None = None
    tenant: ProjectId | None = None  # the project of a share; only its shares may use the same GPU
    same_gpus: bool = False  # all such tasks of a gang use GPUs of one model on one fabric


class HeldSlots(NamedTuple):
    """What one task holds: a node by index, GPU slots on it, milli of each, CPU and memory."""

    node: int
    slots: tuple[int, ...]
    milli: int
    cpu_milli: int
    memory_mib: int
    tenant: int = 0  # tenant number of its shares; 0 is none
