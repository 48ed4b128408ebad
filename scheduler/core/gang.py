"""A job while a decision is made: its tasks, what state each is in, and which of them come or leave next.

A *gang* is a job with its tasks. Tasks belong to leaf *groups*; a group is whole when at least ``least`` of its
tasks, or of its child groups, are active. A plain gang is one leaf group. Only ``trial.py`` changes states.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from enum import IntEnum
from math import ceil
from typing import NamedTuple

from scheduler.core.cluster import (
    WHOLE_MILLI,
    Ask,
    GroupRow,
    JobId,
    Near,
    NodeId,
    PendingRow,
    PoolId,
    ProjectId,
    RunningRow,
    UserId,
)
from scheduler.core.resources import Amounts
from scheduler.core.shape import Held, Shape


class State(IntEnum):
    """What a task does in the plan so far."""

    WAITS = 0
    RUNS = 1
    STARTS = 2
    KEPT = 3
    """It starts once others have left; the place is kept."""
    LEAVES = 4


ACTIVE = (State.RUNS, State.STARTS, State.KEPT)


class Task:
    """One rank. ``held`` is where it stands, ``kept`` where it is to stand."""

    __slots__ = ("amounts", "gang", "group", "held", "kept", "rank", "shape", "state")

    def __init__(self, gang: Gang, rank: int, group: Group, shape: Shape, amounts: Amounts) -> None:
        self.gang = gang
        self.rank = rank
        self.group = group
        self.shape = shape
        self.amounts = amounts
        self.state = State.WAITS
        self.held: tuple[Held, ...] = ()
        self.kept: Held | None = None


def _waits(task: Task) -> bool:
    return task.state is State.WAITS


class Group:
    """A part of a gang: a leaf with tasks, or an inner group with children."""

    __slots__ = ("active", "children", "least", "name", "near", "tasks")

    def __init__(self, name: str, least: int | None, near: Near | None) -> None:
        self.name = name
        self.least = least
        self.near = near
        self.children: list[Group] = []
        self.tasks: list[Task] = []
        self.active = 0  # tasks of a leaf that run, start or keep a place

    @property
    def needed(self) -> int:
        """How many tasks or children make it whole."""
        if self.least is not None:
            return self.least
        return len(self.children) if self.children else len(self.tasks)

    @property
    def whole(self) -> bool:
        """True when enough of it is active."""
        if self.children:
            return sum(child.whole for child in self.children) >= self.needed
        return self.active >= self.needed

    def all_tasks(self) -> Iterable[Task]:
        """Its tasks and those of the groups below it."""
        yield from self.tasks
        for child in self.children:
            yield from child.all_tasks()

    def to_place(self, comes: Callable[[Task], bool] = _waits) -> list[Task]:
        """The tasks that come next: all that make it whole, then one at a time; none when too few come."""
        if not self.children:
            return self._leaf_to_place(comes)
        ordered = sorted(self.children, key=_group_order)
        missing = self.needed - sum(child.whole for child in self.children)
        if missing <= 0:
            return next((tasks for child in ordered if (tasks := child.to_place(comes))), [])
        found: list[Task] = []
        for child in ordered:
            if missing and not child.whole and (tasks := child.to_place(comes)):
                found += tasks
                missing -= 1
        return found if not missing else []

    def _leaf_to_place(self, comes: Callable[[Task], bool]) -> list[Task]:
        missing = max(1, self.needed - self.active)
        waiting = []
        for task in self.tasks:
            if comes(task):
                waiting.append(task)
                if len(waiting) == missing:
                    return waiting
        return []

    def to_evict(self, gone: set[Task]) -> list[Task]:
        """The tasks that leave next, ``gone`` set aside: one that is more than it needs, else all."""
        if not self.children:
            standing = [task for task in self.tasks if task.state in ACTIVE and task not in gone]
            return standing[-1:] if len(standing) > self.needed else standing
        alive = [child for child in self.children if any(_stands(task, gone) for task in child.all_tasks())]
        for child in sorted(alive, key=_group_order, reverse=True):
            if not child.children and sum(_stands(task, gone) for task in child.tasks) > child.needed:
                return child.to_evict(gone)
        if len(alive) > self.needed:
            return alive[-1].to_evict(gone)
        return [task for task in self.all_tasks() if _stands(task, gone)]


def _stands(task: Task, gone: set[Task]) -> bool:
    return task.state in ACTIVE and task not in gone


def _group_order(group: Group) -> tuple[bool, float, str]:
    """Groups that are not whole first, then the one that is least beyond what it needs."""
    return (group.whole, group.active / group.needed if group.needed and not group.children else 0.0, "")


class Gang:
    """A job with its tasks, as one pool sees it."""

    __slots__ = (
        "_asked",
        "_growth",
        "_places",
        "_standing",
        "_waiting",
        "checkpoint_s",
        "fickle",
        "fixed",
        "groups",
        "job",
        "key",
        "kind",
        "leaf",
        "next",
        "ordered_s",
        "plain",
        "possible",
        "preemptible",
        "priority",
        "project",
        "question",
        "root",
        "row",
        "running",
        "started_s",
        "submitted_s",
        "tasks",
        "touched",
        "turn",
        "user",
    )

    def __init__(
        self,
        job: JobId,
        project: ProjectId,
        leaf: ProjectId,
        user: UserId,
        priority: int,
        preemptible: bool,
        submitted_s: float,
        started_s: float | None,
    ) -> None:
        self.job = job
        self.project = project
        self.leaf = leaf
        self.user = user
        self.priority = priority
        self.preemptible = preemptible
        self.submitted_s = submitted_s
        self.ordered_s = submitted_s  # its age in the queue
        self.started_s = started_s
        self.checkpoint_s: float | None = None
        self.row: PendingRow | None = None
        self.running: RunningRow | None = None
        self.root = Group("", None, None)
        self.groups: dict[str, Group] = {"": self.root}
        self.turn: tuple[int, float, str] | None = None  # its key in the queue, while nothing of it changes
        self.touched = False  # a task of it changed its state
        self.fixed = False  # others made room for it: nobody takes its start away in the same plan
        self.plain = True  # one group of equal tasks, none of which runs yet
        self.tasks: list[Task] = []
        self.question = -1
        self.kind = -1  # gangs of one kind differ only in age, and in a person nobody counts
        self.possible: Sequence[PoolId] = ()  # the pools where it could run if they were empty
        self.fickle = False  # what is possible changes with time, with other jobs or with one node
        self.key = -1  # where one of these could stand, all others with this number could
        # known until a task changes its state
        self.next: list[Task] | None = None
        self._asked: Amounts | None = None
        self._waiting: Amounts | None = None
        self._growth: int | None = None
        self._standing: list[Task] | None = None
        self._places: list[Held] | None = None

    def build_groups(self, rows: Sequence[GroupRow], least: int | None, near: Near | None) -> None:
        """Make the tree of groups; parents may stand after their children."""
        self.root.least = least
        self.root.near = near
        if not rows:
            return
        self.plain = False
        for row in rows:
            self.groups[row.name] = Group(row.name, row.least, row.near)
        for row in rows:
            self.groups[row.parent or ""].children.append(self.groups[row.name])

    def changed(self) -> None:
        """A task came or changed its state: what follows from that is worked out anew."""
        self.next = self._asked = self._waiting = self._growth = self._standing = self._places = None
        self.touched = True

    def to_place(self) -> list[Task]:
        """The tasks that would be placed next."""
        if self.next is None:
            self.next = self.root.to_place()
        return self.next

    @property
    def asked(self) -> Amounts:
        """What the tasks that come next ask together."""
        if self._asked is None:
            self._asked = total(self.to_place())
        return self._asked

    @property
    def waiting(self) -> Amounts:
        """What all its tasks that wait ask together."""
        if self._waiting is None:
            self._waiting = total(task for task in self.tasks if task.state is State.WAITS)
        return self._waiting

    @property
    def standing(self) -> list[Task]:
        """Its tasks that could leave: they run or start."""
        if self._standing is None:
            self._standing = [task for task in self.tasks if task.state in (State.RUNS, State.STARTS)]
        return self._standing

    @property
    def places(self) -> list[Held]:
        """What these hold."""
        if self._places is None:
            self._places = [place for task in self.standing for place in task.held]
        return self._places

    @property
    def active(self) -> int:
        """How many tasks run, start or keep a place."""
        return sum(task.state in ACTIVE for task in self.tasks)

    def growth_without(self, gone: set[Task]) -> int:
        """``growth`` once ``gone`` have left."""
        leaves = [group for group in self.groups.values() if not group.children]
        active = [sum(_stands(task, gone) for task in leaf.tasks) for leaf in leaves]
        if any(count > leaf.needed for count, leaf in zip(active, leaves, strict=True)):
            return 2
        return int(all(count >= leaf.needed for count, leaf in zip(active, leaves, strict=True)))

    @property
    def growth(self) -> int:
        """0 below what it needs, 1 just whole, 2 beyond."""
        if self._growth is None:
            self._growth = self._grown()
        return self._growth

    def _grown(self) -> int:
        if not self.root.whole:
            return 0
        if self.root.children:
            return 2 if any(not g.children and g.active > g.needed for g in self.groups.values()) else 1
        return 2 if self.root.active > self.root.needed else 1


def first_to_place(group: Sequence[Gang]) -> Gang | None:
    """The first gang of a kind with tasks to place; nearly always it is the first of all."""
    if group[0].to_place():
        return group[0]
    return next((gang for gang in group if gang.to_place()), None)


class Wanted(NamedTuple):
    """Tasks that are alike and start together: the shape of each, what each counts for, and how many."""

    shape: Shape
    each: Amounts
    tasks: int
    near: Near | None
    preemptible: bool


def total(tasks: Iterable[Task]) -> Amounts:
    """What tasks ask together."""
    milli = cpu = memory = 0.0
    for task in tasks:
        milli += task.amounts[0]
        cpu += task.amounts[1]
        memory += task.amounts[2]
    return Amounts(milli, cpu, memory)


def shape_of(
    ask: Ask, project: ProjectId, avoid: tuple[NodeId, ...], affinity: NodeId | None, smallest_gpu_mib: int
) -> tuple[Shape, Amounts]:
    """The shape of a task of ``project`` and what it counts for.

    A share by memory becomes milli of the smallest GPU.
    """
    milli = ask.milli
    if ask.share_mib is not None:
        milli = min(WHOLE_MILLI + 1, ceil(WHOLE_MILLI * ask.share_mib / max(1, smallest_gpu_mib)))
    shape = Shape(
        ask.gpus,
        milli if ask.gpus else WHOLE_MILLI,
        ask.gpu_model,
        ask.min_gpu_memory_mib,
        ask.cpu_milli,
        ask.memory_mib,
        avoid,
        affinity,
        mig_profile=ask.mig_profile,
        min_compute_capability=ask.min_compute_capability,
        tenant=project if ask.shares else None,
    )
    return shape, Amounts(ask.gpus * milli if ask.gpus else 0, ask.cpu_milli, ask.memory_mib)


def gang_of_pending(row: PendingRow, leaf: ProjectId, smallest_gpu_mib: int) -> Gang:
    """A job of which nothing runs."""
    gang = Gang(row.job, row.project, leaf, row.user, row.priority, row.preemptible, row.submitted_s, None)
    gang.build_groups(row.groups, row.min_tasks, row.near)
    add_waiting(gang, row, smallest_gpu_mib)
    return gang


def add_waiting(gang: Gang, row: PendingRow, smallest_gpu_mib: int) -> None:
    """Add the ranks of ``row`` that wait."""
    gang.row = row
    avoid = tuple(sorted(row.avoid_nodes))
    asks = row.asks or (row.ask,) * row.tasks
    gang.plain = gang.plain and not row.asks and not gang.tasks
    shapes: dict[Ask, tuple[Shape, Amounts]] = {}
    for i, ask in enumerate(asks):
        if ask not in shapes:
            shapes[ask] = shape_of(ask, row.project, avoid, row.node_affinity, smallest_gpu_mib)
        shape, amounts = shapes[ask]
        group = gang.groups[row.group_of[i]] if row.group_of else gang.root
        task = Task(gang, row.ranks[i] if row.ranks else i, group, shape, amounts)
        group.tasks.append(task)
        gang.tasks.append(task)


def gang_of_running(row: RunningRow, leaf: ProjectId, held: Sequence[tuple[Held, ...]]) -> Gang:
    """A job that runs; ``held`` is what each of its tasks would give back."""
    gang = Gang(
        row.job, row.project, leaf, row.user, row.priority, row.preemptible,
        row.started_s if row.submitted_s is None else row.submitted_s, row.started_s,
    )  # fmt: skip
    gang.running = row
    gang.checkpoint_s = row.checkpoint_s
    gang.build_groups(row.groups, row.min_tasks, row.near)
    gang.plain = False
    avoid = tuple(sorted(row.avoid_nodes))
    rank = -1
    for stands, places in zip(row.tasks, held, strict=True):
        rank = rank + 1 if stands.rank is None else stands.rank
        milli = sum(share.milli for share in stands.gpus)
        shape = Shape(
            len(stands.gpus),
            stands.gpus[0].milli if stands.gpus else WHOLE_MILLI,
            row.gpu_model,
            row.min_gpu_memory_mib,
            stands.cpu_milli,
            stands.memory_mib,
            avoid,
            row.node_affinity,
            mig_profile=row.mig_profile,
            min_compute_capability=row.min_compute_capability,
            tenant=row.project if stands.gpus and stands.gpus[0].milli < WHOLE_MILLI else None,
        )
        group = gang.groups[stands.group or ""]
        task = Task(gang, rank, group, shape, Amounts(milli, stands.cpu_milli, stands.memory_mib))
        task.held = places
        task.state = State.LEAVES if row.stopping or stands.stopping else State.RUNS
        group.active += task.state is State.RUNS
        group.tasks.append(task)
        gang.tasks.append(task)
    return gang
