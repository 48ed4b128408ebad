"""Alarms: about GPUs as nodes report them, and about invalid rows that the scheduler left out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeVar

from django.db import transaction
from django.db.models import F, QuerySet
from django.utils import timezone

from agents.xid_catalog import XidSeverity, xid_severity
from portal.access import require_admin
from portal.errors import Conflict, NotFound
from portal.live_events import publish_on_commit
from portal.models import Gpu, GpuAlert, InvalidRow, Node, User
from portal.models.alerts import AlertKind
from portal.services.audit import record_action

AlertRow = TypeVar("AlertRow", GpuAlert, InvalidRow)

MAX_XID = 65_535
MAX_OPEN_ALERTS = 64
"""Open alarms of one node: more would only hide those of others."""
MAX_REPEAT_COUNT = 1_000_000
"""So many times at most are counted of one word of a node."""


def record_xid(node_id: int, uuid: str, xid: int, count: int) -> None:
    """A node's driver told an XID for one of its GPUs, so many times; what follows for the GPU is its health's."""
    if not 0 <= xid <= MAX_XID or count < 1:
        return
    with transaction.atomic():
        gpu = Gpu.objects.select_for_update(no_key=True).filter(uuid=uuid, node_id=node_id).first()
        if gpu is not None and _raise_alert(gpu, AlertKind.XID, code=xid, count=min(count, MAX_REPEAT_COUNT)):
            _announce(gpu)


def record_foreign_process(gpu: Gpu, process_owner: str) -> None:
    """A program that is no job's works on a GPU (its row is locked); blank: nobody does any more."""
    if process_owner:
        _raise_alert(gpu, AlertKind.FOREIGN, subject=process_owner)
    else:
        now = timezone.now()
        there = GpuAlert.objects.filter(gpu=gpu, kind=AlertKind.FOREIGN, resolved_at__isnull=True)
        there.update(resolved_at=now, last_at=now)
    _announce(gpu)


def record_claimed_gpus(node: Node, gpus: Sequence[Gpu]) -> None:
    """A node (its row is locked) names these GPUs, which are another node's: of no others any more.

    The rows of the GPUs are not locked: that would let one node hold up others.
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
    """Somebody has looked: it is no alarm any more, and the next time begins a new one. The GPU stays as it is.

    Raises Conflict where somebody else was faster.
    """
    require_admin(actor, "acknowledge alarms")
    with transaction.atomic():
        row = _acknowledge(GpuAlert.objects.select_related("gpu__node"), actor, public_id, note)
        what = {"gpu": row.gpu.uuid, "kind": row.kind, "code": row.code, "times": row.repeat_count}
        record_action(actor, "gpu.acknowledge", row.gpu.node, after=what, reason=row.note)
        _announce(row.gpu)
    return row


class InvalidRowReport(NamedTuple):
    """One row with an invalid value: its kind, its id, the column and a message."""

    kind: str
    row: str
    field: str
    message: str


MAX_INVALID_ROWS = 1000
"""Alarms that are open at once; more come as these end."""


def report_invalid_rows(reports: Sequence[InvalidRowReport]) -> None:
    """Open an alarm for each row that has none yet, and end those of rows that are not reported any more."""
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
    """Mark an open alarm as acknowledged, within a transaction. Raise NotThere or Conflict."""
    row = rows.select_for_update(of=("self",), no_key=True).filter(public_id=public_id).first()
    if row is None:
        raise NotFound("There is no such alarm.")
    if row.acknowledged_at is not None:
        raise Conflict("It is acknowledged already.", code="acknowledged")
    row.acknowledged_at, row.acknowledged_by = timezone.now(), actor
    row.note = " ".join(note.split())[:500]
    row.save(update_fields=["acknowledged_at", "acknowledged_by", "note"])
    return row


def do_acknowledge_invalid_row(actor: User, public_id: str, note: str = "") -> InvalidRow:
    """Note that somebody looks after an invalid row; the alarm itself ends once the row is valid.

    Raise Conflict where it is acknowledged already.
    """
    require_admin(actor, "acknowledge alarms")
    with transaction.atomic():
        row = _acknowledge(InvalidRow.objects.all(), actor, public_id, note)
        what = {"kind": row.kind, "row": row.row, "field": row.field}
        record_action(actor, "invalid_row.acknowledge", row, after=what, reason=row.note)
        publish_on_commit("cluster", {"kind": "invalid_rows"})
    return row


def _raise_alert(gpu: Gpu, kind: AlertKind, *, code: int = 0, subject: str = "", count: int = 1) -> bool:
    """Counts it in the open alarm of a locked GPU, or begins one; True where an open page should show that now."""
    now = timezone.now()
    row = GpuAlert.objects.filter(gpu=gpu, kind=kind, code=code, acknowledged_at__isnull=True).first()
    if row is None:
        if (
            GpuAlert.objects.filter(gpu__node=gpu.node_id, acknowledged_at__isnull=True).count()
            >= MAX_OPEN_ALERTS
        ):
            return False
        GpuAlert.objects.create(
            gpu=gpu,
            kind=kind,
            code=code,
            subject=subject[:200],
            first_at=now,
            last_at=now,
            repeat_count=count,
        )
        return kind is AlertKind.FOREIGN or xid_severity(code) is not XidSeverity.APPLICATION
    row.subject, row.last_at, row.repeat_count, row.resolved_at = (
        subject[:200],
        now,
        row.repeat_count + count,
        None,
    )
    row.save(update_fields=["subject", "last_at", "repeat_count", "resolved_at"])
    return False


def _announce(gpu: Gpu) -> None:
    publish_on_commit("cluster", {"kind": "gpu_alarm", "uuid": gpu.uuid})
