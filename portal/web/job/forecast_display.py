"""When a waiting job is expected to start, for its page: the interval, how far it is, how it moved and why."""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass, field

from django.utils import timezone

from portal.models import Job, JobVerdict, User
from portal.selectors.jobs.jobs import list_jobs
from portal.selectors.scheduling.forecasts import (
    ForecastAccuracy,
    ForecastRevision,
    forecast_accuracy,
    forecast_revisions,
    no_forecast_reason,
)
from portal.web.display.formatting import duration, plural

BAR_MARGIN = 1.15


@dataclass(frozen=True)
class ForecastDisplay:
    """The start interval of a waiting job. ``low`` None: there is no estimate yet."""

    earliest: dt.datetime | None
    median: dt.datetime | None
    latest: dt.datetime | None
    made_at: dt.datetime | None
    accuracy: ForecastAccuracy
    missing_reason: str | None = None
    """Why there is none, where that is known; what was foreseen before does not hold then."""
    revisions: list[tuple[ForecastRevision, list[str]]] = field(default_factory=list)

    @property
    def overdue(self) -> bool:
        """It was to have started by now."""
        return self.latest is not None and self.latest < timezone.now()

    @property
    def span(self) -> dt.timedelta:
        """What the bar shows from now on."""
        if self.latest is None:
            return dt.timedelta(0)
        return max(self.latest - timezone.now(), dt.timedelta(minutes=1)) * BAR_MARGIN

    @property
    def end(self) -> dt.datetime:
        """Where the bar ends."""
        return timezone.now() + self.span

    @property
    def bar(self) -> tuple[float, float]:
        """Begin and end of the interval on the bar, percent."""
        if self.earliest is None or self.latest is None:
            return 0.0, 0.0
        whole = self.span.total_seconds()
        low, high = (
            (at - timezone.now()).total_seconds() / whole * 100 for at in (self.earliest, self.latest)
        )
        return max(0.0, min(98.0, low)), max(2.0, min(100.0, high))


def build_forecast_display(user: User, job: Job, standing: JobVerdict) -> ForecastDisplay:
    """Three queries at most."""
    moves = forecast_revisions(job)
    named = {one for move in moves for one in (*move.jobs_ahead_added, *move.jobs_ahead_removed)}
    names = {row.public_id: row.name for row in list_jobs(user).filter(public_id__in=named)} if named else {}
    return ForecastDisplay(
        standing.p10_at,
        standing.p50_at,
        standing.p90_at,
        standing.forecast_at,
        forecast_accuracy(),
        no_forecast_reason(job, standing),
        [(move, revision_reasons(move, names)) for move in moves],
    )


def revision_reasons(move: ForecastRevision, names: dict[str, str]) -> list[str]:
    """How and why a forecast moved, in sentences; jobs the reader may not see are counted only."""
    if move.shift_s is None:
        return ["The first forecast."]
    sentences = [f"{duration(abs(move.shift_s))} {'later' if move.is_later else 'sooner'}."]
    if move.previous_code is not None:
        sentences.append(f"What it waits for was {move.previous_code} and is {move.forecast.code} now.")
    for jobs, what in (
        (move.jobs_ahead_added, "now ahead of it"),
        (move.jobs_ahead_removed, "not ahead of it any more"),
    ):
        if jobs:
            sentences.append(f"{_job_names(jobs, names)} {'is' if len(jobs) == 1 else 'are'} {what}.")
    if len(sentences) == 1:
        sentences.append("Jobs that run now took another time than was expected.")
    return sentences


def _job_names(jobs: tuple[str, ...], names: dict[str, str]) -> str:
    known = [names[one] for one in jobs if one in names]
    others = len(jobs) - len(known)
    if others:
        known.append(plural(others, "job of another project,jobs of other projects"))
    return ", ".join(known)
