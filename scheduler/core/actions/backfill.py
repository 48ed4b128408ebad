"""Backfill reservations: the earliest start of a gang, and which later jobs may start without delaying it.

A gang of several tasks that waits longer than ``backfill_reserve_after_s`` gets a reservation, for the first few
gangs in fair order. Running jobs end at their time limit or predicted end; an unknown end counts as never, and
without known ends nothing is reserved, because a reservation without a start time would only keep GPUs idle. The
gang's start is the first of these ends at which it fits (the *shadow time* of EASY backfilling, Lifka 1995).
Later ends never free less, so a binary search finds it. A later job may start now if it ends before that time,
or on nodes without reserved slots. Further reservations treat the slots of earlier ones as taken from now on, so
none is computed too early.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from scheduler.core.capacity.node_capacity import Bools, SlotBatch
from scheduler.core.capacity.placement import NodePlacer
from scheduler.core.model.snapshot import HeldSlots, JobId, NodeId, NodeRow, PendingRow, TaskShape
from scheduler.core.session.gang import Gang, GangTaskState
from scheduler.core.session.pool import PoolState
from scheduler.core.shares.quota_ledger import AssumeReleased

MAX_RESERVED_GANGS = 4
"""Reservations in one pool at a time; more would block the pool for all others."""


class JobEnd(NamedTuple):
    """The expected end of a running job in seconds since the epoch (None is unknown), and its slots."""

    job: JobId
    end_s: float | None
    held: Sequence[HeldSlots]


@dataclass(frozen=True, slots=True)
class GangReservation:
    """Slots reserved for a gang from ``start_s`` on, in seconds since the epoch."""

    job: JobId
    start_s: float
    held: tuple[HeldSlots, ...]


class _ReleaseTime(NamedTuple):
    """A time at which slots become free: the number of jobs ended by then, and of those ended before."""

    at_s: float
    end_count: int
    earlier_end_count: int


def expected_end_s(
    now_s: float, started_s: float, time_limit_s: float | None, predicted_end_s: float | None
) -> float | None:
    """Return the predicted end, capped by the time limit; None is unknown.

    A prediction in the past is ignored; a time limit in the past means that the job ends at any moment.
    """
    limit_s = None if time_limit_s is None else max(now_s, started_s + time_limit_s)
    if predicted_end_s is None or predicted_end_s < now_s:
        return limit_s
    return predicted_end_s if limit_s is None else min(predicted_end_s, limit_s)


class ReservationPlanner:
    """The reservations of one pool in one decision. ``placer`` holds the free slots now and is not changed.

    ``steps_used`` counts the job ends that gangs wait for; a search that would pass ``max_steps`` finds
    nothing.
    """

    def __init__(self, placer: NodePlacer, job_ends: Sequence[JobEnd], now_s: float, max_steps: int) -> None:
        self.reservations: list[GangReservation] = []
        self.steps_used = 0
        self._placer = placer
        self._now_s = now_s
        self._max_steps = max_steps
        known = [each for each in job_ends if each.end_s is not None and math.isfinite(each.end_s)]
        known.sort(key=attrgetter("end_s", "job"))
        self._release_times = _release_times(known, now_s)
        self._freed = SlotBatch([each.held for each in known])

    def reserve(
        self, job: JobId, shape: TaskShape, tasks: int, within: Sequence[Bools] | None = None
    ) -> GangReservation | None:
        """Reserve the earliest slots for a gang; return None if no known end within the budget frees enough.

        ``within`` lists sets of nodes, one of which must hold the whole gang.
        """
        nodes = self._placer.nodes
        shapes = [
            each if mask is None else _restricted_to(each, mask, nodes)
            for each in self._placer.hardware.restricted_shapes(shape)
            for mask in ([None] if within is None else within)
        ]
        taken = [one for earlier in self.reservations for one in earlier.held]
        moment = self._first_release_time(taken, shapes, tasks)
        if moment is None:
            return None
        ground = self._capacity_after(taken, moment.end_count)
        fitting = next(each for each in shapes if ground.fit_count(each) >= tasks)
        held = ground.place_gang(fitting, tasks)
        if held is None:
            return None
        found = GangReservation(job, moment.at_s, tuple(held))
        self.reservations.append(found)
        return found

    def _first_release_time(
        self, taken: Sequence[HeldSlots], shapes: Sequence[TaskShape], tasks: int
    ) -> _ReleaseTime | None:
        """Return the first release time at which one of ``shapes`` fits; count the ends up to it as steps."""
        left = self._max_steps - self.steps_used
        ends_before = attrgetter("earlier_end_count")
        # a release time is within the budget if fewer ends than the remaining steps precede it
        moments = self._release_times[: bisect_left(self._release_times, left, lo=1, key=ends_before)]

        def fits(moment: _ReleaseTime) -> bool:
            ground = self._capacity_after(taken, moment.end_count)
            return any(ground.fit_count(each) >= tasks for each in shapes)

        first = 0 if fits(moments[0]) else bisect_left(moments, True, lo=1, key=fits)
        self.steps_used += moments[min(first, len(moments) - 1)].end_count
        return moments[first] if first < len(moments) else None

    def _capacity_after(self, taken: Sequence[HeldSlots], ends: int) -> NodePlacer:
        """Return the free slots after the first ``ends`` ends, less those in ``taken``."""
        ground = self._placer.copy()
        for one in taken:
            ground.adjust(one, -1)
        ground.release_batch(self._freed, ends)
        return ground

    def unreserved_nodes(self, ends_s: float | None, job: JobId | None = None) -> Bools:
        """Return the nodes where ``job``, which ends at ``ends_s``, delays no other reservation.

        A node with slots of a reservation that starts before is excluded entirely.
        """
        mask = np.ones(len(self._placer.nodes), dtype=bool)
        for each in self.reservations:
            if each.job != job and (ends_s is None or ends_s > each.start_s):
                mask[[one.node for one in each.held]] = False
        return mask

    def reserved_nodes(self, ends_s: float | None, job: JobId | None = None) -> tuple[NodeId, ...]:
        """Return the nodes that ``unreserved_nodes`` leaves out, sorted."""
        nodes = self._placer.nodes
        return tuple(sorted(nodes[i].id for i in np.flatnonzero(~self.unreserved_nodes(ends_s, job))))


def _release_times(endings: Sequence[JobEnd], now_s: float) -> list[_ReleaseTime]:
    """Return now and each later end; a job whose end has passed ends now."""
    found = [_ReleaseTime(now_s, 0, 0)]
    for ends, each in enumerate(endings, 1):
        at_s = max(now_s, each.end_s or 0.0)
        before = found[-1]
        if before.end_count and before.at_s == at_s:
            found[-1] = before._replace(end_count=ends)
        else:
            found.append(_ReleaseTime(at_s, ends, before.end_count))
    return found


def _restricted_to(shape: TaskShape, mask: Bools, nodes: Sequence[NodeRow]) -> TaskShape:
    others = {node.id for node, inside in zip(nodes, mask, strict=True) if not inside}
    return shape._replace(avoid_nodes=tuple(sorted({*shape.avoid_nodes, *others})))


def late_gangs(pool_state: PoolState, ready: Iterable[Sequence[Gang]], now_s: float) -> list[Gang]:
    """Return the gangs of ``ready``, given by class, that have waited long enough for a reservation."""
    return [
        gang
        for group in ready
        if len(group[0].tasks) > 1
        for gang in group
        if gang.homogeneous
        and now_s - gang.submitted_s >= pool_state.policy.backfill_reserve_after_s
        and len(gang.next_tasks) > 1
        and not any(task.state is GangTaskState.NOMINATED for task in gang.tasks)
    ]


class BackfillReservations:
    """The reservations of one pool for the first of its gangs that have waited too long."""

    def __init__(self, pool_state: PoolState, late: Iterable[Gang], now_s: float, max_steps: int) -> None:
        """Reserve for the first of the ``late`` gangs, given in fair order."""
        self.reservations: Sequence[GangReservation] = ()
        self.steps_used = 0
        self._now_s = now_s
        self._planner: ReservationPlanner | None = None
        self._closed_nodes: dict[tuple[float | None, JobId | None], tuple[NodeId, ...]] = {}
        for gang in late:
            tasks, near = gang.next_tasks, gang.root.topology_constraint
            shape, domains = tasks[0].shape, pool_state.domains
            if domains.max_tasks_together(near, pool_state.available, shape) >= len(tasks):
                continue  # it fits on free slots when its turn comes
            if pool_state.is_quota_blocked(gang, gang.next_demand, AssumeReleased.ALL):
                continue
            if self._planner is None:
                ends = _job_ends(pool_state, now_s)
                self._planner = ReservationPlanner(pool_state.available, ends, now_s, max_steps)
                self.reservations = self._planner.reservations
            self._planner.reserve(gang.job, shape, len(tasks), domains.required_domains(near))
            self.steps_used = self._planner.steps_used
            if len(self.reservations) == MAX_RESERVED_GANGS:
                break

    def for_job(self, job: JobId) -> GangReservation | None:
        return next((each for each in self.reservations if each.job == job), None)

    def first_blocking(self, gang: Gang) -> GangReservation | None:
        """Return the first reservation of another gang that starts before ``gang`` would end."""
        if not self.reservations:
            return None
        ends_s = self._expected_end_s(gang.pending_row)
        others = (each for each in self.reservations if each.job != gang.job)
        return next((each for each in others if ends_s is None or ends_s > each.start_s), None)

    def closed_nodes(self, job: PendingRow) -> tuple[NodeId, ...]:
        """Return the nodes where ``job``, started now, would delay the reservation of another one; sorted."""
        if self._planner is None:
            return ()
        ends_s = self._expected_end_s(job)
        key = (ends_s, job.job if self.for_job(job.job) else None)
        if key not in self._closed_nodes:
            self._closed_nodes[key] = self._planner.reserved_nodes(*key)
        return self._closed_nodes[key]

    def allowed_nodes(self, gang: Gang) -> Bools | None:
        """Return the nodes where ``gang`` delays no other reservation; None is all nodes."""
        if self._planner is None or self.first_blocking(gang) is None:
            return None
        return self._planner.unreserved_nodes(self._expected_end_s(gang.pending_row), gang.job)

    def _expected_end_s(self, job: PendingRow | None) -> float | None:
        """Return the expected end of ``job`` if it started now; None is unknown."""
        if job is None:
            return None
        lasts = [s for s in (job.predicted_duration_s, job.time_limit_s) if s is not None]
        return self._now_s + min(lasts) if lasts else None


def _job_ends(pool_state: PoolState, now_s: float) -> list[JobEnd]:
    ends = []
    for gang in pool_state.gangs.values():
        if (row := gang.running_row) is not None:
            end_s = expected_end_s(now_s, row.started_s, row.time_limit_s, row.predicted_end_s)
            held = [
                place for task in gang.tasks if task.state is GangTaskState.RUNNING for place in task.held
            ]
            ends.append(JobEnd(gang.job, end_s, held))
    return ends
