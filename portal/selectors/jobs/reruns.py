"""Which jobs repeat which."""

from __future__ import annotations

from dataclasses import dataclass

from portal.models import Job

MAX_RERUNS_SHOWN = 20


@dataclass(frozen=True)
class RerunRelations:
    """The job that a job repeats, and the newest jobs that repeat it. All are of the same project."""

    source: Job | None
    reruns: list[Job]


def rerun_relations(job: Job) -> RerunRelations:
    """Return both directions in two queries."""
    rows = Job.objects.select_related("project")
    reruns = rows.filter(rerun__source=job).order_by("-id")[:MAX_RERUNS_SHOWN]
    return RerunRelations(rows.filter(reruns__job=job).first(), list(reruns))
