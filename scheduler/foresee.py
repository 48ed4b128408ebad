"""Works out when waiting jobs should start, from how long jobs like those around them ran.

It runs beside the cycle, niced, with an end to its time: pools that were played longest ago come first, and with each
everybody who waits there. It writes nothing but intervals.
"""

from __future__ import annotations

import math
import time
from dataclasses import replace

from django.db.models import F

from portal.models import ClusterSettings, Forecast
from portal.words.reasons import NO_FORECAST
from scheduler.core.calibration import REMEMBERED, Calibration, Interval
from scheduler.core.cluster import JobId, PendingRow, PoolId
from scheduler.core.decide import decide
from scheduler.core.forecast import Outlook, waits_in
from scheduler.core.plan import StartInterval
from scheduler.expectations import Expectations
from scheduler.forecasts import NoStart, Start, write_intervals
from scheduler.isolation import use_valid_rows
from scheduler.snapshot import Photo, take_photo

WITHIN_S = 20.0
"""After this no second pool is begun with; who was left out comes first in the next pass."""


class Foresight:
    """What is kept from pass to pass; losing it costs a slow pass, and perhaps a pool played twice in a row."""

    def __init__(self) -> None:
        self.expectations = Expectations()
        self.passes = 0
        self.played: dict[PoolId, int] = {}
        """In which pass each pool was last played."""


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
    plan, photo = use_valid_rows(
        replace(photo, snapshot=expectations.fill(photo.snapshot, policy)),
        lambda snapshot: decide(snapshot, policy),
    )
    snapshot = photo.snapshot
    verdicts = {verdict.job: verdict for verdict in plan.verdicts}
    calibration = learned_calibration()
    found: dict[JobId, Start] = {verdict.job: NoStart.UNASKED for verdict in photo.left_out}
    waiting: dict[PoolId, list[PendingRow]] = {}
    for row in snapshot.pending:
        if (verdict := verdicts.get(row.job)) is None or row.job not in photo.pending_rows:
            continue
        if verdict.code in NO_FORECAST or row.held or row.after:
            # when a job's turn comes that waits for others depends on how they end: nothing is promised before
            found[row.job] = NoStart.UNASKED
        elif row.total_milli and (pool := waits_in(row, verdict)) is not None:
            waiting.setdefault(pool, []).append(row)
    kept.passes += 1
    kept.played = {pool: kept.played.get(pool, 0) for pool in waiting}
    for place, pool in enumerate(sorted(waiting, key=lambda pool: (kept.played[pool], pool))):
        if place and time.monotonic() > deadline_s:
            break
        kept.played[pool] = kept.passes
        outlook = Outlook(
            snapshot, plan, pool, expectations.durations, policy, template_of=expectations.template_of
        )
        medians_s = outlook.medians_s(row.job for row in waiting[pool])
        for row in waiting[pool]:
            median_s = medians_s.get(row.job)
            if median_s is None:
                found[row.job] = NoStart.TOO_FAR
            elif median_s == math.inf:
                found[row.job] = NoStart.UNSEEN
            else:
                interval = calibration.interval(row.total_milli, median_s)
                found[row.job] = _from(snapshot.now_s, interval, median_s, row.not_before_s or 0.0)
    return found


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
