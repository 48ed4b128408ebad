"""Reads when a job is expected to start, how that moved and why, and how often such forecasts hold."""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass
from itertools import zip_longest

from django.db.models import Avg, Count, Q
from django.utils import timezone

from portal.domain.reasons import NO_FORECAST_REASONS
from portal.models import Forecast, Job, JobVerdict

ACCURACY_DAYS = 30
MAX_REVISIONS = 20
NOMINAL_PERCENT = 80
"""Of a hundred intervals so many are meant to hold."""


@dataclass(frozen=True)
class ForecastAccuracy:
    """How the scored forecasts of the last days did; None where none was scored."""

    days: int
    scored: int
    covered: int
    mean_score_s: float | None
    """Winkler's interval score (alpha 0.2), seconds: less is better."""

    @property
    def coverage(self) -> float | None:
        """The part that held, 0 to 1."""
        return self.covered / self.scored if self.scored else None

    @property
    def percent(self) -> int | None:
        """The same in percent."""
        return None if self.coverage is None else round(100 * self.coverage)


@dataclass(frozen=True)
class ForecastRevision:
    """One forecast of a job and how it differs from the one before; ``shift_s`` None on the first."""

    forecast: Forecast
    shift_s: float | None
    previous_code: str | None
    """The verdict's code before, where it is another."""
    jobs_ahead_added: tuple[str, ...]
    """Jobs (public ids) that are ahead now and were not."""
    jobs_ahead_removed: tuple[str, ...]
    """Jobs that were ahead and are not any more."""

    @property
    def is_later(self) -> bool:
        """The median moved away."""
        return (self.shift_s or 0) > 0


def no_forecast_reason(job: Job, verdict: JobVerdict | None) -> str | None:
    """Why no start of a waiting job is foreseen, as a message; None: it is, or was not looked for yet."""
    if verdict is None:
        return None
    message = NO_FORECAST_REASONS.get(verdict.code)
    if message is not None or verdict.p50_at is not None:
        return message
    if not job.total_milli:
        return "It asks for no GPU, and forecasts tell when GPUs come free."
    if verdict.forecast_at is not None:
        return (
            "Waiting alone does not help it: even once everything that runs or goes before it has ended, it could "
            "not start. The verdict says what is in the way."
        )
    return None


def forecast_accuracy(days: int = ACCURACY_DAYS) -> ForecastAccuracy:
    """One query."""
    since = timezone.now() - dt.timedelta(days=days)
    found = Forecast.objects.filter(covered__isnull=False, started_at__gte=since).aggregate(
        scored=Count("pk"), held=Count("pk", filter=Q(covered=True)), mean=Avg("score_s")
    )
    return ForecastAccuracy(days, found["scored"], found["held"], found["mean"])


def forecast_revisions(job: Job) -> list[ForecastRevision]:
    """The newest forecasts of a job, newest first, each beside the one before: one query."""
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
