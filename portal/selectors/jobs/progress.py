"""Reads how far attempts have come, and on which layouts work like theirs ran faster."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from portal.domain.throughput import MAX_SAMPLES, Layout, compare_layouts, median_rates, workload_fingerprint
from portal.models import Attempt, AttemptProgress, Job

MAX_ATTEMPTS_READ = 8 * MAX_SAMPLES
"""So many of the latest attempts of a work are read for a page."""


def attempt_progress(attempt: Attempt) -> AttemptProgress | None:
    """What an attempt told; joined by whoever reads many."""
    try:
        return attempt.progress
    except AttemptProgress.DoesNotExist:
        return None


def job_workload_fingerprint(job: Job) -> str:
    """What a job has in common with those whose rates may be compared with its own."""
    return workload_fingerprint(
        job.project.public_id,
        job.environment.public_id,
        job.tasks * job.gpus_per_task,
        job.milli_per_gpu,
        job.mig_profile,
        job.command,
        job.env,
    )


@dataclass(frozen=True)
class MeasuredLayout:
    """How fast work ran on one layout: the median of so many attempts, and beside the fastest."""

    layout: Layout
    per_s: float
    percent: int
    attempts: int


def compare_job_layouts(job: Job) -> list[MeasuredLayout]:
    """The layouts on which jobs like this one ran and ended, fastest first; none unless two are known to differ.

    One query. Jobs like it are of its project only, so that whoever may see it may see this.
    """
    if not job.gpus_per_task:
        return []
    told = AttemptProgress.objects.filter(
        workload_fingerprint=job_workload_fingerprint(job), attempt__ended_at__isnull=False
    )
    rates = [
        (row.layout, per_s)
        for row in told.order_by("-attempt")[:MAX_ATTEMPTS_READ]
        if (per_s := row.per_s) is not None
    ]
    known = median_rates(rates)
    counted = Counter(layout for layout, _ in rates)
    return [
        MeasuredLayout(layout, known[layout], percent, min(counted[layout], MAX_SAMPLES))
        for layout, percent in compare_layouts(known)
    ]
