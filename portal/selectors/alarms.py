"""Alarms about GPUs and invalid rows: open ones, and those that were acknowledged recently."""

from __future__ import annotations

from dataclasses import dataclass

from django.db.models import Q, QuerySet

from agents.node.gpus.health import OF_PROGRAMS
from agents.xids import Grade, grade, meaning
from portal.models import GpuAlarm, InvalidRow, Node
from portal.models.alarms import AlarmKind

_NAMES = {AlarmKind.FOREIGN: "Foreign program", AlarmKind.CLAIMED: "Reported by two nodes"}
_OF_PROGRAMS = Q(kind=AlarmKind.XID, code__in=OF_PROGRAMS)


@dataclass(frozen=True)
class Alarm:
    """One alarm, with what its code means."""

    row: GpuAlarm

    @property
    def grade(self) -> str:
        """How grave: fatal, quarantine, warning; program for what is told but no alarm; else its kind."""
        return grade(self.row.code).value if self.row.kind == AlarmKind.XID else self.row.kind

    @property
    def name(self) -> str:
        """Such as XID 79."""
        return f"XID {self.row.code}" if self.row.kind == AlarmKind.XID else _NAMES[AlarmKind(self.row.kind)]

    @property
    def meaning(self) -> str:
        """What it means, or whose program it is."""
        if self.row.kind == AlarmKind.CLAIMED:
            return f"{self.row.who} reports the same GPU"
        return meaning(self.row.code) if self.row.kind == AlarmKind.XID else self.row.who

    @property
    def is_alarm(self) -> bool:
        """False for what programs cause."""
        return self.grade != Grade.PROGRAM.value


def alarms(*, acknowledged: bool | None = False) -> QuerySet[GpuAlarm]:
    """Alarms with GPU and node, newest first. ``acknowledged`` None gives both kinds."""
    rows = GpuAlarm.objects.select_related("gpu__node", "claimant", "acknowledged_by").order_by("-id")
    return rows if acknowledged is None else rows.filter(acknowledged_at__isnull=not acknowledged)


def claims_of(node: Node) -> list[GpuAlarm]:
    """The GPUs that a node names and that are another's, so that it cannot use them."""
    rows = GpuAlarm.objects.filter(claimant=node, over_at__isnull=True, acknowledged_at__isnull=True)
    return list(rows.select_related("gpu__node").order_by("gpu__uuid"))


def open_alarms() -> int:
    """How many wait for somebody to look; what programs cause does not count."""
    of_gpus = GpuAlarm.objects.filter(acknowledged_at__isnull=True).exclude(_OF_PROGRAMS).order_by()
    of_rows = invalid_rows().filter(acknowledged_at__isnull=True).order_by()
    return of_gpus.values("pk").union(of_rows.values("pk"), all=True).count()


def invalid_rows(*, over: bool = False) -> QuerySet[InvalidRow]:
    """Rows that the scheduler leaves out, newest first; with ``over`` those that are valid again."""
    rows = InvalidRow.objects.select_related("acknowledged_by").order_by("-id")
    return rows.filter(over_at__isnull=not over)
