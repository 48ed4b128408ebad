"""Reads when a job is expected to start, how the forecast changed and why, and forecast accuracy."""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass
from itertools import zip_longest

from django.db.models import Avg, Count, Q
from django.utils import timezone

from portal.domain.jobs.reasons import FORECAST_FINDS_NO_START, FORECAST_WITHOUT_GPUS, NO_FORECAST_REASONS
from portal.models import Forecast, Job, JobVerdict

ACCURACY_DAYS = 30
MAX_REVISIONS = 20


@dataclass(frozen=True)
class ForecastAccuracy:
    """Accuracy of the forecasts scored in the last days; None if none was scored."""

    days: int
    scored: int
    covered: int
    mean_score_s: float | None
    """Winkler's interval score (alpha 0.2), seconds; less is better."""

    @property
    def coverage(self) -> float | None:
        """Fraction of correct intervals, 0 to 1."""
        return self.covered / self.scored if self.scored else None

    @property
    def percent(self) -> int | None:
        return None if self.coverage is None else round(100 * self.coverage)


@dataclass(frozen=True)
class ForecastRevision:
    """A forecast of a job and its difference to the previous one; ``shift_s`` is None for the first."""

    forecast: Forecast
    shift_s: float | None
    previous_code: str | None
    """The previous verdict's code, if different."""
    jobs_ahead_added: tuple[str, ...]
    """Public ids of jobs that are ahead now and were not before."""
    jobs_ahead_removed: tuple[str, ...]
    """Public ids of jobs that are no longer ahead."""

    @property
    def is_later(self) -> bool:
        return (self.shift_s or 0) > 0


def no_forecast_reason(job: Job, verdict: JobVerdict | None) -> str | None:
    """Return why a pending job has no start forecast, or None if it has one or none was computed yet."""
    if verdict is None:
        return None
    message = NO_FORECAST_REASONS.get(verdict.code)
    if message is not None or verdict.p50_at is not None:
        return message
    if not job.total_milli:
        return FORECAST_WITHOUT_GPUS
    if verdict.forecast_at is not None:
        return FORECAST_FINDS_NO_START
    return None


def forecast_accuracy() -> ForecastAccuracy:
    since = timezone.now() - dt.timedelta(days=ACCURACY_DAYS)
    found = Forecast.objects.filter(covered__isnull=False, started_at__gte=since).aggregate(
        scored=Count("pk"), held=Count("pk", filter=Q(covered=True)), mean=Avg("score_s")
    )
    return ForecastAccuracy(ACCURACY_DAYS, found["scored"], found["held"], found["mean"])


def forecast_revisions(job: Job) -> list[ForecastRevision]:
    """Return the newest forecasts of a job, newest first, each compared to the previous, in one query."""
    rows = list(Forecast.objects.filter(job=job).order_by("-id")[: MAX_REVISIONS + 1])
    moves = [_revision(row, older) for row, older in zip_longest(rows, rows[1:])]
    return moves[:MAX_REVISIONS]


def _revision(row: Forecast, older: Forecast | None) -> ForecastRevision:
    if older is None:
        return ForecastRevision(row, None, None, (), ())
    return ForecastRevision(
        row,
        (row.p50_at - older.p50_at).total_seconds(),
        older.code if older.code != row.code else None,
        tuple(one for one in row.jobs_ahead if one not in older.jobs_ahead),
        tuple(one for one in older.jobs_ahead if one not in row.jobs_ahead),
    )
