"""The photograph of the cluster that every decision starts from: frozen rows, checked at the border.

Ids are public ids (short strings), GPU ids are the UUIDs the nodes tell. GPU amounts are ``milli``
(thousandths of one GPU), memory is MiB, times are float seconds since the epoch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, NewType

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


@dataclass(frozen=True, slots=True)
class PoolRow:
    """A group of nodes that a quota speaks about. ``placement`` None means the policy's strategy.

    ``knobs`` are the knobs of the policy that have another value in this pool, by name.
    """

    id: PoolId
    name: str
    placement: str | None = None  # "pack" | "spread"
    knobs: tuple[tuple[str, float | str], ...] = ()


@dataclass(frozen=True, slots=True)
class GpuRow:
    """One GPU of a node. ``used_milli`` counts every allocation not yet proven gone."""

    uuid: GpuUuid
    index: int
    model: str
    memory_mib: int
    used_milli: int = 0
    whole: bool = False  # a whole allocation stands on it, so no share may join
    healthy: bool = True


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


@dataclass(frozen=True, slots=True)
class ProjectRow:
    """A project in the tree; ``parent`` None is a top project."""

    id: ProjectId
    name: str
    parent: ProjectId | None
    created_s: float


@dataclass(frozen=True, slots=True)
class QuotaRow:
    """What a project is promised in a pool. ``limit_milli`` None is no limit.

    A project without a row for a pool has guaranteed 0, no limit, weight 1 and priority 0 there.
    """

    project: ProjectId
    pool: PoolId
    guaranteed_milli: int
    limit_milli: int | None
    weight: float = 1.0
    priority: int = 0


@dataclass(frozen=True, slots=True)
class UsageRow:
    """Decayed GPU-seconds (whole GPUs x seconds) of one person in one project and pool.

    A project's own usage is the sum over its rows; ``user`` None is usage of nobody in particular.
    ``scheduler.core.usage.decayed_gpu_seconds`` makes the number from ledger intervals.
    """

    project: ProjectId
    pool: PoolId
    user: UserId | None
    gpu_seconds: float


@dataclass(frozen=True, slots=True)
class RunningTask:
    """Where one rank stands and what it was promised there."""

    node: NodeId
    gpus: tuple[GpuShare, ...]
    cpu_milli: int
    memory_mib: int


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
    stopping_for: JobId | None = None
    checkpoint_s: float | None = None  # when it last saved its work
    name: str = ""


@dataclass(frozen=True, slots=True)
class PendingRow:
    """A job that waits. All ``tasks`` start together or none does; the amounts are per task.

    ``milli_per_gpu`` 1000 asks for whole GPUs, less for a share of each of ``gpus_per_task`` GPUs.
    ``node_affinity`` names the one node that holds its home volume. Of the ``avoid_nodes``, those that are
    ``unfit_nodes`` can never run it (another kind of runtime); the others are avoided for a while. On its
    ``promised_nodes`` others have made room for it and are gone: it comes first to what they left.
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
    unfit_nodes: tuple[NodeId, ...] = ()
    promised_nodes: tuple[NodeId, ...] = ()

    @property
    def task_milli(self) -> int:
        """What one task asks, in thousandths of a GPU."""
        return self.gpus_per_task * self.milli_per_gpu

    @property
    def total_milli(self) -> int:
        """What the whole gang asks, in thousandths of a GPU."""
        return self.tasks * self.task_milli


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
