"""Reads how the scheduler does: its alarm, its newest cycles, and those that failed."""

from __future__ import annotations

from dataclasses import dataclass

from django.db.models import QuerySet

from portal.models import ClusterSettings, Cycle, FailedCycle


@dataclass(frozen=True)
class Health:
    """The alarm as it stands (empty: none) and the newest cycle that decided something."""

    alarm: ClusterSettings
    last: Cycle | None


def alarm() -> ClusterSettings:
    """The row that holds the alarm: one query."""
    return ClusterSettings.objects.only("alarm", "alarm_at").filter(id=1).first() or ClusterSettings()


def health() -> Health:
    """Two queries."""
    return Health(alarm(), newest_cycles(1)[0] if Cycle.objects.exists() else None)


def newest_cycles(number: int) -> list[Cycle]:
    """The newest cycles without their receipts, newest first."""
    return list(Cycle.objects.defer("receipts").order_by("-id")[:number])


def failed_cycles() -> QuerySet[FailedCycle]:
    """Cycles that decided nothing, newest first, without what they had to decide on."""
    return FailedCycle.objects.defer("content").order_by("-id")
