"""Reads job dependencies."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from django.db.models import Q, QuerySet

from portal.domain.states import TERMINAL_JOB_STATES, JobState
from portal.models import Dependency, Job
from scheduler.core.model.snapshot import JobDependency, JobId, PendingRow, ProjectId
from scheduler.snapshot.running import EpochSeconds

_ENDED = frozenset(state.value for state in TERMINAL_JOB_STATES)


@dataclass
class JobDependencies:
    """Unfinished dependencies of one job, and when the last finished one ended (seconds since the epoch)."""

    ignore_dependency_failure: bool
    unfinished: list[JobDependency] = field(default_factory=list)
    released_s: float = 0.0

    def apply(self, row: PendingRow) -> PendingRow:
        """Return the row with its dependencies. Its age counts from when the last dependency ended."""
        submitted_s = max(row.submitted_s, self.released_s)
        return replace(
            row,
            dependencies=tuple(self.unfinished),
            ignore_dependency_failure=self.ignore_dependency_failure,
            submitted_s=submitted_s,
        )


def read_dependencies(jobs: QuerySet[Job]) -> dict[int, JobDependencies]:
    """Return the dependencies of ``jobs`` by primary key, in one query.

    A dependency that ended without the required result still blocks: the job is about to be cancelled.
    """
    rows = Dependency.objects.filter(job__in=jobs).order_by("depends_on_id")
    found: dict[int, JobDependencies] = {}
    for job, ignore_dependency_failure, after, name, project, state, ended_s in rows.values_list(
        "job_id",
        "job__ignore_dependency_failure",
        "depends_on__public_id",
        "depends_on__name",
        "depends_on__project__public_id",
        "depends_on__state",
        EpochSeconds("depends_on__ended_at"),
    ):
        dependencies = found.setdefault(job, JobDependencies(ignore_dependency_failure))
        if state == JobState.COMPLETED.value or (ignore_dependency_failure and state in _ENDED):
            dependencies.released_s = max(dependencies.released_s, ended_s or 0.0)
        else:
            dependencies.unfinished.append(JobDependency(JobId(after), name, ProjectId(project)))
    return found


def unfinished_jobs(public_ids: Iterable[str]) -> tuple[JobDependency, ...]:
    """Return those of the jobs that have not ended."""
    rows = Job.objects.filter(public_id__in=list(public_ids)).exclude(state__in=_ENDED).order_by("pk")
    return tuple(
        JobDependency(JobId(job), name, ProjectId(project))
        for job, name, project in rows.values_list("public_id", "name", "project__public_id")
    )


def blocked_by_dependencies(jobs: Iterable[int]) -> frozenset[int]:
    """Return those of the jobs (primary keys) that a dependency keeps from starting."""
    satisfied = Q(depends_on__state=JobState.COMPLETED.value) | Q(
        job__ignore_dependency_failure=True, depends_on__state__in=_ENDED
    )
    rows = Dependency.objects.filter(job__in=list(jobs)).exclude(satisfied)
    return frozenset(rows.values_list("job_id", flat=True))
