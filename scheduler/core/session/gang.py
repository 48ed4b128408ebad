"""A job within a decision: its tasks, their states, and which tasks to place or evict next.

A *gang* is a job with its tasks. Tasks belong to leaf *groups*; a group is satisfied when at least
``min_members`` of its tasks, or of its child groups, are active. A job without groups is one leaf group. Only
``Statement`` (``gang_placement.py``) changes states.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from math import ceil
from typing import NamedTuple

from scheduler.core.model.resources import ResourceVector
from scheduler.core.model.snapshot import (
    WHOLE_MILLI,
    HeldSlots,
    JobId,
    NodeId,
    PendingRow,
    PoolId,
    ProjectId,
    RunningRow,
    TaskRequest,
    TaskShape,
    TopologyConstraint,
    UserId,
)


class GangTaskState(IntEnum):
    """The state of a task in the plan so far."""

    PENDING = 0
    RUNNING = 1
    ALLOCATED = 2
    NOMINATED = 3
    """Starts on reserved slots once evicted jobs are gone."""
    RELEASING = 4


ACTIVE_STATES = (GangTaskState.RUNNING, GangTaskState.ALLOCATED, GangTaskState.NOMINATED)


@dataclass(slots=True, eq=False)
class GangTask:
    """One rank. ``held`` are its current slots, ``nominated`` its future ones."""

    gang: Gang
    rank: int
    group: TaskGroup
    shape: TaskShape
    amounts: ResourceVector
    state: GangTaskState = GangTaskState.PENDING
    held: tuple[HeldSlots, ...] = ()
    nominated: HeldSlots | None = None

    @property
    def later_slots(self) -> tuple[HeldSlots, ...]:
        """Its slots once all releasing tasks are gone."""
        return self.held if self.nominated is None else (self.nominated,)


def _is_pending(task: GangTask) -> bool:
    return task.state is GangTaskState.PENDING


@dataclass(slots=True, eq=False)
class TaskGroup:
    """A part of a gang: a leaf with tasks, or an inner group with children."""

    min_members: int | None
    topology_constraint: TopologyConstraint | None
    children: list[TaskGroup] = field(default_factory=list)
    tasks: list[GangTask] = field(default_factory=list)
    active_count: int = 0  # tasks of a leaf that run, start or are nominated

    @property
    def required_members(self) -> int:
        """How many tasks or children satisfy the group."""
        if self.min_members is not None:
            return self.min_members
        return len(self.children) if self.children else len(self.tasks)

    @property
    def is_satisfied(self) -> bool:
        if self.children:
            return sum(child.is_satisfied for child in self.children) >= self.required_members
        return self.active_count >= self.required_members

    def all_tasks(self) -> Iterable[GangTask]:
        yield from self.tasks
        for child in self.children:
            yield from child.all_tasks()

    def next_to_place(self, is_candidate: Callable[[GangTask], bool] = _is_pending) -> list[GangTask]:
        """Return the tasks to place next: those that satisfy the group, then one at a time."""
        if not self.children:
            return self._next_of_leaf(is_candidate)
        ordered = sorted(self.children, key=_group_order)
        missing = self.required_members - sum(child.is_satisfied for child in self.children)
        if missing <= 0:
            return next((tasks for child in ordered if (tasks := child.next_to_place(is_candidate))), [])
        found: list[GangTask] = []
        for child in ordered:
            if missing and not child.is_satisfied and (tasks := child.next_to_place(is_candidate)):
                found += tasks
                missing -= 1
        return found if not missing else []

    def _next_of_leaf(self, is_candidate: Callable[[GangTask], bool]) -> list[GangTask]:
        missing = max(1, self.required_members - self.active_count)
        waiting = []
        for task in self.tasks:
            if is_candidate(task):
                waiting.append(task)
                if len(waiting) == missing:
                    return waiting
        return []

    def next_to_evict(self, gone: set[GangTask]) -> list[GangTask]:
        """Return the tasks to evict next, not counting ``gone``: one beyond the minimum, else all."""
        if not self.children:
            standing = [task for task in self.tasks if task.state in ACTIVE_STATES and task not in gone]
            return standing[-1:] if len(standing) > self.required_members else standing
        alive = [
            child for child in self.children if any(_is_active(task, gone) for task in child.all_tasks())
        ]
        for child in sorted(alive, key=_group_order, reverse=True):
            if (
                not child.children
                and sum(_is_active(task, gone) for task in child.tasks) > child.required_members
            ):
                return child.next_to_evict(gone)
        if len(alive) > self.required_members:
            return alive[-1].next_to_evict(gone)
        return [task for task in self.all_tasks() if _is_active(task, gone)]


def _is_active(task: GangTask, gone: set[GangTask]) -> bool:
    return task.state in ACTIVE_STATES and task not in gone


def _group_order(group: TaskGroup) -> tuple[bool, float]:
    """Order groups: unsatisfied first, then the smallest ratio of active to required tasks."""
    return (
        group.is_satisfied,
        group.active_count / group.required_members if group.required_members and not group.children else 0.0,
    )


@dataclass(slots=True, eq=False)
class Gang:
    """A job with its tasks, as seen by one pool."""

    job: JobId
    leaf_project: ProjectId
    user: UserId
    priority: int
    preemptible: bool
    submitted_s: float
    started_s: float | None
    root: TaskGroup
    groups: dict[str, TaskGroup]
    homogeneous: bool  # one group of equal tasks, none of which runs yet
    effective_submit_s: float = 0.0  # submit time as the queue orders it
    queue_rank: int = 0
    pending_row: PendingRow | None = None
    running_row: RunningRow | None = None
    sort_key: tuple[int, int, float, str] | None = None  # cached while the gang is unchanged
    dirty: bool = False  # a task changed its state in this decision
    pinned: bool = False  # started on slots that an earlier plan nominated: not evicted
    tasks: list[GangTask] = field(default_factory=list)
    quota_class_id: int = -1
    class_id: int = -1  # gangs of one class differ only in age, and in user where no quota counts users
    feasible_pools: Sequence[PoolId] = ()  # pools where it could run if they were empty
    time_dependent: bool = False  # feasibility changes with time, other jobs or one node
    shape_id: int = -1  # gangs of one shape id fit in the same places
    # cached until a task changes its state; slots are faster than ``cached_property``
    _next_tasks: list[GangTask] | None = None
    _next_demand: ResourceVector | None = None
    _pending_demand: ResourceVector | None = None
    _size_level: int | None = None
    _evictable_tasks: list[GangTask] | None = None
    _evictable_slots: list[HeldSlots] | None = None

    def mark_changed(self) -> None:
        """Discard cached values after a task was added or changed its state."""
        self._next_tasks = self._next_demand = self._pending_demand = self._size_level = (
            self._evictable_tasks
        ) = self._evictable_slots = None
        self.dirty = True

    @property
    def next_tasks(self) -> list[GangTask]:
        """The tasks to place next."""
        if self._next_tasks is None:
            self._next_tasks = self.root.next_to_place()
        return self._next_tasks

    @property
    def is_placed(self) -> bool:
        """True if this plan places a task of it."""
        return any(task.state in (GangTaskState.ALLOCATED, GangTaskState.NOMINATED) for task in self.tasks)

    @property
    def next_demand(self) -> ResourceVector:
        """The demand of the tasks to place next."""
        if self._next_demand is None:
            self._next_demand = total_demand(self.next_tasks)
        return self._next_demand

    @property
    def pending_demand(self) -> ResourceVector:
        if self._pending_demand is None:
            self._pending_demand = total_demand(
                task for task in self.tasks if task.state is GangTaskState.PENDING
            )
        return self._pending_demand

    @property
    def evictable_tasks(self) -> list[GangTask]:
        """Its running tasks, and those that this plan starts or nominates."""
        if self._evictable_tasks is None:
            self._evictable_tasks = [
                task
                for task in self.tasks
                if task.state in ACTIVE_STATES
                and not (task.state is GangTaskState.NOMINATED and self.was_nominated)
            ]
        return self._evictable_tasks

    @property
    def was_nominated(self) -> bool:
        """Whether an earlier plan nominated slots for it."""
        rows = (self.pending_row, self.running_row)
        return any(row is not None and bool(row.nominated_tasks) for row in rows)

    @property
    def evictable_slots(self) -> list[HeldSlots]:
        if self._evictable_slots is None:
            self._evictable_slots = [place for task in self.evictable_tasks for place in task.later_slots]
        return self._evictable_slots

    def size_level_without(self, gone: set[GangTask]) -> int:
        """Return ``size_level`` without the tasks in ``gone``."""
        leaves = [group for group in self.groups.values() if not group.children]
        active = [sum(_is_active(task, gone) for task in leaf.tasks) for leaf in leaves]
        if any(count > leaf.required_members for count, leaf in zip(active, leaves, strict=True)):
            return 2
        return int(all(count >= leaf.required_members for count, leaf in zip(active, leaves, strict=True)))

    @property
    def size_level(self) -> int:
        """0 below the minimum, 1 at it, 2 above."""
        if self._size_level is None:
            self._size_level = self._compute_size_level()
        return self._size_level

    def _compute_size_level(self) -> int:
        if not self.root.is_satisfied:
            return 0
        if self.root.children:
            return (
                2
                if any(not g.children and g.active_count > g.required_members for g in self.groups.values())
                else 1
            )
        return 2 if self.root.active_count > self.root.required_members else 1


def first_placeable(group: Sequence[Gang]) -> Gang | None:
    """Return the first gang of a class with tasks to place; nearly always the very first."""
    if group[0].next_tasks:
        return group[0]
    return next((gang for gang in group if gang.next_tasks), None)


class BatchRequest(NamedTuple):
    """Equal tasks that start together: their shape, demand per task, and number."""

    shape: TaskShape
    per_task: ResourceVector
    task_count: int
    topology_constraint: TopologyConstraint | None
    preemptible: bool


def total_demand(tasks: Iterable[GangTask]) -> ResourceVector:
    milli = cpu = memory = 0.0
    for task in tasks:
        milli += task.amounts[0]
        cpu += task.amounts[1]
        memory += task.amounts[2]
    return ResourceVector(milli, cpu, memory)


def build_task_shape(
    request: TaskRequest,
    project: ProjectId,
    avoid_nodes: tuple[NodeId, ...],
    node_affinity: NodeId | None,
    smallest_gpu_mib: int,
    *,
    same_gpus: bool,
) -> tuple[TaskShape, ResourceVector]:
    """Return the shape and the demand of a task of ``project``.

    A share by memory becomes milli of the smallest GPU.
    """
    tenant = project if request.is_fractional else None
    if request.share_mib is not None:
        milli = min(WHOLE_MILLI + 1, ceil(WHOLE_MILLI * request.share_mib / max(1, smallest_gpu_mib)))
        request = request._replace(milli=milli, share_mib=None)
    if not request.gpus and request.milli != WHOLE_MILLI:
        request = request._replace(milli=WHOLE_MILLI)
    shape = TaskShape(request, avoid_nodes, node_affinity, tenant, same_gpus and request.gpus > 0)
    return shape, ResourceVector(request.total_milli, request.cpu_milli, request.memory_mib)


def build_pending_gang(row: PendingRow, leaf_project: ProjectId, smallest_gpu_mib: int) -> Gang:
    """Build the gang of a job without running tasks."""
    gang = _new_gang(row, leaf_project, row.submitted_s, None)
    add_pending_tasks(gang, row, smallest_gpu_mib)
    return gang


def _new_gang(
    row: PendingRow | RunningRow, leaf_project: ProjectId, submitted_s: float, started_s: float | None
) -> Gang:
    """Build a gang without tasks, with its tree of groups; parents may come after their children."""
    root = TaskGroup(row.min_tasks, row.topology_constraint)
    groups = {"": root} | {
        each.name: TaskGroup(each.min_members, each.topology_constraint) for each in row.groups
    }
    for each in row.groups:
        groups[each.parent or ""].children.append(groups[each.name])
    return Gang(
        row.job, leaf_project, row.user, row.priority, row.preemptible, submitted_s, started_s, root, groups,
        homogeneous=not row.groups, effective_submit_s=submitted_s,
    )  # fmt: skip


def add_pending_tasks(gang: Gang, row: PendingRow, smallest_gpu_mib: int) -> None:
    gang.pending_row = row
    avoid = tuple(sorted(row.avoid_nodes))
    asks = row.task_requests or (row.request,) * row.tasks
    gang.homogeneous = gang.homogeneous and not row.task_requests and not gang.tasks
    shapes: dict[TaskRequest, tuple[TaskShape, ResourceVector]] = {}
    for i, ask in enumerate(asks):
        if ask not in shapes:
            shapes[ask] = build_task_shape(
                ask, row.project, avoid, row.node_affinity, smallest_gpu_mib, same_gpus=row.needs_same_gpus
            )
        shape, amounts = shapes[ask]
        group = gang.groups[row.group_of_rank[i]] if row.group_of_rank else gang.root
        task = GangTask(gang, row.ranks[i] if row.ranks else i, group, shape, amounts)
        group.tasks.append(task)
        gang.tasks.append(task)


def build_running_gang(
    row: RunningRow, leaf_project: ProjectId, held: Sequence[tuple[HeldSlots, ...]]
) -> Gang:
    """Build the gang of a running job; ``held`` are the slots of each of its tasks."""
    submitted_s = row.started_s if row.submitted_s is None else row.submitted_s
    gang = _new_gang(row, leaf_project, submitted_s, row.started_s)
    gang.running_row = row
    gang.homogeneous = False
    avoid = tuple(sorted(row.avoid_nodes))
    rank = -1
    for stands, places in zip(row.tasks, held, strict=True):
        rank = rank + 1 if stands.rank is None else stands.rank
        request = stands.request(row.constraints)._replace(share_mib=None)  # it holds milli of known GPUs
        shape, _ = build_task_shape(
            request, row.project, avoid, row.node_affinity, smallest_gpu_mib=1, same_gpus=row.needs_same_gpus
        )
        amounts = ResourceVector(
            sum(share.milli for share in stands.gpus), stands.cpu_milli, stands.memory_mib
        )
        stopping = row.stopping or stands.stopping
        state = GangTaskState.RELEASING if stopping else GangTaskState.RUNNING
        group = gang.groups[stands.group or ""]
        task = GangTask(gang, rank, group, shape, amounts, state, places)
        group.active_count += not stopping
        group.tasks.append(task)
        gang.tasks.append(task)
    return gang
