"""Reads the scheduler's status: its alert, its newest cycles, and failed cycles."""

from __future__ import annotations

from dataclasses import dataclass

from django.db.models import QuerySet

from portal.models import ClusterSettings, Cycle, FailedCycle


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
