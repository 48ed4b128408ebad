"""Reads the scheduler's status: its alert, its newest cycles, failed cycles, and whether cycles end."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

from django.db import DatabaseError, connection
from django.db.models import QuerySet

from portal.domain.scheduling.cycle_metrics import CYCLE_EVERY_S
from portal.models import ClusterSettings, Cycle, FailedCycle

MISSED_CYCLES = 6
"""Intervals without the end of a cycle after which the scheduler is reported as stopped."""
SLOW_FACTOR = 3
"""The limit allows for a cycle this many times as long as the longest of the latest ones."""
LATEST_CYCLES = 20


@dataclass(frozen=True)
class SchedulerHealth:
    """The present alert (blank: none) and the newest cycle."""

    cluster: ClusterSettings
    last_cycle: Cycle | None


def scheduler_alert() -> ClusterSettings:
    """Return the row that holds the alert, in one query."""
    rows = ClusterSettings.objects.only("scheduler_alert", "scheduler_alert_at")
    return rows.filter(id=1).first() or ClusterSettings()


def scheduler_health() -> SchedulerHealth:
    return SchedulerHealth(scheduler_alert(), next(iter(latest_cycles(1)), None))


def latest_cycles(number: int) -> list[Cycle]:
    """Return the newest cycles, newest first, without their fair-share breakdowns."""
    return list(Cycle.objects.defer("fair_share_breakdown").order_by("-id")[:number])


def failed_cycles() -> QuerySet[FailedCycle]:
    """Return failed cycles, newest first, without their input."""
    return FailedCycle.objects.defer("content").order_by("-id")


@dataclass(frozen=True)
class CycleStatus:
    """Seconds since a cycle last ended with a decision, the limit, and whether cycles end with errors."""

    age_s: float
    limit_s: float
    failing: bool

    @property
    def ok(self) -> bool:
        return self.age_s <= self.limit_s

    @property
    def reason(self) -> str:
        """Return why the scheduler is not ok; blank if it is. Names no row: everybody may read it."""
        if self.ok:
            return ""
        which = "every cycle fails" if self.failing else "worker-cycle has stopped, hangs or gets no messages"
        return f"No scheduling cycle has ended for {self.age_s:.0f} s, the limit is {self.limit_s:.0f} s: {which}."


class CycleWatch:
    """How long no cycle has ended, as one process sees it; thread-safe.

    A clock that is set changes nothing: a new row ended between this look and the one before. The time
    before this process started, and that without the database, does not count.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._newest_id: int | None = None
        self._ended_s = self._looked_s = time.monotonic()

    def observe(self) -> CycleStatus:
        """Run three queries. Raise DatabaseError without an answer."""
        with self._lock:
            try:
                return self._observe()
            except DatabaseError:
                self._pause()
                raise

    def pause(self) -> None:
        """Record that the database does not answer: no cycle can end meanwhile."""
        with self._lock:
            self._pause()

    def _pause(self) -> None:
        self._ended_s = self._looked_s = time.monotonic()

    def _observe(self) -> CycleStatus:
        cycles = latest_cycles(LATEST_CYCLES)
        failing = bool(scheduler_alert().scheduler_alert)
        with connection.cursor() as cursor:
            cursor.execute(
                "SELECT extract(epoch FROM clock_timestamp()),"
                " extract(epoch FROM clock_timestamp() - pg_postmaster_start_time())"
            )
            database_now_s, database_up_s = map(float, cursor.fetchone())
        now_s = time.monotonic()
        newest = next(iter(cycles), None)
        if newest is not None and newest.pk != self._newest_id:
            age_s = database_now_s - newest.started_at.timestamp() - newest.seconds
            self._ended_s = now_s - min(max(0.0, age_s), now_s - self._looked_s)
            self._newest_id = newest.pk
        self._looked_s = now_s
        longest_s = max((cycle.seconds for cycle in cycles), default=0.0)
        return CycleStatus(
            min(now_s - self._ended_s, max(0.0, database_up_s)),
            MISSED_CYCLES * CYCLE_EVERY_S + SLOW_FACTOR * longest_s,
            failing,
        )


CYCLE_WATCH = CycleWatch()
