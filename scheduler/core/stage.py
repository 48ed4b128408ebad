"""What all plays of one pool's queue begin with: who runs where, who waits in which line, and what is free."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from scheduler.core.cluster import WHOLE_MILLI, ProjectId, UserId
from scheduler.core.ground import CapacityBuckets, BucketRequest, BucketSlots
from scheduler.core.ledger import PoolLedger
from scheduler.core.resources import ResourceVector


class JobOwner(NamedTuple):
    """For whom a job counts, and what it counts for."""

    project: ProjectId
    leaf_project: ProjectId
    user: UserId
    preemptible: bool
    amounts: ResourceVector


class RunningJob(NamedTuple):
    """A running job: what is left of it in each play, in seconds."""

    owner: JobOwner
    slots: Sequence[BucketSlots]
    remaining_s: Sequence[float]


class Closure(NamedTuple):
    """Cells of these sorts take no job between two times, in seconds from now."""

    bucket_types: frozenset[int]
    after_s: float
    until_s: float


class JobClass(NamedTuple):
    """Waiting jobs that differ only in their turns (ascending; smaller goes first) and in how long they run."""

    owner: JobOwner
    requests: tuple[tuple[BucketRequest, int], ...]  # of a gang's tasks, with how many are alike
    positions: Sequence[int]
    not_before_s: float = 0.0  # they start no earlier, in seconds from now
    closures: tuple[Closure, ...] = ()


class SimulationInput:
    """``runs_s`` is how long a waiting job runs, by turn and play.

    ``ledger`` holds what running jobs hold; None where no quota can keep a job back. Lines, kinds and the projects
    of lines are known by their numbers.
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
            ledger.highest_bounded_project(line.owner.leaf_project, line.owner.preemptible) if ledger else None
            for line in job_classes
        ]
        """By line: the highest project whose quota can keep its jobs back."""
        self.class_of = {turn: number for number, line in enumerate(job_classes) for turn in line.positions}
        self.infeasible = [self._is_infeasible(line) for line in job_classes]
        """By line: no GPU at all is of its kind, or a quota is too small for its jobs even with nothing held."""
        projects = list(dict.fromkeys(line.owner.project for line in job_classes))
        self.project_at = {project: number for number, project in enumerate(projects)}
        self.project_of = [self.project_at[line.owner.project] for line in job_classes]
        self.share_milli = np.array([max(1.0, share_milli.get(project, 0.0)) for project in projects])
        self.held_milli = np.zeros(len(projects))
        for job in running:
            if (number := self.project_at.get(job.owner.project)) is not None:
                self.held_milli[number] += job.owner.amounts.gpu_milli
        kinds: dict[object, list[int]] = {}
        for number, line in enumerate(job_classes):
            kinds.setdefault((line.requests, line.closures), []).append(number)
        self.fit_classes = [job_classes[numbers[0]] for numbers in kinds.values()]
        """One line each of those that find places, or none, together."""
        self.fit_class_of = [0] * len(job_classes)
        for kind, numbers in enumerate(kinds.values()):
            for number in numbers:
                self.fit_class_of[number] = kind
        self.milli_of = [line.owner.amounts.gpu_milli for line in self.fit_classes]
        """By kind: what a job counts for."""
        firsts = [line.requests[0] if line.requests else (BucketRequest(1, WHOLE_MILLI, ()), 0) for line in self.fit_classes]
        self.sizes = list(dict.fromkeys(need.size for need, _ in firsts))
        place_of = {size: number for number, size in enumerate(self.sizes)}
        self.size_of = np.array([place_of[need.size] for need, _ in firsts])
        self.count_of = np.array([count for _, count in firsts])
        """By kind: which of ``sizes`` its first task has, and how many such it has."""
        self.heterogeneous = [kind for kind, line in enumerate(self.fit_classes) if len(line.requests) > 1]
        self.arrivals: dict[float, list[int]] = {}
        """Lines that are to start no earlier, by seconds from now."""
        for number, line in enumerate(job_classes):
            if line.not_before_s > 0.0:
                self.arrivals.setdefault(line.not_before_s, []).append(number)
        self.openings: dict[float, list[int]] = {}
        """Kinds that find more places from then on, by seconds from now."""
        self.closings: list[tuple[float, int]] = []
        """After when which kinds find fewer places, ascending."""
        for kind, line in enumerate(self.fit_classes):
            for each in line.closures:
                if each.until_s > 0.0:
                    self.openings.setdefault(each.until_s, []).append(kind)
                if each.after_s >= 0.0:
                    self.closings.append((each.after_s, kind))
        self.closings.sort()
        self.event_times_s = sorted({*self.arrivals, *self.openings})

    def open_bucket_types(self, fit_class: int, now_s: float) -> list[list[int]]:
        """Where each task of a kind can stand that is open then."""
        line = self.fit_classes[fit_class]
        closed = [each.bucket_types for each in line.closures if each.after_s < now_s < each.until_s]
        return [
            [sort for sort in need.bucket_types if not any(sort in sorts for sorts in closed)]
            for need, _ in line.requests
        ]

    def _is_infeasible(self, line: JobClass) -> bool:
        if not all(need.bucket_types for need, _ in line.requests):
            return True
        stake = line.owner
        return self.ledger is not None and self.ledger.is_blocked(
            stake.leaf_project, stake.user, stake.amounts, stake.preemptible, empty=True
        )
