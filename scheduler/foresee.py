"""Works out when waiting jobs should start, from how long jobs like those around them ran.

It runs beside the cycle, niced, with an end to its time: who was never foreseen first, then the oldest forecasts. It
writes nothing but intervals.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

from django.db.models import F

from portal.models import ClusterSettings, Forecast, Standing
from portal.words.reasons import NO_FORECAST
from scheduler.core.calibration import REMEMBERED, Calibration, Interval
from scheduler.core.cluster import JobId, PendingRow
from scheduler.core.decide import decide
from scheduler.core.forecast import Outlook, waits_in
from scheduler.core.plan import StartInterval
from scheduler.expectations import Expectations
from scheduler.forecasts import NoStart, Start, write_intervals
from scheduler.snapshot import Photo, take_photo

WITHIN_S = 20.0
"""One pass ends after this; who had no turn comes first in the next."""


class Foresight:
    """What is kept from pass to pass; losing it costs a slow pass, and perhaps jobs looked at twice in a row."""

    def __init__(self) -> None:
        self.expectations = Expectations()
        self.looked_s: dict[JobId, float] = {}
        """When the start of a job was last worked out, moved or not: Unix time."""


def foresee(within_s: float = WITHIN_S, kept: Foresight | None = None) -> int:
    """Writes the start intervals that are new or moved; gives their number.

    Without what is ``kept`` from pass to pass everything is learned anew.
    """
    deadline_s = time.monotonic() + within_s
    photo = take_photo(ClusterSettings.objects.get_or_create(id=1)[0])
    if photo.adopt_only or not photo.pending_rows:
        return 0
    return write_intervals(_intervals(photo, kept or Foresight(), deadline_s))


def _intervals(photo: Photo, kept: Foresight, deadline_s: float) -> dict[JobId, Start]:
    policy, expectations = photo.policy, kept.expectations
    snapshot = expectations.fill(photo.snapshot, policy)
    plan = decide(snapshot, policy)
    waiting = {verdict.job: verdict for verdict in plan.verdicts}
    calibration = learned_calibration()
    outlooks = {
        pool.id: Outlook(
            snapshot, plan, pool.id, expectations.durations, policy, template_of=expectations.template_of
        )
        for pool in snapshot.pools
    }
    rows = [row for row in snapshot.pending if row.job in waiting and row.job in photo.pending_rows]
    # when a job's turn comes that waits for others depends on how they end: nothing is promised before
    found: dict[JobId, Start] = {
        row.job: NoStart.UNASKED
        for row in rows
        if waiting[row.job].code in NO_FORECAST or row.held or row.after
    }
    asks = [row for row in rows if row.job not in found and row.total_milli]
    turns = in_turn(asks, kept.looked_s)
    kept.looked_s = {row.job: kept.looked_s[row.job] for row in asks if row.job in kept.looked_s}
    for row in turns:
        if time.monotonic() > deadline_s:
            break
        kept.looked_s[row.job] = time.time()
        pool = waits_in(row, waiting[row.job])
        if pool is None:
            continue
        median_s = outlooks[pool].median_s(row.job)
        if median_s is None:
            found[row.job] = NoStart.UNSEEN
        else:
            interval = calibration.interval(row.total_milli, median_s)
            found[row.job] = _from(snapshot.now_s, interval, median_s, row.not_before_s or 0.0)
    return found


def in_turn(rows: Iterable[PendingRow], looked_s: Mapping[JobId, float]) -> list[PendingRow]:
    """Who was never foreseen first, then who was looked at longest ago, also where nothing moved then."""
    foreseen = dict(
        Standing.objects.filter(foreseen_at__isnull=False).values_list("job__public_id", "foreseen_at")
    )
    known = {JobId(job): at.timestamp() for job, at in foreseen.items() if at is not None}

    def turn(row: PendingRow) -> tuple[float, float, JobId]:
        return (max(known.get(row.job, 0.0), looked_s.get(row.job, 0.0)), row.submitted_s, row.job)

    return sorted(rows, key=turn)


def _from(now_s: float, interval: Interval, median_s: float, not_before_s: float) -> StartInterval:
    """Seconds from now as times, none before it may start, with what the plays said before any correction."""
    p10_s, p50_s, p90_s = (
        max(not_before_s, now_s + s) for s in (interval.p10_s, interval.p50_s, interval.p90_s)
    )
    return StartInterval(p10_s, p50_s, p90_s, played_s=median_s)


def learned_calibration() -> Calibration:
    """How waits came out against what was played, for the first forecast of each job that has started since."""
    rows = (
        Forecast.objects.filter(at_submit=True, inside__isnull=False, played_s__isnull=False)
        .order_by("-started_at")
        .values_list(
            F("job__tasks") * F("job__gpus_per_task") * F("job__milli_per_gpu"),
            "made_at",
            "played_s",
            F("started_at") - F("made_at"),
        )[:REMEMBERED]
    )
    calibration = Calibration()
    for milli, made_at, played_s, waited in reversed(rows):
        calibration.learn(milli, made_at.timestamp(), played_s, waited.total_seconds())
    return calibration
