"""Reference policies with a simulator of their own: FIFO, SJF, SRTF and Tiresias.

Jobs that fit on one node use best fit, larger ones whole nodes. The scheduler runs when jobs arrive or end.
*Skipping* variants pass over a job that does not fit; blocking ones stop at it. SRTF and Tiresias (Gu et al.,
NSDI '19: two queues by attained GPU time, FIFO within each) preempt, at ``restart_cost_s``.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

import numpy as np

from scheduler.replay.metrics import ReplayResult
from scheduler.replay.trace import ClusterSize, TraceJob

NON_PREEMPTIVE_POLICIES = ("fifo", "fifo-skip", "sjf", "sjf-skip")
PREEMPTIVE_POLICIES = ("srtf", "tiresias")
FIRST_QUEUE_GPU_S = 3_600.0 * 8
"""Tiresias: jobs with more attained GPU time are in the second queue."""


def simulate_reference_policy(jobs: Sequence[TraceJob], size: ClusterSize, policy: str) -> ReplayResult:
    if policy in NON_PREEMPTIVE_POLICIES:
        return _NonPreemptive(jobs, size, policy).run()
    return _Preemptive(jobs, size, policy).run()


class _NonPreemptive:
    """Policies without preemption."""

    def __init__(self, jobs: Sequence[TraceJob], size: ClusterSize, policy: str) -> None:
        self.jobs = jobs
        self.size = size
        self.blocking = policy in ("fifo", "sjf")
        self.shortest_first = policy.startswith("sjf")
        self.free = [size.gpus_per_node] * size.nodes
        self.queues: dict[int, list[tuple[float, int]]] = {
            gpus: [] for gpus in sorted({j.gpus for j in jobs})
        }
        self.result = ReplayResult(jobs, size)

    def run(self) -> ReplayResult:
        ends: list[tuple[int, int, list[tuple[int, int]]]] = []
        arrived = 0
        while arrived < len(self.jobs) or ends:
            arrives_s = self.jobs[arrived].submitted_s if arrived < len(self.jobs) else math.inf
            now_s = int(min(arrives_s, ends[0][0] if ends else math.inf))
            while ends and ends[0][0] <= now_s:
                _, number, places = heapq.heappop(ends)
                job = self.jobs[number]
                self.result.ended_s[number] = now_s
                self.result.add_run(job, now_s - job.duration_s, now_s)
                for node, gpus in places:
                    self.free[node] += gpus
            while arrived < len(self.jobs) and self.jobs[arrived].submitted_s <= now_s:
                job = self.jobs[arrived]
                if job.gpus <= self.size.gpus:
                    key = job.duration_s if self.shortest_first else job.submitted_s
                    heapq.heappush(self.queues[job.gpus], (key, job.number))
                arrived += 1
            for job, places in self._start():
                self.result.started_s[job.number] = now_s
                heapq.heappush(ends, (now_s + job.duration_s, job.number, places))
        return self.result

    def _start(self) -> list[tuple[TraceJob, list[tuple[int, int]]]]:
        """Start the jobs that fit, in the policy's order."""
        started = []
        open_sizes = [gpus for gpus, queue in self.queues.items() if queue]
        while open_sizes:
            gpus = min(open_sizes, key=lambda each: self.queues[each][0])
            places = self._allocate(gpus)
            if places is None:
                if self.blocking:
                    break
                open_sizes = [each for each in open_sizes if each < gpus]
                continue
            _, number = heapq.heappop(self.queues[gpus])
            started.append((self.jobs[number], places))
            if not self.queues[gpus]:
                open_sizes.remove(gpus)
        return started

    def _allocate(self, gpus: int) -> list[tuple[int, int]] | None:
        """Allocate best fit; return (node, GPUs) of each part, or None."""
        places: list[tuple[int, int]] = []
        for part in self.size.split_gpus(gpus):
            taken = {node for node, _ in places}
            fitting = [n for n, free in enumerate(self.free) if free >= part and n not in taken]
            if not fitting:
                for node, back in places:
                    self.free[node] += back
                return None
            node = min(fitting, key=self.free.__getitem__)
            self.free[node] -= part
            places.append((node, part))
        return places


class _Preemptive:
    """Policies with preemption.

    Each GPU slot has the rank of its job; a pending job may take slots that are free or of a worse rank.
    """

    def __init__(self, jobs: Sequence[TraceJob], size: ClusterSize, policy: str) -> None:
        self.jobs = jobs
        self.size = size
        self.srtf = policy == "srtf"
        self.result = ReplayResult(jobs, size)
        self.remaining_s = [float(job.duration_s) for job in jobs]
        self.attained_s = [0.0] * len(jobs)
        self.since_s: dict[int, float] = {}
        self.slots: dict[int, list[tuple[int, int]]] = {}
        self.holder = np.full((size.nodes, size.gpus_per_node), -1, dtype=np.int64)
        self.rank = np.full((size.nodes, size.gpus_per_node), math.inf)  # free slots are infinite
        self.waiting: dict[int, list[tuple[float, int, int]]] = {
            g: [] for g in sorted({j.gpus for j in jobs})
        }
        self.epoch = [0] * len(jobs)
        self.events: list[tuple[float, int, int, bool]] = []  # time, job, epoch, whether the job ends

    def run(self) -> ReplayResult:
        arrived = 0
        while arrived < len(self.jobs) or self.events:
            arrives_s = self.jobs[arrived].submitted_s if arrived < len(self.jobs) else math.inf
            now_s = min(arrives_s, self.events[0][0] if self.events else math.inf)
            while self.events and self.events[0][0] <= now_s:
                _, number, epoch, ends = heapq.heappop(self.events)
                if epoch != self.epoch[number]:
                    continue
                if ends:
                    self._stop(number, now_s)
                    self.result.ended_s[number] = now_s
                else:
                    for node, slot in self.slots[number]:
                        self.rank[node, slot] = 1.0
            while arrived < len(self.jobs) and self.jobs[arrived].submitted_s <= now_s:
                if self.jobs[arrived].gpus <= self.size.gpus:
                    self._queue(arrived)
                arrived += 1
            self._schedule(now_s)
        return self.result

    def _queue(self, number: int) -> None:
        job = self.jobs[number]
        rank = self.remaining_s[number] if self.srtf else self._level(number)
        heapq.heappush(self.waiting[job.gpus], (rank, job.submitted_s, number))

    def _level(self, number: int) -> float:
        return float(self.attained_s[number] * self.jobs[number].gpus >= FIRST_QUEUE_GPU_S)

    def _schedule(self, now_s: float) -> None:
        open_sizes = [gpus for gpus, queue in self.waiting.items() if queue]
        while open_sizes:
            gpus = min(open_sizes, key=lambda each: self.waiting[each][0])
            number = self.waiting[gpus][0][2]
            rank = now_s + self.remaining_s[number] if self.srtf else self._level(number)
            slots = self._take(gpus, rank, now_s)
            if slots is None:
                open_sizes.remove(gpus)
                continue
            heapq.heappop(self.waiting[gpus])
            self._run(number, slots, rank, now_s)
            open_sizes = [each for each in open_sizes if self.waiting[each]]

    def _take(self, gpus: int, rank: float, now_s: float) -> list[tuple[int, int]] | None:
        """Return slots for all parts: free ones first, then those of the worst rank."""
        worse = self.rank > rank
        free = (self.holder < 0).sum(axis=1)
        could = worse.sum(axis=1)
        nodes: list[tuple[int, int]] = []
        for part in self.size.split_gpus(gpus):
            fits = np.where(free >= part, free, self.size.gpus_per_node + 1)
            node = int(fits.argmin())
            if fits[node] > self.size.gpus_per_node:
                node = int(np.where(could >= part, free, -1).argmax())
                if could[node] < part:
                    return None
            nodes.append((node, part))
            free[node] = could[node] = -1
        slots: list[tuple[int, int]] = []
        for node, part in nodes:
            while int((self.holder[node] < 0).sum()) < part:
                held = np.where(self.holder[node] >= 0, self.rank[node], -math.inf)
                self._preempt(int(self.holder[node, int(held.argmax())]), now_s)
            slots.extend((node, int(slot)) for slot in np.flatnonzero(self.holder[node] < 0)[:part])
        return slots

    def _run(self, number: int, slots: list[tuple[int, int]], rank: float, now_s: float) -> None:
        job = self.jobs[number]
        for node, slot in slots:
            self.holder[node, slot] = number
            self.rank[node, slot] = rank
        self.slots[number] = slots
        self.since_s[number] = now_s
        self.epoch[number] += 1
        if math.isnan(self.result.started_s[number]):
            self.result.started_s[number] = now_s
        heapq.heappush(self.events, (now_s + self.remaining_s[number], number, self.epoch[number], True))
        demoted_after_s = FIRST_QUEUE_GPU_S / job.gpus - self.attained_s[number]
        if not self.srtf and 0 < demoted_after_s < self.remaining_s[number]:
            heapq.heappush(self.events, (now_s + demoted_after_s, number, self.epoch[number], False))

    def _stop(self, number: int, now_s: float) -> None:
        for node, slot in self.slots.pop(number):
            self.holder[node, slot] = -1
            self.rank[node, slot] = math.inf
        ran_s = now_s - self.since_s.pop(number)
        self.remaining_s[number] -= ran_s
        self.attained_s[number] += ran_s
        self.epoch[number] += 1
        self.result.add_run(self.jobs[number], now_s - ran_s, now_s)

    def _preempt(self, number: int, now_s: float) -> None:
        self._stop(number, now_s)
        self.remaining_s[number] += self.result.add_preemption(self.jobs[number])
        self._queue(number)
