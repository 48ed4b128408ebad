"""Which running jobs a simulation evicts so that a job of another project starts.

A coarser form of *reclaim* in ``scheduler.core.actions.preemption``: a project that stays within its fair share with
the job evicts jobs of projects above their shares, in the bucket where the lowest priority suffices, and there the
least work is lost. Unlike there, priorities of different projects are compared. Only whole
GPUs are reclaimed, and the shares of parent projects are not compared. In a large pool a search looks only at the
buckets with the most free GPUs and those of the latest jobs, which lose little.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np

from scheduler.core.forecast.capacity_buckets import BucketOccupancy, BucketRequest, BucketSlots
from scheduler.core.model.snapshot import WHOLE_MILLI, ProjectId
from scheduler.core.shares.quota_ledger import JobOwner

MAX_BUCKETS = 8
MAX_JOBS = 64
"""Jobs looked at to find these buckets."""


class ReclaimRules(NamedTuple):
    """From when jobs reclaim GPUs, in seconds from now, and the least run time of victims by leaf project."""

    from_s: float
    min_runtime_s: Mapping[ProjectId, float]
    priorities: Sequence[int] = ()
    """By queue position; empty if all are equal."""


class Requeue(NamedTuple):
    """How a job returns to the queue if it is evicted; times are in seconds from now, in the past negative."""

    job_class: int
    position: int
    saved_s: float
    """Its start or last checkpoint."""
    protected_until_s: float


class EvictableJob(NamedTuple):
    """A running job that may be evicted, with the number of its project."""

    project: int
    owner: JobOwner
    milli: float
    slots: Sequence[BucketSlots]
    ends_s: float
    requeue: Requeue

    def whole_gpus_in(self, bucket: int) -> int:
        return sum(amount for each, amount, gpus in self.slots if each == bucket and not gpus)


class EvictableJobs:
    """The evictable jobs of a simulation by number, the latest start last."""

    def __init__(
        self, occupancy: BucketOccupancy, share_milli: np.ndarray, priorities: Sequence[int] = ()
    ) -> None:
        """``priorities`` are by queue position; empty if all are equal."""
        self.occupancy = occupancy
        self._priorities = priorities
        self.share_milli: list[float] = share_milli.tolist()
        self.jobs: dict[int, EvictableJob] = {}
        self._in_bucket: dict[int, dict[int, None]] = {}

    def add(self, number: int, job: EvictableJob) -> None:
        self.jobs[number] = job
        for bucket, _, _ in job.slots:
            self._in_bucket.setdefault(bucket, {})[number] = None

    def discard(self, number: int) -> None:
        """Remove the job of this number, if it is one of them."""
        if (job := self.jobs.pop(number, None)) is not None:
            for bucket in {bucket for bucket, _, _ in job.slots}:
                del self._in_bucket[bucket][number]

    def buckets_to_search(self, bucket_types: Collection[int], projects: Collection[int]) -> dict[int, None]:
        """Return ``MAX_BUCKETS`` buckets with free GPUs, and as many with the latest jobs of these projects."""
        found = dict.fromkeys(islice(self.occupancy.freest_buckets(bucket_types), MAX_BUCKETS))
        enough = len(found) + MAX_BUCKETS
        for number in islice(reversed(self.jobs), MAX_JOBS):
            job = self.jobs[number]
            if job.project in projects:
                for bucket, _, _ in job.slots:
                    if self.occupancy.type_of[bucket] in bucket_types:
                        found[bucket] = None
            if len(found) >= enough:
                break
        return found

    def cheapest_first(self, bucket: int, now_s: float) -> list[tuple[int, float, int, EvictableJob]]:
        """Return the jobs in a bucket with their priorities, the milli-seconds they lose, and their numbers."""
        found = [
            (self._priority(job), (now_s - job.requeue.saved_s) * job.milli, number, job)
            for number in self._in_bucket.get(bucket, ())
            if (job := self.jobs[number]).requeue.protected_until_s <= now_s
        ]
        found.sort(key=lambda each: (each[0], each[1], -each[2]))  # the youngest of equal ones
        return found

    def _priority(self, job: EvictableJob) -> int:
        return self._priorities[job.requeue.position] if self._priorities else 0

    def find_victims(
        self,
        tasks: Iterable[tuple[BucketRequest, int, Sequence[int]]],
        reclaimer: int,
        held_milli: np.ndarray,
        now_s: float,
    ) -> list[int] | None:
        """Return the numbers of the jobs without which the tasks of a project fit; None if nothing helps.

        ``tasks`` are the requests with their number and open bucket types, ``held_milli`` what projects hold.
        """
        search = _VictimSearch(self, reclaimer, held_milli, now_s)
        for request, count, bucket_types in tasks:
            for _ in range(count):
                if request.milli != WHOLE_MILLI or not search.place(request.gpus, bucket_types):
                    return None
        return list(search.victims)


class _VictimSearch:
    """Places the tasks of a gang one by one, each where evictions lose the least."""

    def __init__(
        self, evictable: EvictableJobs, reclaimer: int, held_milli: np.ndarray, now_s: float
    ) -> None:
        self._evictable = evictable
        self._reclaimer = reclaimer
        self._now_s = now_s
        self._held_milli: list[float] = held_milli.tolist()
        self._freed: dict[int, int] = {}
        """By bucket: GPUs that victims free, less those of the placed tasks."""
        self._buckets: dict[tuple[int, ...], dict[int, None]] = {}
        """By bucket types: those to search."""
        self.victims: dict[int, None] = {}

    def place(self, gpus: int, bucket_types: Sequence[int]) -> bool:
        """Choose a bucket for a task and its victims there; return False if there is none."""
        best: tuple[tuple[int, float, int], int, list[int]] | None = None
        for bucket in self._buckets_to_search(bucket_types):
            missing = gpus - self._evictable.occupancy.whole_gpus[bucket] - self._freed.get(bucket, 0)
            if (found := self._victims_in(bucket, missing)) is not None:
                cost, victims = found
                if best is None or cost < best[0]:
                    best = cost, bucket, victims
                if not victims:
                    break
        if best is None:
            return False
        _, bucket, victims = best
        for number in victims:
            job = self._evictable.jobs[number]
            self.victims[number] = None
            self._held_milli[job.project] -= job.milli
            for each in {bucket for bucket, _, _ in job.slots}:
                self._freed[each] = self._freed.get(each, 0) + job.whole_gpus_in(each)
        self._freed[bucket] = self._freed.get(bucket, 0) - gpus
        return True

    def _buckets_to_search(self, bucket_types: Sequence[int]) -> dict[int, None]:
        key = tuple(bucket_types)
        if (found := self._buckets.get(key)) is None:
            shares_milli = self._evictable.share_milli
            over_share = {
                project
                for project, (held, share) in enumerate(zip(self._held_milli, shares_milli, strict=True))
                if held > share and project != self._reclaimer
            }
            found = self._buckets[key] = self._evictable.buckets_to_search(frozenset(key), over_share)
        return found

    def _victims_in(self, bucket: int, missing: int) -> tuple[tuple[int, float, int], list[int]] | None:
        """Return the victims that free ``missing`` GPUs of a bucket, after their cost; None if they cannot.

        The cost is their highest priority, the work that they lose, and their number.
        """
        highest, lost, victims = 0, 0.0, []
        held: dict[int, float] = {}
        if missing > 0:
            for priority, loses, number, job in self._evictable.cheapest_first(bucket, self._now_s):
                holds = held.get(job.project, self._held_milli[job.project])
                over_share = holds > self._evictable.share_milli[job.project]
                if not over_share or job.project == self._reclaimer or number in self.victims:
                    continue
                held[job.project] = holds - job.milli
                victims.append(number)
                highest = priority
                lost += loses
                missing -= job.whole_gpus_in(bucket)
                if missing <= 0:
                    break
        return ((highest, lost, len(victims)), victims) if missing <= 0 else None
