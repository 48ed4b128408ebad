"""Runs the replays of history with other quotas that users asked for, one at a time, in a thread of worker-replay."""

from __future__ import annotations

import datetime as dt
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

from django.db import connection, transaction
from django.db.models import Q
from django.db.models.functions import Now
from django.utils import timezone

from portal.database.pool_middleware import release_connection
from portal.models import Attempt, ClusterSettings, QuotaReplay
from scheduler.core.forecast.quota_effect import replace_quotas
from scheduler.core.model.snapshot import PoolId
from scheduler.replay.history import HistoryJob, fairness, replay_history
from scheduler.snapshot.decision_input import DecisionInput, take_snapshot
from scheduler.snapshot.pending import build_placeable_row, fetch_columns
from scheduler.what_if import quota_rows

log = logging.getLogger(__name__)

PERIOD = dt.timedelta(days=30)
MAX_JOBS = 20_000
"""Of more jobs the newest are replayed, in a shorter period."""
TIME_LIMIT_S = 300.0
CLAIM_S = 60
PROGRESS_EVERY_S = 1.0
MAX_ATTEMPTS = 3

_lock = threading.Lock()


class ReplayEndedError(Exception):
    """The replay cannot be finished; the text is for the user."""


def start_replays() -> None:
    """Run open replays in a thread of its own, unless this process does so now: forecasts are not delayed."""
    if _lock.acquire(blocking=False):
        threading.Thread(target=_run_and_unlock, name="replays", daemon=True).start()


def _run_and_unlock() -> None:
    try:
        while run_next_replay():
            pass
    except Exception:
        log.exception("a replay failed; it is tried again in %s s", CLAIM_S)
    finally:
        connection.close()
        _lock.release()


def run_next_replay() -> bool:
    """Run the oldest open replay that no other process runs. Return False if there is none."""
    with transaction.atomic():
        free = Q(claimed_until__isnull=True) | Q(claimed_until__lte=Now())
        rows = QuotaReplay.objects.filter(free, finished_at__isnull=True).select_related("pool")
        row = rows.select_for_update(of=("self",), skip_locked=True).order_by("id").first()
        if row is None:
            return False
        row.attempt_count += 1
        row.save(update_fields=["attempt_count"])
        _claim(row, row.progress_percent)
    try:
        if row.attempt_count > MAX_ATTEMPTS:
            raise ReplayEndedError(f"It was begun {MAX_ATTEMPTS} times without an end.")
        values: dict[str, Any] = {"result": _replay(row), "progress_percent": 100}
    except ReplayEndedError as error:
        values = {"error": str(error)}
    _claimed(row).update(finished_at=Now(), claimed_until=None, **values)
    return True


def _claimed(row: QuotaReplay) -> Any:
    return QuotaReplay.objects.filter(pk=row.pk, attempt_count=row.attempt_count, finished_at__isnull=True)


def _claim(row: QuotaReplay, percent: int) -> None:
    until = Now() + dt.timedelta(seconds=CLAIM_S)
    if not _claimed(row).update(claimed_until=until, progress_percent=percent):
        raise ReplayEndedError("Another worker took it over.")


def _replay(row: QuotaReplay) -> dict[str, Any]:
    inputs = take_snapshot(ClusterSettings.objects.get_or_create(id=1)[0])
    pool, end = PoolId(row.pool.public_id), timezone.now()
    begin, jobs, left_out = _recorded_jobs(inputs, row, end)
    if not jobs:
        raise ReplayEndedError(f"No job has run in {row.pool.name} in the last {PERIOD.days} days.")
    period_s = begin.timestamp(), end.timestamp()
    snapshot = inputs.snapshot
    changed = replace_quotas(snapshot, quota_rows(row.quotas))
    before = replay_history(snapshot, inputs.policy, pool, jobs, period_s, _reporter(row, 0))
    after = replay_history(changed, inputs.policy, pool, jobs, period_s, _reporter(row, 50))
    return {
        "begin": begin.isoformat(),
        "end": end.isoformat(),
        "jobs": len(jobs),
        "left_out": left_out,
        "fairness": {"before": fairness(before), "after": fairness(after)},
        "projects": [
            {"project": name, "before": asdict(before[name]), "after": asdict(after[name])} for name in before
        ],
    }


def _reporter(row: QuotaReplay, from_percent: int) -> Callable[[float], None]:
    """Return the function that stores the progress of one of the two replays, and ends it when it takes too long."""
    began_s = time.monotonic()
    stored_s = 0.0

    def report(done: float) -> None:
        nonlocal stored_s
        now_s = time.monotonic()
        if now_s > began_s + TIME_LIMIT_S / 2:
            percent = from_percent + int(50 * done)
            raise ReplayEndedError(f"It was ended after {TIME_LIMIT_S / 60:.0f} min, {percent} % done.")
        if now_s > stored_s + PROGRESS_EVERY_S:
            stored_s = now_s
            _claim(row, from_percent + int(50 * done))
            release_connection()

    return report


def _recorded_jobs(
    inputs: DecisionInput, row: QuotaReplay, end: dt.datetime
) -> tuple[dt.datetime, list[HistoryJob], int]:
    """Return the begin of the period, the jobs that ran in it by submission, and the number of those left out."""
    begin = end - PERIOD
    ran_s: Counter[int] = Counter()
    attempts = Attempt.objects.filter(Q(ended_at__isnull=True) | Q(ended_at__gt=begin), pool=row.pool)
    for job, started, ended in attempts.values_list("job_id", "created_at", "ended_at"):
        ran_s[job] += int((min(ended or end, end) - max(started, begin)).total_seconds())
    newest = sorted(ran_s, reverse=True)[:MAX_JOBS]
    columns = dict(fetch_columns(newest))
    if len(ran_s) > len(newest):
        first_s = min(each["submitted_s"] for each in columns.values())
        begin = max(begin, dt.datetime.fromtimestamp(first_s, dt.UTC))
    jobs, left_out = [], 0
    for job in newest:
        try:
            request = build_placeable_row(
                columns[job], (PoolId(row.pool.public_id),), inputs.ineligible, [], inputs.home_nodes
            )
        except (KeyError, TypeError, ValueError) as error:
            log.warning("job %s is left out of a replay: %s", job, error)
            left_out += 1
            continue
        if request.task_requests or not request.total_milli or ran_s[job] < 1:
            left_out += 1
            continue
        submitted_s = max(request.submitted_s, begin.timestamp())
        jobs.append(HistoryJob(replace(request, submitted_s=submitted_s), ran_s[job]))
    jobs.sort(key=lambda each: (each.row.submitted_s, each.row.job))
    return begin, jobs, left_out
