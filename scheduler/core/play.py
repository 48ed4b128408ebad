"""A play of the queue: who starts when, if everybody runs as long as was drawn.

Running jobs end after drawn times; whoever ends gives its GPUs back, and free GPUs go to the project that holds
least of its share with its next job counted, in each project by turn. Who does not fit, is not to start yet or
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

from scheduler.core.cluster import ProjectId
from scheduler.core.ground import BucketOccupancy, BucketSlots
from scheduler.core.stage import SimulationInput, JobOwner

SIMULATION_RUNS = 8
MAX_STEPS = 2_000_000
"""Ends and lines looked at in one play; of a job that has not started by then nothing is known."""


def simulate_queue(
    simulation_input: SimulationInput, targets: Collection[int], runs: int = SIMULATION_RUNS, max_steps: int = MAX_STEPS
) -> dict[int, list[float | None]]:
    """In how many seconds each of these turns starts, by play.

    Infinite where it does not even when all others have ended; None where the play came to its bound before. Who has
    a later turn than all of them in its project is left out.
    """
    hopeful = {turn for turn in targets if not simulation_input.infeasible[simulation_input.class_of[turn]]}
    found = [_Simulation(simulation_input, play, hopeful).starts_s(max_steps) if hopeful else {} for play in range(runs)]
    return {turn: [each.get(turn, math.inf) for each in found] for turn in targets}


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
            (job.remaining_s[run], number, job.owner, job.slots) for number, job in enumerate(simulation_input.running)
        ]
        self._number = len(simulation_input.running) + len(simulation_input.event_times_s)
        calendar = enumerate(simulation_input.event_times_s, len(simulation_input.running))
        self._ends += [(at_s, number, None, ()) for number, at_s in calendar]
        heapq.heapify(self._ends)
        self._closings = 0  # so many have passed
        self._bucket_types: list[list[list[int]]] = [[] for _ in simulation_input.fit_classes]
        """By kind: where each of its tasks can stand that is open now."""
        self._open = np.zeros((len(simulation_input.fit_classes), self._occupancy.fit_counts.shape[1]), dtype=np.int64)
        """The same of its first task, as 0 and 1."""
        self._unplaceable: set[int] = set()
        """Kinds whose unequal tasks find places, but not beside each other; until something comes free or opens."""
        for kind in range(len(simulation_input.fit_classes)):
            self._update_open_types(kind)
        self._remaining = _positions_to_simulate(simulation_input, targets)
        """By line: the turns that have not started, the last one first."""
        self._queues: list[dict[int, list[tuple[int, int]]]] = [{} for _ in simulation_input.held_milli]
        """By project and kind: the first turn of each line that may start, with the line; ascending."""
        self._queue_lengths = np.zeros((len(simulation_input.fit_classes), len(simulation_input.held_milli)), dtype=np.int64)
        """The length of each queue."""
        self._ready = np.zeros(len(simulation_input.fit_classes), dtype=bool)
        """By kind: somebody waits in one of its queues."""
        for number, line in enumerate(simulation_input.job_classes):
            if line.not_before_s <= 0.0:
                self._enqueue(number)
        self._start_counts: Counter[ProjectId] = Counter()
        self._end_counts: Counter[ProjectId] = Counter()
        """How many have started and ended in each project and below it."""
        self._within: dict[int, int] = {}
        """By line that a quota left room for: how many had started then where quotas bound it."""
        self._blocked_by: dict[int, tuple[ProjectId, int]] = {}
        """By line that a quota was in the way of: whose, and how many had ended there then."""

    def starts_s(self, max_steps: int) -> dict[int, float | None]:
        """When each target starts."""
        found: dict[int, float | None] = {}
        while self._steps < max_steps:
            while (line := self._next()) is not None:
                turn = self._start(line)
                if turn in self._targets:
                    found[turn] = self._now_s
            if len(found) == len(self._targets):
                break
            if not self._ends:
                return {turn: found.get(turn, math.inf) for turn in self._targets}
            self._advance()
        return {turn: found.get(turn) for turn in self._targets}

    # -- the clock -----------------------------------------------------------------------------------------

    def _advance(self) -> None:
        """Lets time pass until somebody ends, or may start, or a reservation does."""
        stage = self._input
        self._now_s, _, stake, places = heapq.heappop(self._ends)
        passed = bisect_left(stage.closings, (self._now_s, -1))
        for _, kind in stage.closings[self._closings : passed]:
            self._update_open_types(kind)
        self._closings = passed
        if stake is None:
            for kind in stage.openings.get(self._now_s, ()):
                self._update_open_types(kind)
            for line in stage.arrivals.get(self._now_s, ()):
                self._enqueue(line)
        else:
            self._count(stake, -1)
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
        """The first that is left of a line waits for its turn."""
        if self._remaining[number]:
            project, kind = self._input.project_of[number], self._input.fit_class_of[number]
            insort(self._queues[project].setdefault(kind, []), (self._remaining[number][-1], number))
            self._queue_lengths[kind, project] += 1
            self._ready[kind] = True

    # -- whose turn it is ----------------------------------------------------------------------------------

    def _next(self) -> int | None:
        """The line whose turn it is, of those that may start."""
        stage = self._input
        kinds = self._placeable_fit_classes()
        if not kinds:
            return None
        # at least so much of its share would each project hold; looked at closely is only who may be the one
        least_milli = min(stage.milli_of[kind] for kind in kinds)
        waits = self._queue_lengths[kinds] > 0
        parts = np.where(
            np.logical_or.reduce(waits), (self._held_milli + least_milli) / stage.share_milli, math.inf
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
                    return min((line for each in ahead if (line := heads[each]) is not None), key=self._tie_key)
            mine = [kinds[n] for n in waits[:, project].nonzero()[0].tolist()]
            line = heads[project] = self._head(project, mine)
            milli = math.inf if line is None else stage.milli_of[stage.fit_class_of[line]]
            parts[project] = (self._held_milli[project] + milli) / stage.share_milli[project]

    def _tie_key(self, line: int) -> tuple[bool, int]:
        """Orders lines of projects that are alike; nothing is promised by a tie."""
        turn = self._remaining[line][-1]
        return turn in self._targets, turn

    def _head(self, project: int, kinds: Sequence[int]) -> int | None:
        """The line of a project whose turn it is, of those of some kinds of which somebody waits."""
        queues, head, first = self._queues[project], None, math.inf
        for kind in kinds:
            for turn, line in queues[kind]:
                self._steps += 1
                if turn > first:
                    break
                if self._is_within_quota(line):
                    head, first = line, turn
                    break
        return head

    def _placeable_fit_classes(self) -> list[int]:
        """Kinds of which somebody waits and finds places."""
        stage = self._input
        room = np.add.reduce(self._open * self._occupancy.fit_counts[stage.size_of], axis=1)
        kinds: list[int] = ((room >= stage.count_of) & self._ready).nonzero()[0].tolist()
        return [kind for kind in kinds if len(stage.fit_classes[kind].requests) < 2 or self._fits(kind)]

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
        stake = self._input.job_classes[number].owner
        bound = self._ledger.exceeded_quota(stake.leaf_project, stake.user, stake.amounts, stake.preemptible)
        if bound is None:
            self._within[number] = self._start_counts[top]
            return True
        self._blocked_by[number] = bound.project, self._end_counts[bound.project]
        return False

    # -- places ----------------------------------------------------------------------------------------------

    def _allocate_gang(self, kind: int) -> list[BucketSlots] | None:
        """Places for the whole gang, taken; None and nothing taken when there are too few."""
        places: list[BucketSlots] = []
        for (need, count), sorts in zip(self._input.fit_classes[kind].requests, self._bucket_types[kind], strict=True):
            for _ in range(count):
                place = self._occupancy.allocate(need, sorts)
                if place is None:
                    for taken in places:
                        self._occupancy.release(taken)
                    return None
                places.append(place)
        return places

    def _start(self, number: int) -> int:
        """Lets the first of a line start; gives its turn."""
        stage = self._input
        project, kind = stage.project_of[number], stage.fit_class_of[number]
        turn = self._remaining[number].pop()
        queue = self._queues[project][kind]
        del queue[bisect_left(queue, (turn, number))]
        self._queue_lengths[kind, project] -= 1
        self._ready[kind] = self._queue_lengths[kind].any()
        self._enqueue(number)
        stake, places = stage.job_classes[number].owner, self._allocate_gang(kind) or ()
        self._count(stake, +1)
        self._number += 1
        ends_s = self._now_s + stage.durations_s[turn][self._run]
        heapq.heappush(self._ends, (ends_s, self._number, stake, places))
        return turn

    def _count(self, stake: JobOwner, sign: int) -> None:
        number = self._input.project_at.get(stake.project)
        if number is not None:
            self._held_milli[number] += sign * stake.amounts.gpu_milli
        if self._ledger is not None:
            self._ledger.add(stake.leaf_project, stake.user, stake.amounts, stake.preemptible, sign)
            changes = self._start_counts if sign > 0 else self._end_counts
            for project in self._ledger.paths[stake.leaf_project]:
                changes[project] += 1


def _positions_to_simulate(simulation_input: SimulationInput, targets: Collection[int]) -> list[list[int]]:
    """The turns of each line that can start, the last one first, without those after all targets of their project."""
    last: dict[int, int] = {}
    for turn in targets:
        project = simulation_input.project_of[simulation_input.class_of[turn]]
        last[project] = max(turn, last.get(project, turn))
    found = []
    for line, project, hopeless in zip(simulation_input.job_classes, simulation_input.project_of, simulation_input.infeasible, strict=True):
        until = bisect_right(line.positions, last[project]) if project in last else len(line.positions)
        found.append([] if hopeless else list(line.positions[:until])[::-1])
    return found
