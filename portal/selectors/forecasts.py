"""Reads when a job is expected to start, how that moved and why, and how often such forecasts hold."""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass
from itertools import zip_longest

from django.db.models import Avg, Count, Q
from django.utils import timezone

from portal.models import Forecast, Job, Standing
from portal.words.reasons import NO_FORECAST

DAYS = 30
MOVES_SHOWN = 20
NOMINAL_PERCENT = 80
"""Of a hundred intervals so many are meant to hold."""


@dataclass(frozen=True)
class Measured:
    """How the scored forecasts of the last days did; None where none was scored."""

    days: int
    scored: int
    inside: int
    mean_score_s: float | None
    """Winkler's interval score (alpha 0.2), seconds: less is better."""

    @property
    def coverage(self) -> float | None:
        """The part that held, 0 to 1."""
        return self.inside / self.scored if self.scored else None

    @property
    def percent(self) -> int | None:
        """The same in percent."""
        return None if self.coverage is None else round(100 * self.coverage)


@dataclass(frozen=True)
class Move:
    """One forecast of a job and how it differs from the one before; ``shift_s`` None on the first."""

    forecast: Forecast
    shift_s: float | None
    code_before: str | None
    """The verdict's code before, where it is another."""
    came: tuple[str, ...]
    """Jobs (public ids) that are ahead now and were not."""
    went: tuple[str, ...]
    """Jobs that were ahead and are not any more."""

    @property
    def later(self) -> bool:
        """The median moved away."""
        return (self.shift_s or 0) > 0


def why_none(job: Job, standing: Standing | None) -> str | None:
    """Why no start of a waiting job is foreseen, as a sentence; None: it is, or was not looked for yet."""
    if standing is None:
        return None
    sentence = NO_FORECAST.get(standing.code)
    if sentence is not None or standing.p50_at is not None:
        return sentence
    if not job.total_milli:
        return "It asks for no GPU, and forecasts tell when GPUs come free."
    if standing.foreseen_at is not None:
        return (
            "Waiting alone does not help it: even once everything that runs or goes before it has ended, it could "
            "not start. The verdict says what is in the way."
        )
    return None


def measured(days: int = DAYS) -> Measured:
    """One query."""
    since = timezone.now() - dt.timedelta(days=days)
    found = Forecast.objects.filter(inside__isnull=False, started_at__gte=since).aggregate(
        scored=Count("pk"), held=Count("pk", filter=Q(inside=True)), mean=Avg("score_s")
    )
    return Measured(days, found["scored"], found["held"], found["mean"])


def moves_of(job: Job) -> list[Move]:
    """The newest forecasts of a job, newest first, each beside the one before: one query."""
    rows = list(Forecast.objects.filter(job=job).order_by("-id")[: MOVES_SHOWN + 1])
    moves = [_move(row, older) for row, older in zip_longest(rows, rows[1:])]
    return moves[:MOVES_SHOWN]


def _move(row: Forecast, older: Forecast | None) -> Move:
    if older is None:
        return Move(row, None, None, (), ())
    return Move(
        row,
        (row.p50_at - older.p50_at).total_seconds(),
        older.code if older.code != row.code else None,
        tuple(one for one in row.ahead if one not in older.ahead),
        tuple(one for one in older.ahead if one not in row.ahead),
    )
