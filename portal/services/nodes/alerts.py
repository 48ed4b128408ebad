"""Raises and acknowledges alerts about GPUs, as nodes report them, and about invalid rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeVar

from django.db import transaction
from django.db.models import F, QuerySet
from django.utils import timezone
from django.utils.translation import gettext as _

from agents.xid_catalog import XidSeverity, xid_severity
from portal.access import require_admin
from portal.errors import Conflict
from portal.live_events import publish_on_commit
from portal.models import Gpu, GpuAlert, InvalidRow, Node, User
from portal.models.nodes.alerts import AlertKind
from portal.selectors.lookup import get_first
from portal.services.audit import record_action

AlertRow = TypeVar("AlertRow", GpuAlert, InvalidRow)

MAX_XID = 65_535
MAX_OPEN_ALERTS = 64
"""Maximum number of open alerts per node, so that one node cannot hide the alerts of others."""
MAX_REPEAT_COUNT = 1_000_000
"""Maximum number of repetitions accepted in one report."""


def record_xid(node_id: int, uuid: str, xid: int, count: int) -> None:
    """Record ``count`` XIDs of a node's GPU. Consequences for the GPU are part of its health."""
    if not 0 <= xid <= MAX_XID or count < 1:
        return
    with transaction.atomic():
        gpu = Gpu.objects.select_for_update(no_key=True).filter(uuid=uuid, node_id=node_id).first()
        if gpu is not None and _raise_alert(gpu, AlertKind.XID, code=xid, count=min(count, MAX_REPEAT_COUNT)):
            _announce(gpu)


def record_foreign_process(gpu: Gpu, process_owner: str) -> None:
    """Record the owner of a foreign process on a GPU (row locked); blank: there is none any more."""
    if process_owner:
        _raise_alert(gpu, AlertKind.FOREIGN, subject=process_owner)
    else:
        now = timezone.now()
        there = GpuAlert.objects.filter(gpu=gpu, kind=AlertKind.FOREIGN, resolved_at__isnull=True)
        there.update(resolved_at=now, last_at=now)
    _announce(gpu)


def record_claimed_gpus(node: Node, gpus: Sequence[Gpu]) -> None:
    """Record that a node (row locked) reports these GPUs of another node, and no others any more.

    The rows of the GPUs are not locked: one node must not be able to block others.
    """
    now = timezone.now()
    there = GpuAlert.objects.filter(claimant=node, acknowledged_at__isnull=True)
    known = {row.gpu_id: row for row in there}
    again = [known.pop(gpu.pk).pk for gpu in gpus if gpu.pk in known]
    GpuAlert.objects.filter(pk__in=again).update(
        last_at=now, repeat_count=F("repeat_count") + 1, resolved_at=None
    )
    GpuAlert.objects.filter(pk__in=[row.pk for row in known.values()], resolved_at__isnull=True).update(
        resolved_at=now
    )
    seen = {row.gpu_id for row in there}
    for gpu in [gpu for gpu in gpus if gpu.pk not in seen][: max(0, MAX_OPEN_ALERTS - len(seen))]:
        GpuAlert.objects.create(
            gpu=gpu, kind=AlertKind.CLAIMED, claimant=node, subject=node.name, first_at=now, last_at=now
        )
        _announce(gpu)


def do_acknowledge_alert(actor: User, public_id: str, note: str = "") -> GpuAlert:
    """Acknowledge an alert; the next occurrence raises a new one. The GPU's health is unchanged.

    Raise Conflict if it is acknowledged already.
    """
    require_admin(actor, "acknowledge alerts")
    with transaction.atomic():
        row = _acknowledge(GpuAlert.objects.select_related("gpu__node"), actor, public_id, note)
        what = {"gpu": row.gpu.uuid, "kind": row.kind, "code": row.code, "times": row.repeat_count}
        record_action(actor, "gpu.acknowledge", row.gpu.node, after=what, reason=row.note)
        _announce(row.gpu)
    return row


class InvalidRowReport(NamedTuple):
    """A row with an invalid value: its kind, id, column, and a message."""

    kind: str
    row: str
    field: str
    message: str


MAX_INVALID_ROWS = 1000
"""Maximum number of open alerts; further ones follow as these are resolved."""


def report_invalid_rows(reports: Sequence[InvalidRowReport]) -> None:
    """Raise an alert for each reported row without one, and resolve alerts of rows that are not reported."""
    now = timezone.now()
    wanted = {(each.kind, each.row[:200]): each for each in reports[:MAX_INVALID_ROWS]}
    with transaction.atomic():
        there = {
            (row.kind, row.row): row
            for row in InvalidRow.objects.select_for_update(of=("self",), no_key=True).filter(
                resolved_at__isnull=True
            )
        }
        over = [row.pk for key, row in there.items() if key not in wanted]
        InvalidRow.objects.filter(pk__in=over).update(resolved_at=now)
        for key, row in there.items():
            report = wanted.get(key)
            if report is not None and (row.field, row.message) != (report.field[:300], report.message[:1000]):
                row.field, row.message = report.field[:300], report.message[:1000]
                row.save(update_fields=["field", "message"])
        InvalidRow.objects.bulk_create(
            InvalidRow(
                kind=kind, row=row, field=report.field[:300], message=report.message[:1000], first_at=now
            )
            for (kind, row), report in wanted.items()
            if (kind, row) not in there
        )
        if over or wanted.keys() - there.keys():
            publish_on_commit("cluster", {"kind": "invalid_rows"})


def _acknowledge(rows: QuerySet[AlertRow], actor: User, public_id: str, note: str) -> AlertRow:
    """Mark an open alert as acknowledged, within a transaction. Raise NotFound or Conflict."""
    locked = rows.select_for_update(of=("self",), no_key=True).filter(public_id=public_id)
    row = get_first(locked, _("There is no such alert."))
    if row.acknowledged_at is not None:
        raise Conflict(_("It is already acknowledged."), code="acknowledged")
    row.acknowledged_at, row.acknowledged_by = timezone.now(), actor
    row.note = " ".join(note.split())[:500]
    row.save(update_fields=["acknowledged_at", "acknowledged_by", "note"])
    return row


def do_acknowledge_invalid_row(actor: User, public_id: str, note: str = "") -> InvalidRow:
    """Acknowledge the alert of an invalid row; it is resolved when the row is valid.

    Raise Conflict if it is acknowledged already.
    """
    require_admin(actor, "acknowledge alerts")
    with transaction.atomic():
        row = _acknowledge(InvalidRow.objects.all(), actor, public_id, note)
        what = {"kind": row.kind, "row": row.row, "field": row.field}
        record_action(actor, "invalid_row.acknowledge", row, after=what, reason=row.note)
        publish_on_commit("cluster", {"kind": "invalid_rows"})
    return row


def _raise_alert(gpu: Gpu, kind: AlertKind, *, code: int = 0, subject: str = "", count: int = 1) -> bool:
    """Count the occurrence in the open alert of a locked GPU, or create one.

    Return True if open pages should be updated.
    """
    now = timezone.now()
    row = GpuAlert.objects.filter(gpu=gpu, kind=kind, code=code, acknowledged_at__isnull=True).first()
    if row is None:
        opened = GpuAlert.objects.filter(gpu__node=gpu.node_id, acknowledged_at__isnull=True)
        if opened.count() >= MAX_OPEN_ALERTS:
            return False
        times = {"first_at": now, "last_at": now, "repeat_count": count}
        GpuAlert.objects.create(gpu=gpu, kind=kind, code=code, subject=subject[:200], **times)
        return kind is AlertKind.FOREIGN or xid_severity(code) is not XidSeverity.APPLICATION
    row.subject, row.last_at, row.resolved_at = subject[:200], now, None
    row.repeat_count += count
    row.save(update_fields=["subject", "last_at", "repeat_count", "resolved_at"])
    return False


def _announce(gpu: Gpu) -> None:
    publish_on_commit("cluster", {"kind": "gpu_alert", "uuid": gpu.uuid})
