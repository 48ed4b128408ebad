"""When a waiting job is expected to start, for its page: the interval, how far it is, how it moved and why."""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass, field

from django.utils import timezone

from portal.models import Job, Standing, User
from portal.selectors.forecasts import Measured, Move, measured, moves_of, why_none
from portal.selectors.jobs import jobs_for
from portal.web.words import duration, plural

MARGIN = 1.15


@dataclass(frozen=True)
class When:
    """The start interval of a waiting job. ``low`` None: there is no estimate yet."""

    low: dt.datetime | None
    middle: dt.datetime | None
    high: dt.datetime | None
    made_at: dt.datetime | None
    measured: Measured
    none_because: str | None = None
    """Why there is none, where that is known; what was foreseen before does not hold then."""
    moves: list[tuple[Move, list[str]]] = field(default_factory=list)

    @property
    def overdue(self) -> bool:
        """It was to have started by now."""
        return self.high is not None and self.high < timezone.now()

    @property
    def span(self) -> dt.timedelta:
        """What the bar shows from now on."""
        if self.high is None:
            return dt.timedelta(0)
        return max(self.high - timezone.now(), dt.timedelta(minutes=1)) * MARGIN

    @property
    def end(self) -> dt.datetime:
        """Where the bar ends."""
        return timezone.now() + self.span

    @property
    def bar(self) -> tuple[float, float]:
        """Begin and end of the interval on the bar, percent."""
        if self.low is None or self.high is None:
            return 0.0, 0.0
        whole = self.span.total_seconds()
        low, high = ((at - timezone.now()).total_seconds() / whole * 100 for at in (self.low, self.high))
        return max(0.0, min(98.0, low)), max(2.0, min(100.0, high))


def when_of(user: User, job: Job, standing: Standing) -> When:
    """Three queries at most."""
    moves = moves_of(job)
    named = {one for move in moves for one in (*move.came, *move.went)}
    names = {row.public_id: row.name for row in jobs_for(user).filter(public_id__in=named)} if named else {}
    return When(
        standing.p10_at,
        standing.p50_at,
        standing.p90_at,
        standing.foreseen_at,
        measured(),
        why_none(job, standing),
        [(move, why(move, names)) for move in moves],
    )


def why(move: Move, names: dict[str, str]) -> list[str]:
    """How and why a forecast moved, in sentences; jobs the reader may not see are counted only."""
    if move.shift_s is None:
        return ["The first forecast."]
    sentences = [f"{duration(abs(move.shift_s))} {'later' if move.later else 'sooner'}."]
    if move.code_before is not None:
        sentences.append(f"What it waits for was {move.code_before} and is {move.forecast.code} now.")
    for jobs, what in ((move.came, "now ahead of it"), (move.went, "not ahead of it any more")):
        if jobs:
            sentences.append(f"{_jobs(jobs, names)} {'is' if len(jobs) == 1 else 'are'} {what}.")
    if len(sentences) == 1:
        sentences.append("Jobs that run now took another time than was expected.")
    return sentences


def _jobs(jobs: tuple[str, ...], names: dict[str, str]) -> str:
    known = [names[one] for one in jobs if one in names]
    others = len(jobs) - len(known)
    if others:
        known.append(plural(others, "job of another project,jobs of other projects"))
    return ", ".join(known)
