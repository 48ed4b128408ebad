"""For whom waiting jobs wait: reads the jobs after which others are to start, in one query."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from django.db.models import Q, QuerySet

from portal.models import Dependency, Job
from portal.words.states import JOB_ENDS, JobState
from scheduler.core.cluster import Awaited, JobId, PendingRow, ProjectId
from scheduler.read_running import Seconds

_ENDED = frozenset(state.value for state in JOB_ENDS)


@dataclass
class Waits:
    """For whom one job waits, and when the last of the others ended (seconds since the epoch)."""

    any_end: bool
    after: list[Awaited] = field(default_factory=list)
    free_s: float = 0.0

    def told(self, row: PendingRow) -> PendingRow:
        """The job with them. Its age counts from when nobody held it back: until then it asked for nothing."""
        submitted_s = max(row.submitted_s, self.free_s)
        return replace(row, after=tuple(self.after), after_any=self.any_end, submitted_s=submitted_s)


def waits_of(jobs: QuerySet[Job]) -> dict[int, Waits]:
    """By row number, those of ``jobs`` that were to start after others; one query.

    Of a job that ended otherwise than it must, the other one waits on: the record is about to cancel it.
    """
    rows = Dependency.objects.filter(job__in=jobs).order_by("after_id")
    found: dict[int, Waits] = {}
    for job, any_end, after, name, project, state, ended_s in rows.values_list(
        "job_id",
        "job__after_any",
        "after__public_id",
        "after__name",
        "after__project__public_id",
        "after__state",
        Seconds("after__ended_at"),
    ):
        waits = found.setdefault(job, Waits(any_end))
        if state == JobState.COMPLETED.value or (any_end and state in _ENDED):
            waits.free_s = max(waits.free_s, ended_s or 0.0)
        else:
            waits.after.append(Awaited(JobId(after), name, ProjectId(project)))
    return found


def still_awaited(public_ids: Iterable[str]) -> tuple[Awaited, ...]:
    """Those of these jobs that have not ended, as the core knows them."""
    rows = Job.objects.filter(public_id__in=list(public_ids)).exclude(state__in=_ENDED).order_by("pk")
    return tuple(
        Awaited(JobId(job), name, ProjectId(project))
        for job, name, project in rows.values_list("public_id", "name", "project__public_id")
    )


def held_back(jobs: Iterable[int]) -> frozenset[int]:
    """Of jobs (row numbers) those that must not start yet: one before them has not ended as it must."""
    may = Q(after__state=JobState.COMPLETED.value) | Q(job__after_any=True, after__state__in=_ENDED)
    rows = Dependency.objects.filter(job__in=list(jobs)).exclude(may)
    return frozenset(rows.values_list("job_id", flat=True))
