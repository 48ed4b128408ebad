"""When a waiting job will start: what is known of a pool's future, and the queue played forward from there.

Running jobs end and waiting ones run as jobs like them did; a play (``play.py``) tells who starts when. It obeys what
a decision obeys: where a task can stand (``ground.py``), limits and guarantees, reserved nodes. The plays give a
median; how past waits came out against such medians gives the interval around it (``calibration.py``).

Everything is deterministic: draws are the fractions of ``job * golden ratio + play``, not random numbers.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from types import MappingProxyType

from scheduler.core.ageing import ordered_s
from scheduler.core.carry import after_commit
from scheduler.core.cluster import (
    JobId,
    NodeId,
    PendingRow,
    PoolId,
    ReservationRow,
    RunningRow,
    Snapshot,
    UserId,
)
from scheduler.core.gang import shape_of
from scheduler.core.ground import Survey
from scheduler.core.ledger import PoolLedger
from scheduler.core.plan import Plan, Verdict
from scheduler.core.play import PLAYS, play_forward
from scheduler.core.policy import Policy
from scheduler.core.predict import Durations, Kind
from scheduler.core.reserved import stands_in_the_way
from scheduler.core.resources import NOTHING, Amounts
from scheduler.core.shape import Shape
from scheduler.core.stage import Closed, Holds, Line, Stage, Stake
from scheduler.core.tree import Tree

GOLDEN = 0.618_033_988_749_895
UNKNOWN_S = 600.0
"""A job of which nothing is known runs so long, or as long again as it has."""

LEAVING_S = 1.0
"""A job that is asked to leave is gone after this."""

NOBODY = UserId("")
"""Stands for everybody where nobody is counted."""

Asked = tuple[tuple[tuple[Shape, int], ...], Amounts]
"""What the tasks of a gang ask, with how many are alike, and what they count for together."""


def parts(number: int, plays: int = PLAYS) -> list[float]:
    """Which part of its like a job is drawn from in each play: evenly spread over plays and over jobs."""
    return [(number * GOLDEN + (play + 0.5) / plays) % 1.0 for play in range(plays)]


def waits_in(row: PendingRow, verdict: Verdict | None) -> PoolId | None:
    """The pool in which a job waits for its turn: where its verdict sees it, else its first choice."""
    seen = verdict.numbers.get("pool") if verdict is not None else None
    return PoolId(str(seen)) if seen is not None else next(iter(row.pools), None)


class Outlook:
    """What is known of one pool's future after a plan: who runs how much longer, who waits, whose share is what.

    ``had_s`` tells of jobs that ran before how long; ``template_of`` from which template a job was made; ``ends_s``
    when running jobs end of which that is taken as known, by the clock of the snapshot.
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
        ends_s: Mapping[JobId, float] = MappingProxyType({}),
    ) -> None:
        after = after_commit(snapshot, plan)
        self._now_s = after.now_s
        self._durations = durations
        self._had_s = had_s
        self._template_of = template_of
        self._ends_s = ends_s
        self._tree = Tree(after.projects)
        self._ledger = PoolLedger(self._tree.quotas(after.quotas, pool), self._tree.path)
        nodes = [node for node in after.nodes if node.pool == pool]
        self._smallest_gpu_mib = min((gpu.memory_mib for node in nodes for gpu in node.gpus), default=1)
        self._reservations = _still_to_come(after, {node.id for node in nodes})
        verdicts = {verdict.job: verdict for verdict in plan.verdicts}
        rows = sorted(
            (
                row
                for row in after.pending
                if _has_a_turn(row) and waits_in(row, verdicts.get(row.job)) == pool
            ),
            key=lambda row: (-row.priority, ordered_s(row, policy), row.job),
        )
        asked = [self._asked(row) for row in rows]
        shapes = dict.fromkeys(shape for tasks, _ in asked for shape, _ in tasks)
        here = sorted((row for row in after.running if row.pool == pool), key=lambda row: row.job)
        knobs = (each.knobs for each in after.pools if each.id == pool)
        sharing = None if policy.in_pool(next(knobs, ())).share_gpus == "anybody" else here
        self._survey = Survey(nodes, shapes, [row.nodes for row in self._reservations], sharing)
        running = [
            self._holds(row, number)
            for number, row in enumerate(sorted(after.running, key=lambda row: row.job))
            if row.pool == pool
        ]
        for job in running:
            self._count(job.stake)
        self._turn = {row.job: turn for turn, row in enumerate(rows)}
        self._stage = Stage(
            self._survey.ground(job.places for job in running),
            running,
            self._lines(rows, asked),
            [self._runs_s(row, turn) for turn, row in enumerate(rows)],
            {each.project: each.fair_share_milli for each in plan.receipts if each.pool == pool},
            self._ledger if self._ledger.bounds(all(row.preemptible for row in rows)) else None,
        )

    @property
    def turns(self) -> Sequence[JobId]:
        """The waiting jobs that have a turn here, in order."""
        return tuple(self._turn)

    def medians_s(self, jobs: Iterable[JobId]) -> dict[JobId, float]:
        """In how many seconds these waiting jobs of this pool start, each at the median of the plays.

        Infinite for a job that does not even once everything that runs or has its turn before it has ended; one
        that is further off than plays go is left out.

        Raises:
            KeyError: one has no turn here: it is held, awaits other jobs, or asks for no GPU.
        """
        turns = {self._turn[job]: job for job in jobs}
        found = {}
        for turn, plays in play_forward(self._stage, turns).items():
            known = sorted(start_s for start_s in plays if start_s is not None)
            if len(known) > len(plays) // 2:
                found[turns[turn]] = known[len(plays) // 2]
        return found

    def _count(self, stake: Stake) -> None:
        self._ledger.add(stake.leaf, stake.user, stake.amounts, stake.preemptible)

    def _stake(self, row: PendingRow | RunningRow, amounts: Amounts) -> Stake:
        """For whom a job counts; only what a quota bounds is told apart."""
        leaf = self._tree.leaf_of[row.project]
        user = row.user if self._ledger.counts_people(leaf) else NOBODY
        counted = amounts if self._ledger.counts_all else Amounts(amounts.gpu_milli)
        return Stake(row.project, leaf, user, row.preemptible, counted)

    # -- who runs --------------------------------------------------------------------------------------

    def _holds(self, row: RunningRow, number: int) -> Holds:
        milli = sum(gpu.milli for task in row.tasks for gpu in task.gpus)
        cpu_milli = sum(task.cpu_milli for task in row.tasks)
        memory_mib = sum(task.memory_mib for task in row.tasks)
        stake = self._stake(row, Amounts(milli, cpu_milli, memory_mib))
        places = self._survey.places(row.tasks)
        if row.stopping:
            return Holds(stake, places, [LEAVING_S] * PLAYS)
        if (end_s := self._ends_s.get(row.job)) is not None:
            return Holds(stake, places, [max(0.0, end_s - self._now_s)] * PLAYS)
        ran_s = max(0.0, self._now_s - row.started_s)
        kind = Kind(row.project, row.user, self._template_of.get(row.job), milli)
        had_s = self._had_s.get(row.job, 0.0) + ran_s
        limit_s = None if row.time_limit_s is None else row.time_limit_s + had_s - ran_s
        return Holds(stake, places, self._drawn(kind, had_s, limit_s, number))

    # -- who waits -------------------------------------------------------------------------------------

    def _asked(self, row: PendingRow) -> Asked:
        """What a job asks with the fewest tasks that it starts with."""
        avoid = tuple(sorted(row.avoid_nodes))
        found: Counter[Shape] = Counter()
        amounts = NOTHING
        for ask, count in Counter((row.asks or (row.ask,) * row.tasks)[: row.min_tasks]).items():
            shape, each = shape_of(ask, row.project, avoid, row.node_affinity, self._smallest_gpu_mib)
            amounts = amounts.plus(each.times(count))
            if ask.gpus:
                found[shape] += count
        return tuple(found.items()), amounts

    def _lines(self, rows: Sequence[PendingRow], asked: Sequence[Asked]) -> list[Line]:
        """The waiting jobs, those together that fit and are held back together."""
        turns: dict[Line, list[int]] = {}
        for turn, (row, (tasks, amounts)) in enumerate(zip(rows, asked, strict=True)):
            needs = tuple((self._survey.need(shape), count) for shape, count in tasks)
            from_s = max(0.0, (row.not_before_s or 0.0) - self._now_s)
            line = Line(self._stake(row, amounts), needs, (), from_s, self._closed_to(row))
            turns.setdefault(line, []).append(turn)
        return [line._replace(turns=mine) for line, mine in turns.items()]

    def _closed_to(self, row: PendingRow) -> tuple[Closed, ...]:
        """When reserved nodes take no job like this: from when it is not surely gone before, until they are free."""
        lineage = self._tree.path[self._tree.leaf_of[row.project]]
        found = []
        for reservation, sorts in zip(self._reservations, self._survey.apart, strict=True):
            if sorts and stands_in_the_way(reservation, lineage, self._now_s, None):
                lasts_s = math.inf if row.time_limit_s is None else row.time_limit_s
                after_s = reservation.from_s - lasts_s - self._now_s
                after_s = after_s if after_s >= 0.0 else -math.inf
                found.append(Closed(sorts, after_s, reservation.to_s - self._now_s))
        return tuple(found)

    def _runs_s(self, row: PendingRow, number: int) -> list[float]:
        kind = Kind(row.project, row.user, self._template_of.get(row.job), row.total_milli)
        had_s = self._had_s.get(row.job, 0.0)
        limit_s = None if row.time_limit_s is None else row.time_limit_s + had_s
        return self._drawn(kind, had_s, limit_s, number)

    def _drawn(self, kind: Kind, had_s: float, limit_s: float | None, number: int) -> list[float]:
        """How long a job still runs, in each play."""
        drawn = []
        for part in parts(number):
            left_s = self._durations.left_s(kind, had_s, limit_s, part)
            drawn.append(max(UNKNOWN_S, 2.0 * part * had_s) if left_s is None else left_s)
        return drawn


def _has_a_turn(row: PendingRow) -> bool:
    """False for a job that takes no GPU, that waits for something else than its turn, or runs and only grows."""
    return bool(row.total_milli) and not (row.held or row.after or row.ranks)


def _still_to_come(snapshot: Snapshot, nodes: Set[NodeId]) -> list[ReservationRow]:
    """What is reserved of these nodes now or later."""
    rows = (row for row in snapshot.reservations if row.to_s > snapshot.now_s)
    return sorted((row for row in rows if not nodes.isdisjoint(row.nodes)), key=lambda row: row.id)
