"""When a waiting job will start: the queue played forward with drawn durations.

One play: running jobs end after drawn times; whoever ends gives its node GPUs back, and free GPUs go to the
project that holds least of its share with its next job counted, in each project by turn, passing over what
does not fit; a task stands on the node that it fills best. Jobs still to come are not known and not drawn.
The plays give a median; how past waits came out against such medians gives the interval around it
(``calibration.py``).

Everything is deterministic: draws are the fractions of ``job * golden ratio + play``, not random numbers.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from scheduler.core.ageing import ordered_s
from scheduler.core.carry import after_commit
from scheduler.core.cluster import (
    WHOLE_MILLI,
    JobId,
    NodeId,
    NodeRow,
    PendingRow,
    PoolId,
    ProjectId,
    RunningRow,
    Snapshot,
)
from scheduler.core.plan import Plan
from scheduler.core.policy import Policy
from scheduler.core.predict import Durations, Kind

PLAYS = 8
MOST_STEPS = 3_000
"""Ends looked at in one play; a job that has not started by then starts at the last of them."""

GOLDEN = 0.618_033_988_749_895
UNKNOWN_S = 600.0
"""A job of which nothing is known runs so long, or as long again as it has."""

LEAVING_S = 1.0
"""A job that is asked to leave is gone after this."""


class Holds(NamedTuple):
    """A running job: what is left of it in each play, in seconds."""

    project: ProjectId
    places: tuple[tuple[int, int], ...]  # node and thousandths of a GPU, for each task
    left_s: Sequence[float]


class Waits(NamedTuple):
    """A waiting job, in the order of turns: how long it will run in each play, in seconds."""

    job: JobId
    project: ProjectId
    tasks: tuple[int, ...]  # thousandths of a GPU, for each task
    runs_s: Sequence[float]

    @property
    def milli(self) -> int:
        """Of the whole gang."""
        return sum(self.tasks)


def parts(number: int, plays: int = PLAYS) -> list[float]:
    """Which part of its like a job is drawn from in each play: evenly spread over plays and over jobs."""
    return [(number * GOLDEN + (play + 0.5) / plays) % 1.0 for play in range(plays)]


def play_forward(
    target: Waits,
    free_milli: Sequence[int],
    running: Sequence[Holds],
    waiting: Sequence[Waits],
    share_milli: Mapping[ProjectId, float],
    plays: int = PLAYS,
    most_steps: int = MOST_STEPS,
) -> list[float]:
    """In how many seconds ``target`` starts, in each play, ascending.

    ``free_milli`` is what each node has free, ``waiting`` holds who else has a turn.
    """
    return sorted(
        _Play(play, free_milli, running, (*waiting, target), share_milli).starts_s(len(waiting), most_steps)
        for play in range(plays)
    )


class _Play:
    """One play of the queue."""

    def __init__(
        self,
        play: int,
        free_milli: Sequence[int],
        running: Sequence[Holds],
        waiting: Sequence[Waits],
        share_milli: Mapping[ProjectId, float],
    ) -> None:
        self._play = play
        self._waiting = waiting
        self._share_milli = share_milli
        self._nodes = _Nodes(free_milli)
        self._ends = [(job.left_s[play], n, job.project, job.places) for n, job in enumerate(running)]
        heapq.heapify(self._ends)
        self._number = len(running)
        self._held: dict[ProjectId, int] = {}
        for job in running:
            self._count(job.project, job.places, +1)
        # by project and kind of gang, whose turns wait; equal gangs fit or do not fit together
        self._queues: dict[ProjectId, dict[tuple[int, ...], deque[int]]] = {}
        for turn, each in enumerate(waiting):
            self._queues.setdefault(each.project, {}).setdefault(each.tasks, deque()).append(turn)

    def starts_s(self, target: int, most_steps: int) -> float:
        """When the turn ``target`` starts, or how far the play came."""
        now_s = 0.0
        for _ in range(most_steps):
            while (turn := self._next()) is not None:
                if turn == target:
                    return now_s
                self._start(turn, now_s)
            if not self._ends:
                break
            now_s, _, project, places = heapq.heappop(self._ends)
            self._count(project, places, -1)
            for node, milli in places:
                self._nodes.give(node, milli)
        return now_s

    def _count(self, project: ProjectId, places: tuple[tuple[int, int], ...], sign: int) -> None:
        milli = sum(milli for _, milli in places)
        self._held[project] = self._held.get(project, 0) + sign * milli

    def _next(self) -> int | None:
        """Whose turn it is, of those that fit."""
        best: tuple[float, int] | None = None
        for project, queues in self._queues.items():
            turns = [queue[0] for tasks, queue in queues.items() if self._nodes.fits(tasks)]
            if turns:
                turn = min(turns)
                milli = self._held.get(project, 0) + self._waiting[turn].milli
                mine = (milli / max(1.0, self._share_milli.get(project, 0.0)), turn)
                if best is None or mine < best:
                    best = mine
        return None if best is None else best[1]

    def _start(self, turn: int, now_s: float) -> None:
        job = self._waiting[turn]
        queues = self._queues[job.project]
        queues[job.tasks].popleft()
        if not queues[job.tasks]:
            del queues[job.tasks]
        places = tuple((self._nodes.take(milli), milli) for milli in job.tasks)
        self._count(job.project, places, +1)
        self._number += 1
        heapq.heappush(self._ends, (now_s + job.runs_s[self._play], self._number, job.project, places))


class _Nodes:
    """What nodes have free, and which nodes have how much."""

    def __init__(self, free_milli: Sequence[int]) -> None:
        self._free = list(free_milli)
        self._having: dict[int, list[int]] = {}
        for node, milli in enumerate(free_milli):
            self._having.setdefault(milli, []).append(node)

    def fits(self, tasks: tuple[int, ...]) -> bool:
        """True when a gang of equal tasks, or of one, finds nodes."""
        first, count = tasks[0], len(tasks)
        if count == 1:
            return any(milli >= first and nodes for milli, nodes in self._having.items())
        least = max(1, min(tasks))
        return sum(len(nodes) * (milli // least) for milli, nodes in self._having.items()) >= count

    def take(self, milli: int) -> int:
        """The node that ``milli`` more fill best; the emptiest, overfull, when a gang of unequal tasks got there."""
        fitting = [free for free, nodes in self._having.items() if nodes and free >= milli]
        free = min(fitting) if fitting else max(free for free, nodes in self._having.items() if nodes)
        node = self._having[free][-1]
        self.give(node, -milli)
        return node

    def give(self, node: int, milli: int) -> None:
        """Frees (or takes, when negative) GPUs of a node."""
        self._having[self._free[node]].remove(node)
        self._free[node] += milli
        self._having.setdefault(self._free[node], []).append(node)


class Outlook:
    """What is known of one pool's future after a plan: who runs how much longer, who waits, whose share is what.

    ``had_s`` tells of jobs that ran before how long; ``template_of`` from which template a job was made.
    """

    def __init__(
        self,
        snapshot: Snapshot,
        plan: Plan,
        pool: PoolId,
        durations: Durations,
        policy: Policy,
        had_s: Mapping[JobId, float] = MappingProxyType({}),
        template_of: Mapping[JobId, str | None] = MappingProxyType({}),
    ) -> None:
        after = after_commit(snapshot, plan)
        self._durations = durations
        self._policy = policy
        self._had_s = had_s
        self._template_of = template_of
        nodes = sorted((node for node in after.nodes if node.pool == pool), key=lambda node: node.id)
        index = {node.id: n for n, node in enumerate(nodes)}
        self._free_milli = [_free_milli(node) for node in nodes]
        self._running = [
            self._holds(row, after.now_s, index, number)
            for number, row in enumerate(sorted(after.running, key=lambda row: row.job))
            if row.pool == pool
        ]
        rows = sorted(
            (row for row in after.pending if row.pools[:1] == (pool,) and row.total_milli and not row.after),
            key=lambda row: (ordered_s(row, policy), row.job),
        )
        self._waiting = {row.job: self._waits(row, number) for number, row in enumerate(rows)}
        self._turn = {job: number for number, job in enumerate(self._waiting)}
        self._share_milli = {
            each.project: each.fair_share_milli for each in plan.receipts if each.pool == pool
        }

    def median_s(self, job: JobId) -> float:
        """In how many seconds a waiting job of this pool starts, at the median of the plays.

        Raises:
            KeyError: it does not wait here, or asks for no GPU.
        """
        target = self._waiting[job]
        others = [
            each
            for each in self._waiting.values()
            if each.project != target.project or self._turn[each.job] < self._turn[job]
        ]
        plays = play_forward(target, self._free_milli, self._running, others, self._share_milli)
        return plays[len(plays) // 2]

    def _holds(self, row: RunningRow, now_s: float, index: Mapping[NodeId, int], number: int) -> Holds:
        places = tuple(
            (index[task.node], sum(gpu.milli for gpu in task.gpus))
            for task in row.tasks
            if task.node in index
        )
        if row.stopping:
            return Holds(row.project, places, [LEAVING_S] * PLAYS)
        ran_s = max(0.0, now_s - row.started_s)
        kind = Kind(row.project, row.user, self._template_of.get(row.job), sum(milli for _, milli in places))
        had_s = self._had_s.get(row.job, 0.0) + ran_s
        limit_s = None if row.time_limit_s is None else row.time_limit_s + had_s - ran_s
        return Holds(row.project, places, self._drawn(kind, had_s, limit_s, number))

    def _waits(self, row: PendingRow, number: int) -> Waits:
        tasks = tuple(ask.gpus * ask.milli for ask in row.asks) or (row.task_milli,) * row.tasks
        kind = Kind(row.project, row.user, self._template_of.get(row.job), row.total_milli)
        had_s = self._had_s.get(row.job, 0.0)
        limit_s = None if row.time_limit_s is None else row.time_limit_s + had_s
        return Waits(row.job, row.project, tasks, self._drawn(kind, had_s, limit_s, number))

    def _drawn(self, kind: Kind, had_s: float, limit_s: float | None, number: int) -> list[float]:
        """How long a job still runs, in each play."""
        drawn = []
        for part in parts(number):
            left_s = self._durations.left_s(kind, had_s, limit_s, part)
            drawn.append(max(UNKNOWN_S, 2.0 * part * had_s) if left_s is None else left_s)
        return drawn


def _free_milli(node: NodeRow) -> int:
    """What a node that takes work has free."""
    if not (node.schedulable and node.reachable):
        return 0
    return sum(WHOLE_MILLI - gpu.used_milli for gpu in node.gpus if gpu.healthy)
