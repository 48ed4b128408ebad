"""Alerts about GPUs and invalid rows: open and recently acknowledged ones."""

from __future__ import annotations

from dataclasses import dataclass

from django.db.models import Q, QuerySet
from django.utils.translation import gettext as _
from django.utils.translation import gettext_noop

from agents.node.gpus.health import APPLICATION_XIDS
from agents.xid_catalog import XidSeverity, xid_meaning, xid_severity
from portal.models import GpuAlert, InvalidRow, Node
from portal.models.nodes.alerts import AlertKind

_KIND_NAMES = {
    AlertKind.FOREIGN: gettext_noop("Foreign process"),
    AlertKind.CLAIMED: gettext_noop("Reported by two nodes"),
}
_IS_APPLICATION_XID = Q(kind=AlertKind.XID, code__in=APPLICATION_XIDS)


@dataclass(frozen=True)
class AlertView:
    row: GpuAlert

    @property
    def severity(self) -> str:
        """fatal, quarantine, warning or program for an XID; otherwise the alert's kind."""
        return xid_severity(self.row.code).value if self.row.kind == AlertKind.XID else self.row.kind

    @property
    def name(self) -> str:
        """Such as XID 79."""
        kind = AlertKind(self.row.kind)
        return f"XID {self.row.code}" if kind is AlertKind.XID else _(_KIND_NAMES[kind])

    @property
    def meaning(self) -> str:
        """What the code means, or the owner of the process."""
        if self.row.kind == AlertKind.CLAIMED:
            return _("{subject} reports the same GPU").format(subject=self.row.subject)
        return xid_meaning(self.row.code) if self.row.kind == AlertKind.XID else self.row.subject

    @property
    def needs_attention(self) -> bool:
        """False for XIDs that applications cause."""
        return self.severity != XidSeverity.APPLICATION.value


def alerts(*, acknowledged: bool | None = False) -> QuerySet[GpuAlert]:
    """Return alerts with GPU and node, newest first; ``acknowledged`` None returns both kinds."""
    rows = GpuAlert.objects.select_related("gpu__node", "claimant", "acknowledged_by").order_by("-id")
    return rows if acknowledged is None else rows.filter(acknowledged_at__isnull=not acknowledged)


def claimed_gpu_alerts(node: Node) -> list[GpuAlert]:
    """Return the GPUs that the node reports but that belong to another node, so that it cannot use them."""
    rows = GpuAlert.objects.filter(claimant=node, resolved_at__isnull=True, acknowledged_at__isnull=True)
    return list(rows.select_related("gpu__node").order_by("gpu__uuid"))


def open_alert_count() -> int:
    """Return the number of unacknowledged alerts, without application-caused XIDs."""
    of_gpus = GpuAlert.objects.filter(acknowledged_at__isnull=True).exclude(_IS_APPLICATION_XID).order_by()
    of_rows = invalid_rows().filter(acknowledged_at__isnull=True).order_by()
    return of_gpus.values("pk").union(of_rows.values("pk"), all=True).count()


def invalid_rows(*, resolved: bool = False) -> QuerySet[InvalidRow]:
    """Return the rows that the scheduler excludes, newest first, or with ``resolved`` those valid again."""
    rows = InvalidRow.objects.select_related("acknowledged_by").order_by("-id")
    return rows.filter(resolved_at__isnull=not resolved)
