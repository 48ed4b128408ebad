"""Simulate the queue of a pool: when each job starts if all jobs run for the drawn durations.

Free GPUs go to the project with the smallest ratio of held (with its next job) to fair share, and within a
project by position. A job is skipped if it does not fit, may not start yet, or would exceed a quota; reserved
nodes close and open with time. A job that does not fit may reclaim GPUs (``simulated_reclaims.py``); its victims
continue later. Future submissions are not considered.

Results are cached until an event can change them: a start takes capacity, an end releases it.

``SimulationInput`` is shared by all runs: running jobs, job classes and free capacity.
"""

from __future__ import annotations

import heapq
import math
import operator
from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from scheduler.core.forecast.capacity_buckets import (
    BucketOccupancy,
    BucketRequest,
    BucketSlots,
    CapacityBuckets,
)
from scheduler.core.forecast.simulated_reclaims import EvictableJob, EvictableJobs, ReclaimRules, Requeue
from scheduler.core.model.snapshot import WHOLE_MILLI, ProjectId
from scheduler.core.shares.quota_ledger import AssumeReleased, JobOwner, PoolLedger

SIMULATION_RUNS = 8
MAX_STEPS = 2_000_000
"""Bound on ends and job classes examined per run; the start of a job after that is unknown."""
MAX_SEARCH_DELAY = 256
"""Events between two searches of a project for victims, when several found none."""


class RunningJob(NamedTuple):
    """A running job with its remaining seconds in each run; without ``requeue`` it cannot be evicted."""

    owner: JobOwner
    slots: Sequence[BucketSlots]
    remaining_s: Sequence[float]
    requeue: Requeue | None = None


class Closure(NamedTuple):
    """A period, in seconds from now, during which buckets of these types accept no job."""

    bucket_types: frozenset[int]
    after_s: float
    until_s: float


class JobClass(NamedTuple):
    """Pending jobs that differ only in duration and queue position (ascending; smaller goes first)."""

    owner: JobOwner
    requests: tuple[tuple[BucketRequest, int], ...]  # of the tasks, with the number of equal ones
    positions: Sequence[int]
    not_before_s: float = 0.0  # earliest start, in seconds from now
    closures: tuple[Closure, ...] = ()
    hardware: tuple[frozenset[int], ...] = ()  # sets of bucket types, one of which a gang uses; empty is any
    is_blocked: bool = (
        False  # the decision found no place for them, so none starts before something is released
    )


class SimulationInput:
    """``durations_s`` are the run times of pending jobs, by position and run.

    ``ledger`` contains what running jobs hold; None if no quota can block a job. Without ``reclaim_rules`` nothing
    is evicted. Job classes, fit classes and projects are numbered; a *fit class* is all job classes with equal
    requests and closures.
    """

    def __init__(
        self,
        buckets: CapacityBuckets,
        running: Sequence[RunningJob],
        job_classes: Sequence[JobClass],
        durations_s: Sequence[Sequence[float]],
        share_milli: Mapping[ProjectId, float],
        ledger: PoolLedger | None = None,
        runs: int = SIMULATION_RUNS,
        reclaim_rules: ReclaimRules | None = None,
    ) -> None:
        self.runs = runs
        self.reclaim_rules = reclaim_rules
        self.buckets = buckets
        self.running = running
        self.job_classes = job_classes
        self.durations_s = durations_s
        self.ledger = ledger
        self.evictable = [
            (number, job, job.requeue) for number, job in enumerate(running) if job.requeue is not None
        ]
        """The running jobs that may be evicted with their indexes, the latest last."""
        self.evictable.sort(key=lambda each: each[2].saved_s)
        self.bounded_by = [
            ledger.highest_bounded_project(job_class.owner.leaf_project, job_class.owner.preemptible)
            if ledger
            else None
            for job_class in job_classes
        ]
        """By job class: the highest project whose quota can block its jobs."""
        self.class_of = {
            position: number
            for number, job_class in enumerate(job_classes)
            for position in job_class.positions
        }
        self.infeasible = [self._is_infeasible(job_class) for job_class in job_classes]
        """By job class: no GPU matches, or a quota is too small even with nothing held."""
        owners = [*(job_class.owner for job_class in job_classes), *(job.owner for job in running)]
        projects = list(dict.fromkeys(owner.project for owner in owners))
        self.project_at = {project: number for number, project in enumerate(projects)}
        self.project_of = [self.project_at[job_class.owner.project] for job_class in job_classes]
        self.share_milli = np.array([max(1.0, share_milli.get(project, 0.0)) for project in projects])
        self.held_milli = np.zeros(len(projects))
        for job in running:
            self.held_milli[self.project_at[job.owner.project]] += job.owner.amounts.gpu_milli
        kinds: dict[object, list[int]] = {}
        for number, job_class in enumerate(job_classes):
            alike = (job_class.requests, job_class.closures, job_class.hardware)
            kinds.setdefault(alike, []).append(number)
        self.fit_classes = [job_classes[numbers[0]] for numbers in kinds.values()]
        """One job class of each fit class."""
        self.fit_class_of = [0] * len(job_classes)
        for kind, numbers in enumerate(kinds.values()):
            for number in numbers:
                self.fit_class_of[number] = kind
        self.milli_of = [job_class.owner.amounts.gpu_milli for job_class in self.fit_classes]
        """By fit class: the GPU milli of a job."""
        firsts = [
            job_class.requests[0] if job_class.requests else (BucketRequest(1, WHOLE_MILLI, ()), 0)
            for job_class in self.fit_classes
        ]
        self.sizes = list(dict.fromkeys(request.size for request, _ in firsts))
        place_of = {size: number for number, size in enumerate(self.sizes)}
        self.size_of = np.array([place_of[request.size] for request, _ in firsts])
        self.count_of = np.array([count for _, count in firsts])
        """By fit class: the index in ``sizes`` of its first task, and the number of such tasks."""
        self.arrivals: dict[float, list[int]] = {}
        """Job classes with a later earliest start, by seconds from now."""
        for number, job_class in enumerate(job_classes):
            if job_class.not_before_s > 0.0:
                self.arrivals.setdefault(job_class.not_before_s, []).append(number)
        self.openings: dict[float, list[int]] = {}
        """Fit classes for which closed buckets open, by seconds from now."""
        self.closings: list[tuple[float, int]] = []
        """Times after which buckets close, with the fit class, ascending."""
        for kind, job_class in enumerate(self.fit_classes):
            for each in job_class.closures:
                if each.until_s > 0.0:
                    self.openings.setdefault(each.until_s, []).append(kind)
                if each.after_s >= 0.0:
                    self.closings.append((each.after_s, kind))
        self.closings.sort()
        self.releases_s = {*self.openings, *self._reclaim_times_s()}
        """When reserved nodes open, and when running jobs may be reclaimed that may not be now."""
        self.event_times_s = sorted({*self.arrivals, *self.releases_s})

    def _reclaim_times_s(self) -> Iterator[float]:
        if self.reclaim_rules is not None:
            if 0.0 < self.reclaim_rules.from_s < math.inf:
                yield math.nextafter(self.reclaim_rules.from_s, math.inf)
            for _, _, requeue in self.evictable:
                if 0.0 < requeue.protected_until_s < math.inf:
                    yield requeue.protected_until_s

    def open_bucket_types(self, fit_class: int, now_s: float) -> list[list[int]]:
        """Return for each request of a fit class the bucket types that are open at ``now_s``."""
        job_class = self.fit_classes[fit_class]
        closed = [each.bucket_types for each in job_class.closures if each.after_s < now_s < each.until_s]
        return [
            [
                sort
                for sort in request.bucket_types
                if not any(sort in bucket_types for bucket_types in closed)
            ]
            for request, _ in job_class.requests
        ]

    def last_targets(self, targets: Iterable[int]) -> dict[int, int]:
        """Return the last target position of each project that has any."""
        last: dict[int, int] = {}
        for position in targets:
            project = self.project_of[self.class_of[position]]
            last[project] = max(position, last.get(project, position))
        return last

    def _is_infeasible(self, job_class: JobClass) -> bool:
        if not all(request.bucket_types for request, _ in job_class.requests):
            return True
        owner = job_class.owner
        return self.ledger is not None and self.ledger.is_blocked(
            owner.leaf_project, owner.user, owner.amounts, owner.preemptible, AssumeReleased.HELD
        )


def simulate_queue(
    simulation_input: SimulationInput,
    targets: Collection[int],
    max_steps: int = MAX_STEPS,
) -> dict[int, list[float | None]]:
    """Return the start of each target position in seconds from now, by run.

    It is infinite if the job does not start after all others have ended, and None if the run reached
    ``max_steps`` before. Jobs behind all targets of their project are not simulated.
    """
    feasible = {
        position
        for position in targets
        if not simulation_input.infeasible[simulation_input.class_of[position]]
    }
    found = [
        _Simulation(simulation_input, run, feasible).starts_s(max_steps) if feasible else {}
        for run in range(simulation_input.runs)
    ]
    return {position: [each.get(position, math.inf) for each in found] for position in targets}


class _Simulation:
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
            if math.isfinite(job.remaining_s[run])
        ]
        self._number = len(simulation_input.running) + len(simulation_input.event_times_s)
        calendar = enumerate(simulation_input.event_times_s, len(simulation_input.running))
        self._ends += [(at_s, number, None, ()) for number, at_s in calendar]
        heapq.heapify(self._ends)
        self._closings = 0  # number of closings that have passed
        self._bucket_types: list[list[list[int]]] = [[] for _ in simulation_input.fit_classes]
        """By fit class: the open bucket types of each of its requests."""
        self._open = np.zeros(
            (len(simulation_input.fit_classes), self._occupancy.fit_counts.shape[1]), dtype=np.int64
        )
        """The same for its first request, as 0 and 1."""
        self._unplaceable: set[int] = set()
        """Fit classes whose tasks do not fit together, until capacity is released or opened."""
        for kind in range(len(simulation_input.fit_classes)):
            self._update_open_types(kind)
        self._last_targets = simulation_input.last_targets(targets)
        self._remaining = _positions_to_simulate(simulation_input, self._last_targets)
        """By job class: the positions not started yet, in descending order."""
        self._queues: list[dict[int, list[tuple[int, int]]]] = [{} for _ in simulation_input.held_milli]
        """By project and fit class: first position and number of each job class that may start; ascending."""
        self._queue_lengths = np.zeros(
            (len(simulation_input.fit_classes), len(simulation_input.held_milli)), dtype=np.int64
        )
        self._ready = np.zeros(len(simulation_input.fit_classes), dtype=bool)
        """By fit class: whether any of its queues has jobs."""
        self._blocked: list[int] | None = []
        """Job classes that may start once something is released; None after the first release."""
        for number, job_class in enumerate(simulation_input.job_classes):
            if job_class.not_before_s <= 0.0:
                self._arrive(number)
        self._start_counts: Counter[ProjectId] = Counter()
        self._end_counts: Counter[ProjectId] = Counter()
        """Number of starts and ends in each project and its descendants."""
        self._within: dict[int, int] = {}
        """By job class within its quotas: the starts at its highest bounded project at that time."""
        self._blocked_by: dict[int, tuple[ProjectId, int]] = {}
        """By job class blocked by a quota: the project, and its ends at that time."""
        rules = simulation_input.reclaim_rules
        self._evictable = EvictableJobs(
            self._occupancy, simulation_input.share_milli, rules.priorities if rules else ()
        )
        self._next_search = np.zeros(len(simulation_input.held_milli), dtype=np.int64)
        """By project: the event from which it looks for victims. A search that finds none delays the next one."""
        self._search_delay = np.ones(len(simulation_input.held_milli), dtype=np.int64)
        self._events = 0
        self._evicted: set[int] = set()
        """Numbers of evicted jobs, whose ends no longer count."""
        self._remaining_s: dict[int, float] = {}
        """By position of an evicted job: its remaining time."""
        if simulation_input.reclaim_rules is not None:
            for number, job, requeue in simulation_input.evictable:
                self._add_evictable(number, job.owner, job.slots, job.remaining_s[run], requeue)

    def starts_s(self, max_steps: int) -> dict[int, float | None]:
        found: dict[int, float | None] = {}
        while self._steps < max_steps:
            while (job_class := self._next()) is not None or (job_class := self._reclaim()) is not None:
                position = self._start(job_class)
                if position in self._targets:
                    found.setdefault(position, self._now_s)
            if len(found) == len(self._targets):
                break
            if not self._ends:
                return {position: found.get(position, math.inf) for position in self._targets}
            self._advance()
        return {position: found.get(position) for position in self._targets}

    # -- time ----------------------------------------------------------------------------------------------

    def _advance(self) -> None:
        """Advance to the next end of a job, earliest start, or end of a reservation."""
        simulation_input = self._input
        self._now_s, number, owner, places = heapq.heappop(self._ends)
        passed = bisect_left(simulation_input.closings, (self._now_s, -1))
        for _, kind in simulation_input.closings[self._closings : passed]:
            self._update_open_types(kind)
        self._closings = passed
        if number in self._evicted:
            return
        self._events += 1
        if (owner is not None or self._now_s in simulation_input.releases_s) and self._blocked is not None:
            waiting, self._blocked = self._blocked, None
            for job_class in waiting:
                self._enqueue(job_class)
        if owner is None:
            for kind in simulation_input.openings.get(self._now_s, ()):
                self._update_open_types(kind)
            for job_class in simulation_input.arrivals.get(self._now_s, ()):
                self._arrive(job_class)
        else:
            self._evictable.discard(number)
            self._release(owner, places)

    def _release(self, owner: JobOwner, places: Sequence[BucketSlots]) -> None:
        self._count(owner, -1)
        for place in places:
            self._occupancy.release(place)
        self._unplaceable.clear()
        self._steps += 1

    def _update_open_types(self, fit_class: int) -> None:
        self._bucket_types[fit_class] = self._input.open_bucket_types(fit_class, self._now_s)
        self._open[fit_class] = 0
        if self._bucket_types[fit_class]:
            self._open[fit_class, self._bucket_types[fit_class][0]] = 1
        self._unplaceable.discard(fit_class)

    def _arrive(self, number: int) -> None:
        """Put a job class into its queue, after the first release if it is blocked."""
        if self._input.job_classes[number].is_blocked and self._blocked is not None:
            self._blocked.append(number)
        else:
            self._enqueue(number)

    def _enqueue(self, number: int) -> None:
        """Put the first remaining job of a job class into its queue."""
        if self._remaining[number]:
            project, kind = self._input.project_of[number], self._input.fit_class_of[number]
            insort(self._queues[project].setdefault(kind, []), (self._remaining[number][-1], number))
            self._queue_lengths[kind, project] += 1
            self._ready[kind] = True

    def _dequeue(self, number: int) -> None:
        """Take the first remaining job of a job class out of its queue."""
        if self._remaining[number]:
            project, kind = self._input.project_of[number], self._input.fit_class_of[number]
            queue = self._queues[project][kind]
            del queue[bisect_left(queue, (self._remaining[number][-1], number))]
            self._queue_lengths[kind, project] -= 1
            self._ready[kind] = self._queue_lengths[kind].any()

    # -- next job ------------------------------------------------------------------------------------------

    def _next(self) -> int | None:
        """Return the next job class to start, of those that can."""
        simulation_input = self._input
        kinds = self._placeable_fit_classes()
        if not kinds:
            return None
        # lower bound of each project's ratio; exact values are computed only for candidates
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
        """Return the sort key for equal ratios; targets go last, so that forecasts are not optimistic."""
        position = self._remaining[job_class][-1]
        return position in self._targets, position

    def _head(self, project: int, kinds: Sequence[int]) -> int | None:
        """Return the first job class of a project among these fit classes that is within its quotas."""
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
        """Return the fit classes with queued jobs that fit."""
        simulation_input = self._input
        space = np.add.reduce(self._open * self._occupancy.fit_counts[simulation_input.size_of], axis=1)
        kinds: list[int] = ((space >= simulation_input.count_of) & self._ready).nonzero()[0].tolist()
        classes = simulation_input.fit_classes
        return [
            kind
            for kind in kinds
            if (len(classes[kind].requests) < 2 and not classes[kind].hardware) or self._fits(kind)
        ]

    def _fits(self, kind: int) -> bool:
        """Return True if the tasks of the class fit together."""
        if kind not in self._unplaceable:
            places = self._allocate_gang(kind)
            if places is not None:
                for place in places:
                    self._occupancy.release(place)
                return True
            self._unplaceable.add(kind)
        return False

    def _is_within_quota(self, number: int) -> bool:
        """Return True if no limit, and no guarantee of non-preemptible work, would be exceeded."""
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

    # -- slots -----------------------------------------------------------------------------------------------

    def _allocate_gang(self, kind: int) -> list[BucketSlots] | None:
        """Allocate slots for the whole gang; return None and take nothing if they do not fit."""
        for bucket_types in self._input.fit_classes[kind].hardware or (None,):
            if (places := self._allocate_within(kind, bucket_types)) is not None:
                return places
        return None

    def _allocate_within(self, kind: int, within: frozenset[int] | None) -> list[BucketSlots] | None:
        places: list[BucketSlots] = []
        for (request, count), bucket_types in zip(
            self._input.fit_classes[kind].requests, self._bucket_types[kind], strict=True
        ):
            if within is not None:
                bucket_types = [each for each in bucket_types if each in within]
            for _ in range(count):
                place = self._occupancy.allocate(request, bucket_types)
                if place is None:
                    for taken in places:
                        self._occupancy.release(taken)
                    return None
                places.append(place)
        return places

    def _start(self, number: int) -> int:
        """Start the first job of a job class and return its position."""
        simulation_input = self._input
        self._dequeue(number)
        position = self._remaining[number].pop()
        self._enqueue(number)
        owner = simulation_input.job_classes[number].owner
        places = self._allocate_gang(simulation_input.fit_class_of[number]) or ()
        self._count(owner, +1)
        self._number += 1
        remaining_s = self._remaining_s.pop(position, None)
        if remaining_s is None:
            remaining_s = simulation_input.durations_s[position][self._run]
        ends_s = self._now_s + remaining_s
        if math.isfinite(ends_s):
            heapq.heappush(self._ends, (ends_s, self._number, owner, places))
        if owner.preemptible and (rules := simulation_input.reclaim_rules) is not None:
            protected_until_s = self._now_s + rules.min_runtime_s.get(owner.leaf_project, 0.0)
            requeue = Requeue(number, position, self._now_s, protected_until_s)
            self._add_evictable(self._number, owner, places, ends_s, requeue)
        return position

    # -- reclaims ------------------------------------------------------------------------------------------

    def _reclaim(self) -> int | None:
        """Evict jobs so that a job of a project within its fair share fits; return its class, or None."""
        simulation_input, rules = self._input, self._input.reclaim_rules
        if rules is None or not self._ready.any() or self._now_s <= rules.from_s:
            return None
        shares_milli = simulation_input.share_milli
        least_milli = min(simulation_input.milli_of[kind] for kind in self._ready.nonzero()[0].tolist())
        within = self._queue_lengths.any(axis=0) & (self._held_milli + least_milli <= shares_milli)
        within &= self._next_search <= self._events
        if not within.any() or not (self._held_milli > shares_milli).any():
            return None
        parts = self._held_milli / shares_milli
        for project in sorted(within.nonzero()[0].tolist(), key=parts.__getitem__):
            heads = sorted((*queue[0], kind) for kind, queue in self._queues[project].items() if queue)
            for _, job_class, kind in heads:
                if (
                    self._held_milli[project] + simulation_input.milli_of[kind] <= shares_milli[project]
                    and self._is_within_quota(job_class)
                    and self._evict_for(project, kind)
                ):
                    self._search_delay[project] = 1
                    return job_class
            self._next_search[project] = self._events + self._search_delay[project]
            self._search_delay[project] = min(2 * self._search_delay[project], MAX_SEARCH_DELAY)
        return None

    def _evict_for(self, project: int, kind: int) -> bool:
        """Evict jobs so that one of the fit class fits; return whether it does."""
        self._steps += 1
        requests = self._input.fit_classes[kind].requests
        for hardware in self._input.fit_classes[kind].hardware or (None,):
            tasks = [
                (request, count, [each for each in open_types if hardware is None or each in hardware])
                for (request, count), open_types in zip(requests, self._bucket_types[kind], strict=True)
            ]
            victims = self._evictable.find_victims(tasks, project, self._held_milli, self._now_s)
            if victims is not None:
                for number in victims:
                    self._evict(number)
                self._unplaceable.discard(kind)
                return self._fits(kind)
        return False

    def _evict(self, number: int) -> None:
        """Stop a running job; it continues when it is placed again."""
        job = self._evictable.jobs[number]
        self._evictable.discard(number)
        self._evicted.add(number)
        self._release(job.owner, job.slots)
        job_class, position = job.requeue.job_class, job.requeue.position
        if self._input.infeasible[job_class] or position > self._last_targets.get(job.project, position):
            return
        self._remaining_s[position] = job.ends_s - self._now_s
        self._dequeue(job_class)
        insort(self._remaining[job_class], position, key=operator.neg)
        self._enqueue(job_class)

    def _add_evictable(
        self, number: int, owner: JobOwner, slots: Sequence[BucketSlots], ends_s: float, requeue: Requeue
    ) -> None:
        project = self._input.project_at[owner.project]
        milli = owner.amounts.gpu_milli
        self._evictable.add(number, EvictableJob(project, owner, milli, slots, ends_s, requeue))

    def _count(self, owner: JobOwner, sign: int) -> None:
        self._held_milli[self._input.project_at[owner.project]] += sign * owner.amounts.gpu_milli
        if self._ledger is not None:
            self._ledger.add(owner.leaf_project, owner.user, owner.amounts, owner.preemptible, sign)
            changes = self._start_counts if sign > 0 else self._end_counts
            for project in self._ledger.paths[owner.leaf_project]:
                changes[project] += 1


def _positions_to_simulate(simulation_input: SimulationInput, last: Mapping[int, int]) -> list[list[int]]:
    """Return the startable positions of each job class, descending, up to the ``last`` target of the project."""
    found = []
    for job_class, project, infeasible in zip(
        simulation_input.job_classes, simulation_input.project_of, simulation_input.infeasible, strict=True
    ):
        until = (
            bisect_right(job_class.positions, last[project]) if project in last else len(job_class.positions)
        )
        found.append([] if infeasible else list(job_class.positions[:until])[::-1])
    return found
