"""The input shared by all runs of a queue simulation: running jobs, job classes and free capacity."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from scheduler.core.forecast.capacity_buckets import BucketRequest, BucketSlots, CapacityBuckets
from scheduler.core.model.resources import ResourceVector
from scheduler.core.model.snapshot import WHOLE_MILLI, ProjectId, UserId
from scheduler.core.shares.ledger import PoolLedger


class JobOwner(NamedTuple):
    """The project and user that a job counts for, and its amounts."""

    project: ProjectId
    leaf_project: ProjectId
    user: UserId
    preemptible: bool
    amounts: ResourceVector


class RunningJob(NamedTuple):
    """A running job with its remaining seconds in each run."""

    owner: JobOwner
    slots: Sequence[BucketSlots]
    remaining_s: Sequence[float]


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


class SimulationInput:
    """``durations_s`` are the run times of pending jobs, by position and run.

    ``ledger`` contains what running jobs hold; None if no quota can block a job. Job classes, fit classes and
    projects are numbered; a *fit class* is all job classes with equal requests and closures.
    """

    def __init__(
        self,
        buckets: CapacityBuckets,
        running: Sequence[RunningJob],
        job_classes: Sequence[JobClass],
        durations_s: Sequence[Sequence[float]],
        share_milli: Mapping[ProjectId, float],
        ledger: PoolLedger | None = None,
    ) -> None:
        self.buckets = buckets
        self.running = running
        self.job_classes = job_classes
        self.durations_s = durations_s
        self.ledger = ledger
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
        projects = list(dict.fromkeys(job_class.owner.project for job_class in job_classes))
        self.project_at = {project: number for number, project in enumerate(projects)}
        self.project_of = [self.project_at[job_class.owner.project] for job_class in job_classes]
        self.share_milli = np.array([max(1.0, share_milli.get(project, 0.0)) for project in projects])
        self.held_milli = np.zeros(len(projects))
        for job in running:
            if (number := self.project_at.get(job.owner.project)) is not None:
                self.held_milli[number] += job.owner.amounts.gpu_milli
        kinds: dict[object, list[int]] = {}
        for number, job_class in enumerate(job_classes):
            kinds.setdefault((job_class.requests, job_class.closures), []).append(number)
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
        self.heterogeneous = [
            kind for kind, job_class in enumerate(self.fit_classes) if len(job_class.requests) > 1
        ]
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
        self.event_times_s = sorted({*self.arrivals, *self.openings})

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

    def _is_infeasible(self, job_class: JobClass) -> bool:
        if not all(request.bucket_types for request, _ in job_class.requests):
            return True
        owner = job_class.owner
        return self.ledger is not None and self.ledger.is_blocked(
            owner.leaf_project, owner.user, owner.amounts, owner.preemptible, empty=True
        )
