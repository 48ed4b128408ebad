"""Reads how the scheduler does: its alarm, its newest cycles, and those that failed."""

from __future__ import annotations

from dataclasses import dataclass

from django.db.models import QuerySet

from portal.models import ClusterSettings, Cycle, FailedCycle


@dataclass(frozen=True)
class SchedulerHealth:
    """The alarm as it stands (empty: none) and the newest cycle that decided something."""

    alarm: ClusterSettings
    last_cycle: Cycle | None


def scheduler_alert() -> ClusterSettings:
    """The row that holds the alarm: one query."""
    return (
        ClusterSettings.objects.only("scheduler_alert", "scheduler_alert_at").filter(id=1).first()
        or ClusterSettings()
    )


def scheduler_health() -> SchedulerHealth:
    """Two queries."""
    return SchedulerHealth(scheduler_alert(), latest_cycles(1)[0] if Cycle.objects.exists() else None)


def latest_cycles(number: int) -> list[Cycle]:
    """The newest cycles without their receipts, newest first."""
    return list(Cycle.objects.defer("fair_share_breakdown").order_by("-id")[:number])


def failed_cycles() -> QuerySet[FailedCycle]:
    """Cycles that decided nothing, newest first, without what they had to decide on."""
    return FailedCycle.objects.defer("content").order_by("-id")
