"""The start forecast of a pending job: interval, progress, revisions and their reasons."""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass, field

from django.utils import timezone
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

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
from portal.web.display.job_rows import verdict_label

BAR_MARGIN = 1.15


@dataclass(frozen=True)
class ForecastDisplay:
    """The start interval in the verdict of a pending job; it is missing when there is no estimate yet."""

    verdict: JobVerdict
    accuracy: ForecastAccuracy
    missing_reason: str | None = None
    """Why there is no forecast, if known; earlier forecasts are invalid then."""
    revisions: list[tuple[ForecastRevision, list[str]]] = field(default_factory=list)

    @property
    def overdue(self) -> bool:
        """True when the interval is over."""
        return self.verdict.p90_at is not None and self.verdict.p90_at < timezone.now()

    @property
    def span(self) -> dt.timedelta:
        if self.verdict.p90_at is None:
            return dt.timedelta(0)
        return max(self.verdict.p90_at - timezone.now(), dt.timedelta(minutes=1)) * BAR_MARGIN

    @property
    def end(self) -> dt.datetime:
        return timezone.now() + self.span

    @property
    def bar(self) -> tuple[float, float]:
        """Start and end of the interval on the bar, percent."""
        earliest, latest = self.verdict.p10_at, self.verdict.p90_at
        if earliest is None or latest is None:
            return 0.0, 0.0
        whole = self.span.total_seconds()
        low, high = ((at - timezone.now()).total_seconds() / whole * 100 for at in (earliest, latest))
        return max(0.0, min(98.0, low)), max(2.0, min(100.0, high))


def build_forecast_display(user: User, job: Job, verdict: JobVerdict) -> ForecastDisplay:
    """Build the display in at most three queries."""
    return ForecastDisplay(
        verdict, forecast_accuracy(), no_forecast_reason(job, verdict), explained_revisions(user, job)
    )


def explained_revisions(user: User, job: Job) -> list[tuple[ForecastRevision, list[str]]]:
    """Return the newest forecasts, newest first, and why each differs from the one before."""
    moves = forecast_revisions(job)
    named = {one for move in moves for one in (*move.jobs_ahead_added, *move.jobs_ahead_removed)}
    names = {row.public_id: row.name for row in list_jobs(user).filter(public_id__in=named)} if named else {}
    return [(move, revision_reasons(move, names)) for move in moves]


def revision_reasons(move: ForecastRevision, names: dict[str, str]) -> list[str]:
    """Describe how and why a forecast changed; jobs invisible to the reader are only counted."""
    if move.shift_s is None:
        return [_("The first forecast.")]
    shift = _("{duration} later.") if move.is_later else _("{duration} sooner.")
    messages = [shift.format(duration=duration(abs(move.shift_s)))]
    if move.previous_code and move.forecast.code:
        messages.append(
            _("The reason for waiting changed from “{before}” to “{after}”.").format(
                before=verdict_label(move.previous_code), after=verdict_label(move.forecast.code)
            )
        )
    if jobs := move.jobs_ahead_added:
        text = ngettext("{jobs} is now ahead of it.", "{jobs} are now ahead of it.", len(jobs))
        messages.append(text.format(jobs=_job_names(jobs, names)))
    if jobs := move.jobs_ahead_removed:
        text = ngettext("{jobs} is no longer ahead of it.", "{jobs} are no longer ahead of it.", len(jobs))
        messages.append(text.format(jobs=_job_names(jobs, names)))
    if len(messages) == 1:
        messages.append(_("Running jobs take more or less time than predicted."))
    return messages


def _job_names(jobs: tuple[str, ...], names: dict[str, str]) -> str:
    known = [names[one] for one in jobs if one in names]
    others = len(jobs) - len(known)
    if others:
        known.append(plural(others, "job of another project,jobs of other projects"))
    return ", ".join(known)
