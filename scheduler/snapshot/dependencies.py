"""For whom waiting jobs wait: reads the jobs after which others are to start, in one query."""

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
    """For whom one job waits, and when the last of the others ended (seconds since the epoch)."""

    ignore_dependency_failure: bool
    unfinished: list[JobDependency] = field(default_factory=list)
    released_s: float = 0.0

    def apply(self, row: PendingRow) -> PendingRow:
        """The job with them. Its age counts from when nobody held it back: until then it asked for nothing."""
        submitted_s = max(row.submitted_s, self.released_s)
        return replace(
            row,
            dependencies=tuple(self.unfinished),
            ignore_dependency_failure=self.ignore_dependency_failure,
            submitted_s=submitted_s,
        )


def read_dependencies(jobs: QuerySet[Job]) -> dict[int, JobDependencies]:
    """By row number, those of ``jobs`` that were to start after others; one query.

    Of a job that ended otherwise than it must, the other one waits on: the record is about to cancel it.
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
        EpochSeconds("after__ended_at"),
    ):
        dependencies = found.setdefault(job, JobDependencies(ignore_dependency_failure))
        if state == JobState.COMPLETED.value or (ignore_dependency_failure and state in _ENDED):
            dependencies.released_s = max(dependencies.released_s, ended_s or 0.0)
        else:
            dependencies.unfinished.append(JobDependency(JobId(after), name, ProjectId(project)))
    return found


def unfinished_jobs(public_ids: Iterable[str]) -> tuple[JobDependency, ...]:
    """Those of these jobs that have not ended, as the core knows them."""
    rows = Job.objects.filter(public_id__in=list(public_ids)).exclude(state__in=_ENDED).order_by("pk")
    return tuple(
        JobDependency(JobId(job), name, ProjectId(project))
        for job, name, project in rows.values_list("public_id", "name", "project__public_id")
    )


def blocked_by_dependencies(jobs: Iterable[int]) -> frozenset[int]:
    """Of jobs (row numbers) those that must not start yet: one before them has not ended as it must."""
    satisfied = Q(depends_on__state=JobState.COMPLETED.value) | Q(
        job__ignore_dependency_failure=True, depends_on__state__in=_ENDED
    )
    rows = Dependency.objects.filter(job__in=list(jobs)).exclude(satisfied)
    return frozenset(rows.values_list("job_id", flat=True))
