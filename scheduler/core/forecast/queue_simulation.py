"""A play of the queue: who starts when, if everybody runs as long as was drawn.

Running jobs end after drawn times; whoever ends gives its GPUs back, and free GPUs go to the project that holds
least of its share with its next job counted, in each project by position. Who does not fit, is not to start yet or
would pass a number of a quota is passed over; reserved nodes close and open as the clock goes. Jobs still to come
are not known and not drawn.

What is found out is kept until something happens that can change it: a start takes away, an end gives.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Collection, Sequence

import numpy as np

from scheduler.core.forecast.capacity_buckets import BucketOccupancy, BucketSlots
from scheduler.core.forecast.stage import JobOwner, SimulationInput
from scheduler.core.model.snapshot import ProjectId

SIMULATION_RUNS = 8
MAX_STEPS = 2_000_000
"""Ends and job_classes looked at in one play; of a job that has not started by then nothing is known."""


def simulate_queue(
    simulation_input: SimulationInput,
    targets: Collection[int],
    runs: int = SIMULATION_RUNS,
    max_steps: int = MAX_STEPS,
) -> dict[int, list[float | None]]:
    """In how many seconds each of these positions starts, by play.

    Infinite where it does not even when all others have ended; None where the play came to its bound before. Who has
    a later position than all of them in its project is left out.
    """
    feasible = {
        position
        for position in targets
        if not simulation_input.infeasible[simulation_input.class_of[position]]
    }
    found = [
        _Simulation(simulation_input, play, feasible).starts_s(max_steps) if feasible else {}
        for play in range(runs)
    ]
    return {position: [each.get(position, math.inf) for each in found] for position in targets}


class _Simulation:
    """One play."""

    def __init__(self, simulation_input: SimulationInput, run: int, targets: Collection[int]) -> None:
        self._input = simulation_input
        self._run = run
        self._targets = targets
        self._now_s = 0.0
        self._steps = 0
        self._occupancy = BucketOccupancy(simulation_input.buckets, simulation_input.sizes)
        self._ledger = simulation_input.ledger.copy() if simulation_input.ledger else None
        self._held_milli = simulation_input.held_milli.copy()
        self._ends: list[tuple[float, int, JobOwner | None, Sequence[BucketSlots]]] = [
            (job.remaining_s[run], number, job.owner, job.slots)
            for number, job in enumerate(simulation_input.running)
        ]
        self._number = len(simulation_input.running) + len(simulation_input.event_times_s)
        calendar = enumerate(simulation_input.event_times_s, len(simulation_input.running))
        self._ends += [(at_s, number, None, ()) for number, at_s in calendar]
        heapq.heapify(self._ends)
        self._closings = 0  # so many have passed
        self._bucket_types: list[list[list[int]]] = [[] for _ in simulation_input.fit_classes]
        """By kind: where each of its tasks can stand that is open now."""
        self._open = np.zeros(
            (len(simulation_input.fit_classes), self._occupancy.fit_counts.shape[1]), dtype=np.int64
        )
        """The same of its first task, as 0 and 1."""
        self._unplaceable: set[int] = set()
        """Kinds whose unequal tasks find places, but not beside each other; until something comes free or opens."""
        for kind in range(len(simulation_input.fit_classes)):
            self._update_open_types(kind)
        self._remaining = _positions_to_simulate(simulation_input, targets)
        """By job_class: the positions that have not started, the last one first."""
        self._queues: list[dict[int, list[tuple[int, int]]]] = [{} for _ in simulation_input.held_milli]
        """By project and kind: the first position of each job_class that may start, with the job_class; ascending."""
        self._queue_lengths = np.zeros(
            (len(simulation_input.fit_classes), len(simulation_input.held_milli)), dtype=np.int64
        )
        """The length of each queue."""
        self._ready = np.zeros(len(simulation_input.fit_classes), dtype=bool)
        """By kind: somebody waits in one of its queues."""
        for number, job_class in enumerate(simulation_input.job_classes):
            if job_class.not_before_s <= 0.0:
                self._enqueue(number)
        self._start_counts: Counter[ProjectId] = Counter()
        self._end_counts: Counter[ProjectId] = Counter()
        """How many have started and ended in each project and below it."""
        self._within: dict[int, int] = {}
        """By job_class that a quota left room for: how many had started then where quotas bound it."""
        self._blocked_by: dict[int, tuple[ProjectId, int]] = {}
        """By job_class that a quota was in the way of: whose, and how many had ended there then."""

    def starts_s(self, max_steps: int) -> dict[int, float | None]:
        """When each target starts."""
        found: dict[int, float | None] = {}
        while self._steps < max_steps:
            while (job_class := self._next()) is not None:
                position = self._start(job_class)
                if position in self._targets:
                    found[position] = self._now_s
            if len(found) == len(self._targets):
                break
            if not self._ends:
                return {position: found.get(position, math.inf) for position in self._targets}
            self._advance()
        return {position: found.get(position) for position in self._targets}

    # -- the clock -----------------------------------------------------------------------------------------

    def _advance(self) -> None:
        """Lets time pass until somebody ends, or may start, or a reservation does."""
        simulation_input = self._input
        self._now_s, _, owner, places = heapq.heappop(self._ends)
        passed = bisect_left(simulation_input.closings, (self._now_s, -1))
        for _, kind in simulation_input.closings[self._closings : passed]:
            self._update_open_types(kind)
        self._closings = passed
        if owner is None:
            for kind in simulation_input.openings.get(self._now_s, ()):
                self._update_open_types(kind)
            for job_class in simulation_input.arrivals.get(self._now_s, ()):
                self._enqueue(job_class)
        else:
            self._count(owner, -1)
            for place in places:
                self._occupancy.release(place)
            self._unplaceable.clear()
            self._steps += 1

    def _update_open_types(self, fit_class: int) -> None:
        """Finds out where a kind can stand from now on."""
        self._bucket_types[fit_class] = self._input.open_bucket_types(fit_class, self._now_s)
        self._open[fit_class] = 0
        if self._bucket_types[fit_class]:
            self._open[fit_class, self._bucket_types[fit_class][0]] = 1
        self._unplaceable.discard(fit_class)

    def _enqueue(self, number: int) -> None:
        """The first that is left of a job_class waits for its position."""
        if self._remaining[number]:
            project, kind = self._input.project_of[number], self._input.fit_class_of[number]
            insort(self._queues[project].setdefault(kind, []), (self._remaining[number][-1], number))
            self._queue_lengths[kind, project] += 1
            self._ready[kind] = True

    # -- whose position it is ----------------------------------------------------------------------------------

    def _next(self) -> int | None:
        """The job_class whose position it is, of those that may start."""
        simulation_input = self._input
        kinds = self._placeable_fit_classes()
        if not kinds:
            return None
        # at least so much of its share would each project hold; looked at closely is only who may be the one
        least_milli = min(simulation_input.milli_of[kind] for kind in kinds)
        waits = self._queue_lengths[kinds] > 0
        parts = np.where(
            np.logical_or.reduce(waits),
            (self._held_milli + least_milli) / simulation_input.share_milli,
            math.inf,
        )
        heads: dict[int, int | None] = {}
        while True:
            project = int(parts.argmin())
            if parts[project] == math.inf:
                return None
            if project in heads:
                ahead = (parts == parts[project]).nonzero()[0].tolist()
                project = next((each for each in ahead if each not in heads), -1)
                if project < 0:
                    return min(
                        (job_class for each in ahead if (job_class := heads[each]) is not None),
                        key=self._tie_key,
                    )
            mine = [kinds[n] for n in waits[:, project].nonzero()[0].tolist()]
            job_class = heads[project] = self._head(project, mine)
            milli = (
                math.inf
                if job_class is None
                else simulation_input.milli_of[simulation_input.fit_class_of[job_class]]
            )
            parts[project] = (self._held_milli[project] + milli) / simulation_input.share_milli[project]

    def _tie_key(self, job_class: int) -> tuple[bool, int]:
        """Orders job_classes of projects that are alike; nothing is promised by a tie."""
        position = self._remaining[job_class][-1]
        return position in self._targets, position

    def _head(self, project: int, kinds: Sequence[int]) -> int | None:
        """The job_class of a project whose position it is, of those of some kinds of which somebody waits."""
        queues, head, first = self._queues[project], None, math.inf
        for kind in kinds:
            for position, job_class in queues[kind]:
                self._steps += 1
                if position > first:
                    break
                if self._is_within_quota(job_class):
                    head, first = job_class, position
                    break
        return head

    def _placeable_fit_classes(self) -> list[int]:
        """Kinds of which somebody waits and finds places."""
        simulation_input = self._input
        room = np.add.reduce(self._open * self._occupancy.fit_counts[simulation_input.size_of], axis=1)
        kinds: list[int] = ((room >= simulation_input.count_of) & self._ready).nonzero()[0].tolist()
        return [
            kind for kind in kinds if len(simulation_input.fit_classes[kind].requests) < 2 or self._fits(kind)
        ]

    def _fits(self, kind: int) -> bool:
        """True when unequal tasks find places beside each other."""
        if kind not in self._unplaceable:
            places = self._allocate_gang(kind)
            if places is not None:
                for place in places:
                    self._occupancy.release(place)
                return True
            self._unplaceable.add(kind)
        return False

    def _is_within_quota(self, number: int) -> bool:
        """True when no limit, and no guarantee of firm work, would be passed."""
        top = self._input.bounded_by[number]
        if self._ledger is None or top is None or self._within.get(number) == self._start_counts[top]:
            return True
        if (beyond := self._blocked_by.get(number)) is not None and beyond[1] == self._end_counts[beyond[0]]:
            return False
        owner = self._input.job_classes[number].owner
        bound = self._ledger.exceeded_quota(owner.leaf_project, owner.user, owner.amounts, owner.preemptible)
        if bound is None:
            self._within[number] = self._start_counts[top]
            return True
        self._blocked_by[number] = bound.project, self._end_counts[bound.project]
        return False

    # -- places ----------------------------------------------------------------------------------------------

    def _allocate_gang(self, kind: int) -> list[BucketSlots] | None:
        """Places for the whole gang, taken; None and nothing taken when there are too few."""
        places: list[BucketSlots] = []
        for (request, count), bucket_types in zip(
            self._input.fit_classes[kind].requests, self._bucket_types[kind], strict=True
        ):
            for _ in range(count):
                place = self._occupancy.allocate(request, bucket_types)
                if place is None:
                    for taken in places:
                        self._occupancy.release(taken)
                    return None
                places.append(place)
        return places

    def _start(self, number: int) -> int:
        """Lets the first of a job_class start; gives its position."""
        simulation_input = self._input
        project, kind = simulation_input.project_of[number], simulation_input.fit_class_of[number]
        position = self._remaining[number].pop()
        queue = self._queues[project][kind]
        del queue[bisect_left(queue, (position, number))]
        self._queue_lengths[kind, project] -= 1
        self._ready[kind] = self._queue_lengths[kind].any()
        self._enqueue(number)
        owner, places = simulation_input.job_classes[number].owner, self._allocate_gang(kind) or ()
        self._count(owner, +1)
        self._number += 1
        ends_s = self._now_s + simulation_input.durations_s[position][self._run]
        heapq.heappush(self._ends, (ends_s, self._number, owner, places))
        return position

    def _count(self, owner: JobOwner, sign: int) -> None:
        number = self._input.project_at.get(owner.project)
        if number is not None:
            self._held_milli[number] += sign * owner.amounts.gpu_milli
        if self._ledger is not None:
            self._ledger.add(owner.leaf_project, owner.user, owner.amounts, owner.preemptible, sign)
            changes = self._start_counts if sign > 0 else self._end_counts
            for project in self._ledger.paths[owner.leaf_project]:
                changes[project] += 1


def _positions_to_simulate(simulation_input: SimulationInput, targets: Collection[int]) -> list[list[int]]:
    """The positions of each job_class that can start, the last one first, without those after all targets of their project."""
    last: dict[int, int] = {}
    for position in targets:
        project = simulation_input.project_of[simulation_input.class_of[position]]
        last[project] = max(position, last.get(project, position))
    found = []
    for job_class, project, infeasible in zip(
        simulation_input.job_classes, simulation_input.project_of, simulation_input.infeasible, strict=True
    ):
        until = (
            bisect_right(job_class.positions, last[project]) if project in last else len(job_class.positions)
        )
        found.append([] if infeasible else list(job_class.positions[:until])[::-1])
    return found
