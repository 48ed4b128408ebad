"""Stores forecasts of pending jobs, and scores the first forecast of each job when it starts.

An interval is written when it is new, or when its median changed by more than a fifth of the remaining wait.
It is cleared when there is no forecast any more.
"""

from __future__ import annotations

import datetime as dt
import logging
from collections.abc import Mapping
from enum import Enum

from django.db import transaction
from django.db.models import F
from django.utils import timezone

from portal.live_events import publish_on_commit
from portal.models import Forecast, Job, JobVerdict
from scheduler import leases
from scheduler.core.forecast.calibration import interval_score
from scheduler.core.model.plan import StartInterval
from scheduler.core.model.snapshot import JobId
from scheduler.leases import HeldLease

log = logging.getLogger(__name__)

MIN_RELATIVE_CHANGE = 0.2
MIN_CHANGE_S = 60.0
MAX_NEW = 2_000
"""Intervals written at once that are new or cleared."""
MAX_CHANGED = 500
"""Changed intervals written at once; each adds a row of history."""
MAX_BATCH = 500
"""Intervals per transaction; cycles write the same rows."""
MAX_ANNOUNCED = 200
"""Changes per transaction that are pushed to open pages at most; pages poll for the rest."""
MAX_SCORED = 2000
_INTERVAL = ("forecast_at", "p10_at", "p50_at", "p90_at")


class NoForecast(Enum):
    """Why a pending job has no forecast."""

    NOT_APPLICABLE = "not_applicable"
    """Its verdict excludes a forecast (``NO_FORECAST_REASONS``)."""
    NO_START_FOUND = "no_start_found"
    """The simulation found no start even after all running and earlier jobs ended."""
    BEYOND_HORIZON = "beyond_horizon"
    """The simulation ended before it reached the job."""


ForecastResult = StartInterval | NoForecast


def save_intervals(intervals: Mapping[JobId, ForecastResult], leader: HeldLease | None = None) -> int:
    """Write new and changed intervals of jobs that have a verdict; return their number.

    When there are more than the limits, the oldest forecasts are updated first. With ``leader``, raise
    LeaseLostError when the lease is lost.
    """
    valid = {
        job: start for job, start in intervals.items() if isinstance(start, NoForecast) or is_valid(start)
    }
    if invalid := len(intervals) - len(valid):
        log.warning("%s invalid start intervals were dropped", invalid)
    jobs = _changed_jobs(valid)
    written = 0
    for first in range(0, len(jobs), MAX_BATCH):
        written += _write({job: valid[job] for job in jobs[first : first + MAX_BATCH]}, leader)
    return written


def _write(intervals: Mapping[JobId, ForecastResult], leader: HeldLease | None) -> int:
    now = timezone.now()
    with transaction.atomic():
        if leader is not None:
            leases.check(leader)
        rows = JobVerdict.objects.select_for_update(of=("self",), no_key=True).select_related("job")
        changed = list(rows.filter(job__public_id__in=intervals).order_by("job_id"))
        first = _jobs_without_forecast([row.job_id for row in changed if row.p50_at is None])
        made = []
        for row in changed:
            interval = intervals[JobId(row.job.public_id)]
            row.forecast_at = (
                None if interval in (NoForecast.NOT_APPLICABLE, NoForecast.BEYOND_HORIZON) else now
            )
            if isinstance(interval, NoForecast):
                row.p10_at = row.p50_at = row.p90_at = None
                continue
            row.p10_at, row.p50_at, row.p90_at = map(
                _to_datetime, (interval.p10_s, interval.p50_s, interval.p90_s)
            )
            made.append(
                Forecast(
                    job_id=row.job_id,
                    made_at=now,
                    is_first=row.job_id in first,
                    p10_at=row.p10_at,
                    p50_at=row.p50_at,
                    p90_at=row.p90_at,
                    simulated_s=interval.simulated_s,
                    code=row.code,
                    jobs_ahead=row.jobs_ahead,
                )
            )
        for row in changed[:MAX_ANNOUNCED]:
            publish_on_commit(f"job.{row.job.public_id}", {"kind": "forecast"})
        JobVerdict.objects.bulk_update(changed, _INTERVAL)
        Forecast.objects.bulk_create(made)
    return len(made)


def is_valid(interval: StartInterval) -> bool:
    """Return True when the three times are ascending and between the years 2001 and 2286."""
    return 1e9 <= interval.p10_s <= interval.p50_s <= interval.p90_s < 1e10


def has_changed(
    median_at: dt.datetime | None, forecast_at: dt.datetime | None, interval: ForecastResult
) -> bool:
    """Return True when the median is new, or moved by more than a fifth of the wait (at least 1 min)."""
    if isinstance(interval, NoForecast):
        return median_at is not None or (forecast_at is None) is (interval is NoForecast.NO_START_FOUND)
    if median_at is None or forecast_at is None:
        return True
    forecast_s = (median_at - forecast_at).total_seconds()
    shift_s = abs(interval.p50_s - median_at.timestamp())
    return shift_s > max(MIN_CHANGE_S, MIN_RELATIVE_CHANGE * forecast_s)


def _changed_jobs(intervals: Mapping[JobId, ForecastResult]) -> list[JobId]:
    """Return the jobs (public ids) whose interval is to be written now, in at most one query."""
    if not intervals:
        return []
    rows = JobVerdict.objects.filter(job__public_id__in=list(intervals))
    new: list[JobId] = []
    changed: list[JobId] = []
    for public_id, median_at, forecast_at in rows.order_by(
        F("forecast_at").asc(nulls_first=True), "job_id"
    ).values_list("job__public_id", "p50_at", "forecast_at"):
        start = intervals[job := JobId(public_id)]
        if has_changed(median_at, forecast_at, start):
            (new if median_at is None or isinstance(start, NoForecast) else changed).append(job)
    return new[:MAX_NEW] + changed[:MAX_CHANGED]


def score_started() -> int:
    """Score the first forecast of each job that has started; return their number."""
    rows = (
        Forecast.objects.filter(is_first=True, started_at__isnull=True, job__started_at__isnull=False)
        .annotate(job_started=F("job__started_at"))
        .order_by("id")[:MAX_SCORED]
    )
    with transaction.atomic():
        scored = list(rows.select_for_update(of=("self",), no_key=True, skip_locked=True))
        for row in scored:
            row.started_at = row.job_started
            row.covered = row.p10_at <= row.job_started <= row.p90_at
            row.score_s = interval_score(
                row.p10_at.timestamp(), row.p90_at.timestamp(), row.job_started.timestamp()
            )
        Forecast.objects.bulk_update(scored, ["started_at", "covered", "score_s"], batch_size=1000)
    return len(scored)


def _jobs_without_forecast(jobs: list[int]) -> set[int]:
    """Return those of the jobs (primary keys) that never started and have no forecast."""
    rows = Job.objects.filter(pk__in=jobs, started_at__isnull=True).exclude(forecasts__is_first=True)
    return set(rows.values_list("pk", flat=True))


def _to_datetime(seconds: float) -> dt.datetime:
    return dt.datetime.fromtimestamp(seconds, dt.UTC)
