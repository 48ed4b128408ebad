"""Reads how far attempts have come, and on which layouts work like theirs ran faster."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from portal.models import Attempt, Job, Progress
from portal.words.throughput import MOST_KNOWN, Layout, compared, medians, work_of

LOOKED_AT = 8 * MOST_KNOWN
"""So many of the latest attempts of a work are read for a page."""


def progress_of(attempt: Attempt) -> Progress | None:
    """What an attempt told; joined by whoever reads many."""
    try:
        return attempt.progress
    except Progress.DoesNotExist:
        return None


def work_of_job(job: Job) -> str:
    """What a job has in common with those whose rates may be compared with its own."""
    return work_of(
        job.project.public_id,
        job.environment.public_id,
        job.tasks * job.gpus_per_task,
        job.milli_per_gpu,
        job.mig_profile,
        job.command,
        job.environ,
    )


@dataclass(frozen=True)
class KnownLayout:
    """How fast work ran on one layout: the median of so many attempts, and beside the fastest."""

    layout: Layout
    per_s: float
    percent: int
    attempts: int


def layouts_compared(job: Job) -> list[KnownLayout]:
    """The layouts on which jobs like this one ran and ended, fastest first; none unless two are known to differ.

    One query. Jobs like it are of its project only, so that whoever may see it may see this.
    """
    if not job.gpus_per_task:
        return []
    told = Progress.objects.filter(work=work_of_job(job), attempt__ended_at__isnull=False)
    rates = [
        (row.layout, per_s)
        for row in told.order_by("-attempt")[:LOOKED_AT]
        if (per_s := row.per_s) is not None
    ]
    known = medians(rates)
    counted = Counter(layout for layout, _ in rates)
    return [
        KnownLayout(layout, known[layout], percent, min(counted[layout], MOST_KNOWN))
        for layout, percent in compared(known)
    ]
