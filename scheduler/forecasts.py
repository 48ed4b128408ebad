"""Keeps when waiting jobs are expected to start, and holds the first forecast of each against what came.

Intervals come with the verdicts of a cycle, or from whoever else works them out; a new one is written for a job
that has none, and when its median moved by more than a fifth of what was left to wait. What was promised of a job is
taken back when nothing can be promised any more.
"""

from __future__ import annotations

import datetime as dt
import logging
from collections.abc import Mapping
from enum import Enum

from django.db import transaction
from django.db.models import F
from django.utils import timezone

from portal.events import announce
from portal.models import Forecast, Job, Standing
from scheduler import leases
from scheduler.core.calibration import SCORED_FROM_S, interval_score
from scheduler.core.cluster import JobId
from scheduler.core.plan import StartInterval
from scheduler.leases import Held

log = logging.getLogger(__name__)

MOVED_BY = 0.2
LEAST_MOVE_S = 60.0
NEW_AT_ONCE = 2_000
"""Of jobs that had no interval, or have none any more, so many are written at once."""
MOVED_AT_ONCE = 500
"""Of intervals that moved so many are written at once; each makes a row that is kept."""
LOCKED_AT_ONCE = 500
"""So many share a transaction: cycles write the same rows."""
TOLD_AT_ONCE = 200
"""Open pages are told of at most this many new intervals of a transaction; the others poll."""
FORECASTS_KEPT = dt.timedelta(days=90)
SCORED_AT_ONCE = 2000
_INTERVAL = ("foreseen_at", "p10_at", "p50_at", "p90_at")


class NoStart(Enum):
    """Why nothing is promised of a waiting job."""

    UNASKED = "unasked"
    """Its verdict is one after which nobody asks (``NO_FORECAST``)."""
    UNSEEN = "unseen"
    """It was looked for, and there is none even when everything that runs or goes before has ended."""
    TOO_FAR = "too far"
    """So many go before it that the plays did not come to it."""


Start = StartInterval | NoStart
"""What is foreseen of a waiting job."""


def write_intervals(intervals: Mapping[JobId, Start], leader: Held | None = None) -> int:
    """Writes what is new or moved, for jobs that have a verdict; gives the number of intervals written.

    Of more than are written at once those come first that were foreseen longest ago; the others have their turn
    next time, if they still differ then. With ``leader`` it raises Deposed when that scheduler has been replaced.
    """
    sound = {job: start for job, start in intervals.items() if isinstance(start, NoStart) or is_sound(start)}
    if unsound := len(intervals) - len(sound):
        log.warning("%s start intervals make no sense and were dropped", unsound)
    jobs = _moved_jobs(sound)
    written = 0
    for first in range(0, len(jobs), LOCKED_AT_ONCE):
        written += _write({job: sound[job] for job in jobs[first : first + LOCKED_AT_ONCE]}, leader)
    return written


def _write(intervals: Mapping[JobId, Start], leader: Held | None) -> int:
    """One transaction."""
    now = timezone.now()
    with transaction.atomic():
        if leader is not None:
            leases.check(leader)
        rows = Standing.objects.select_for_update(of=("self",), no_key=True).select_related("job")
        moved = list(rows.filter(job__public_id__in=intervals).order_by("job_id"))
        first = _never_foreseen([row.job_id for row in moved if row.p50_at is None])
        made = []
        for row in moved:
            interval = intervals[JobId(row.job.public_id)]
            row.foreseen_at = None if interval in (NoStart.UNASKED, NoStart.TOO_FAR) else now
            if isinstance(interval, NoStart):
                row.p10_at = row.p50_at = row.p90_at = None
                continue
            row.p10_at, row.p50_at, row.p90_at = map(_at, (interval.p10_s, interval.p50_s, interval.p90_s))
            made.append(
                Forecast(
                    job_id=row.job_id,
                    made_at=now,
                    at_submit=row.job_id in first,
                    p10_at=row.p10_at,
                    p50_at=row.p50_at,
                    p90_at=row.p90_at,
                    played_s=interval.played_s,
                    code=row.code,
                    ahead=row.ahead,
                )
            )
        for row in moved[:TOLD_AT_ONCE]:
            announce(f"job.{row.job.public_id}", {"kind": "forecast"})
        Standing.objects.bulk_update(moved, _INTERVAL)
        Forecast.objects.bulk_create(made)
    return len(made)


def is_sound(interval: StartInterval) -> bool:
    """True when the three times are in order, and times at all: between 2001 and 2286."""
    return 1e9 <= interval.p10_s <= interval.p50_s <= interval.p90_s < 1e10


def has_moved(middle: dt.datetime | None, foreseen_at: dt.datetime | None, interval: Start) -> bool:
    """True when the median is new, or moved by more than a fifth of the wait that was foreseen (1 min at least)."""
    if isinstance(interval, NoStart):
        return middle is not None or (foreseen_at is None) is (interval is NoStart.UNSEEN)
    if middle is None or foreseen_at is None:
        return True
    foreseen_s = (middle - foreseen_at).total_seconds()
    shift_s = abs(interval.p50_s - middle.timestamp())
    return shift_s > max(LEAST_MOVE_S, MOVED_BY * foreseen_s)


def _moved_jobs(intervals: Mapping[JobId, Start]) -> list[JobId]:
    """The jobs (public ids) with a verdict of which something new is to be written now: at most one query."""
    if not intervals:
        return []
    rows = Standing.objects.filter(job__public_id__in=list(intervals))
    new: list[JobId] = []
    moved: list[JobId] = []
    for public_id, middle, foreseen_at in rows.order_by(
        F("foreseen_at").asc(nulls_first=True), "job_id"
    ).values_list("job__public_id", "p50_at", "foreseen_at"):
        start = intervals[job := JobId(public_id)]
        if has_moved(middle, foreseen_at, start):
            (new if middle is None or isinstance(start, NoStart) else moved).append(job)
    return new[:NEW_AT_ONCE] + moved[:MOVED_AT_ONCE]


def score_started() -> int:
    """Scores the first forecast of each job that has started since; gives their number."""
    rows = (
        Forecast.objects.filter(at_submit=True, started_at__isnull=True, job__started_at__isnull=False)
        .annotate(job_started=F("job__started_at"), job_submitted=F("job__submitted_at"))
        .order_by("id")[:SCORED_AT_ONCE]
    )
    with transaction.atomic():
        scored = list(rows.select_for_update(of=("self",), no_key=True, skip_locked=True))
        for row in scored:
            row.started_at = row.job_started
            if (row.job_started - row.job_submitted).total_seconds() >= SCORED_FROM_S:
                row.inside = row.p10_at <= row.job_started <= row.p90_at
                row.score_s = interval_score(
                    row.p10_at.timestamp(), row.p90_at.timestamp(), row.job_started.timestamp()
                )
        Forecast.objects.bulk_update(scored, ["started_at", "inside", "score_s"], batch_size=1000)
    return len(scored)


def _never_foreseen(jobs: list[int]) -> set[int]:
    """Of these jobs (row numbers) those that never started and have no forecast yet."""
    rows = Job.objects.filter(pk__in=jobs, started_at__isnull=True).exclude(forecasts__at_submit=True)
    return set(rows.values_list("pk", flat=True))


def _at(seconds: float) -> dt.datetime:
    return dt.datetime.fromtimestamp(seconds, dt.UTC)
