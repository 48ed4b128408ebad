"""Works out when waiting jobs should start, from how long jobs like those around them ran.

It runs beside the cycle, niced, with an end to its time: who was never foreseen first, then the oldest forecasts. It
writes nothing but intervals.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from django.db.models import F

from portal.models import ClusterSettings, Forecast, Job, Standing
from portal.words.states import JobState
from scheduler.core.cluster import JobId, PendingRow
from scheduler.core.decide import decide
from scheduler.core.forecast import Calibration, Interval, Outlook
from scheduler.core.plan import StartInterval
from scheduler.core.predict import Durations, Kind
from scheduler.forecasts import write_intervals
from scheduler.snapshot import Photo, take_photo

LEARNED_FROM = 5_000
"""So many of the jobs that ended last tell how long jobs run."""
CALIBRATED_FROM = 20_000
WITHIN_S = 20.0
"""One pass ends after this; who had no turn comes first in the next."""

_ENDS = (
    JobState.COMPLETED.value,
    JobState.FAILED.value,
    JobState.CANCELLED.value,
    JobState.TIMEOUT.value,
)


def foresee(within_s: float = WITHIN_S) -> int:
    """Writes the start intervals that are new or moved; gives their number."""
    deadline_s = time.monotonic() + within_s
    photo = take_photo(ClusterSettings.objects.get_or_create(id=1)[0])
    if photo.adopt_only or not photo.snapshot.pending:
        return 0
    return write_intervals(_intervals(photo, deadline_s))


def _intervals(photo: Photo, deadline_s: float) -> dict[JobId, StartInterval]:
    snapshot, policy = photo.snapshot, photo.policy
    plan = decide(snapshot, policy)
    waiting = {verdict.job for verdict in plan.verdicts}
    durations, calibration, templates = learned_durations(), learned_calibration(), _templates()
    outlooks = {
        pool.id: Outlook(snapshot, plan, pool.id, durations, policy, template_of=templates)
        for pool in snapshot.pools
    }
    found: dict[JobId, StartInterval] = {}
    for row in _in_turn(row for row in snapshot.pending if row.job in waiting and not row.held):
        if time.monotonic() > deadline_s:
            break
        if not row.total_milli or not row.pools or row.pools[0] not in outlooks:
            continue
        median_s = outlooks[row.pools[0]].median_s(row.job)
        interval = calibration.interval(row.total_milli, median_s)
        found[row.job] = _from(snapshot.now_s, interval, median_s)
    return found


def _in_turn(rows: Iterable[PendingRow]) -> list[PendingRow]:
    """Who was never foreseen first, then whose forecast is oldest."""
    foreseen = dict(
        Standing.objects.filter(foreseen_at__isnull=False).values_list("job__public_id", "foreseen_at")
    )
    known = {job: at.timestamp() for job, at in foreseen.items() if at is not None}
    return sorted(rows, key=lambda row: (known.get(row.job, 0.0), row.submitted_s, row.job))


def _from(now_s: float, interval: Interval, median_s: float) -> StartInterval:
    """Seconds from now as times, with what the plays said before any correction."""
    return StartInterval(
        now_s + interval.p10_s, now_s + interval.p50_s, now_s + interval.p90_s, played_s=median_s
    )


def learned_durations() -> Durations:
    """How long the jobs ran that ended last: from their start to their end, whoever ended them."""
    rows = (
        Job.objects.filter(state__in=_ENDS, started_at__isnull=False, ended_at__isnull=False)
        .order_by("-ended_at")
        .values_list(
            "project__public_id",
            "owner__public_id",
            "template__public_id",
            F("tasks") * F("gpus_per_task") * F("milli_per_gpu"),
            F("ended_at") - F("started_at"),
        )[:LEARNED_FROM]
    )
    durations = Durations()
    for project, user, template, milli, ran in reversed(rows):
        durations.learn(Kind(project, user, template, milli), ran.total_seconds())
    return durations


def learned_calibration() -> Calibration:
    """How waits came out against what was played, for the first forecast of each job that has started since."""
    rows = (
        Forecast.objects.filter(at_submit=True, inside__isnull=False, played_s__isnull=False)
        .order_by("-started_at")
        .values_list(
            F("job__tasks") * F("job__gpus_per_task") * F("job__milli_per_gpu"),
            "played_s",
            F("started_at") - F("made_at"),
        )[:CALIBRATED_FROM]
    )
    calibration = Calibration()
    for milli, played_s, waited in reversed(rows):
        calibration.learn(milli, played_s, waited.total_seconds())
    return calibration


def _templates() -> dict[JobId, str]:
    rows = Job.objects.filter(
        state__in=(JobState.PENDING.value, JobState.RUNNING.value), template__isnull=False
    )
    return {JobId(job): template for job, template in rows.values_list("public_id", "template__public_id")}
