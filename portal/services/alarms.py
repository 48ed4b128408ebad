"""Alarms: about GPUs as nodes report them, and about invalid rows that the scheduler left out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeVar

from django.db import transaction
from django.db.models import F, QuerySet
from django.utils import timezone

from agents.xids import Grade, grade
from portal.access import require_admin
from portal.errors import Conflict, NotThere
from portal.events import announce
from portal.models import Gpu, GpuAlarm, InvalidRow, Node, User
from portal.models.alarms import AlarmKind
from portal.services.audit import record_act

Alarm = TypeVar("Alarm", GpuAlarm, InvalidRow)

LARGEST_XID = 65_535
MOST_OPEN = 64
"""Open alarms of one node: more would only hide those of others."""
MOST_TIMES = 1_000_000
"""So many times at most are counted of one word of a node."""


def record_xid(node_id: int, uuid: str, xid: int, times: int) -> None:
    """A node's driver told an XID for one of its GPUs, so many times; what follows for the GPU is its health's."""
    if not 0 <= xid <= LARGEST_XID or times < 1:
        return
    with transaction.atomic():
        gpu = Gpu.objects.select_for_update(no_key=True).filter(uuid=uuid, node_id=node_id).first()
        if gpu is not None and _raised(gpu, AlarmKind.XID, code=xid, times=min(times, MOST_TIMES)):
            _announce(gpu)


def record_foreign_seen(gpu: Gpu, who: str) -> None:
    """A program that is no job's works on a GPU (its row is locked); blank: nobody does any more."""
    if who:
        _raised(gpu, AlarmKind.FOREIGN, who=who)
    else:
        now = timezone.now()
        there = GpuAlarm.objects.filter(gpu=gpu, kind=AlarmKind.FOREIGN, over_at__isnull=True)
        there.update(over_at=now, last_at=now)
    _announce(gpu)


def record_claimed(node: Node, gpus: Sequence[Gpu]) -> None:
    """A node (its row is locked) names these GPUs, which are another node's: of no others any more.

    The rows of the GPUs are not locked: that would let one node hold up others.
    """
    now = timezone.now()
    there = GpuAlarm.objects.filter(claimant=node, acknowledged_at__isnull=True)
    known = {row.gpu_id: row for row in there}
    again = [known.pop(gpu.pk).pk for gpu in gpus if gpu.pk in known]
    GpuAlarm.objects.filter(pk__in=again).update(last_at=now, times=F("times") + 1, over_at=None)
    GpuAlarm.objects.filter(pk__in=[row.pk for row in known.values()], over_at__isnull=True).update(
        over_at=now
    )
    seen = {row.gpu_id for row in there}
    for gpu in [gpu for gpu in gpus if gpu.pk not in seen][: max(0, MOST_OPEN - len(seen))]:
        GpuAlarm.objects.create(
            gpu=gpu, kind=AlarmKind.CLAIMED, claimant=node, who=node.name, first_at=now, last_at=now
        )
        _announce(gpu)


def do_acknowledge_alarm(actor: User, public_id: str, note: str = "") -> GpuAlarm:
    """Somebody has looked: it is no alarm any more, and the next time begins a new one. The GPU stays as it is.

    Raises Conflict where somebody else was faster.
    """
    require_admin(actor, "acknowledge alarms")
    with transaction.atomic():
        row = _acknowledged(GpuAlarm.objects.select_related("gpu__node"), actor, public_id, note)
        what = {"gpu": row.gpu.uuid, "kind": row.kind, "code": row.code, "times": row.times}
        record_act(actor, "gpu.acknowledge", row.gpu.node, after=what, reason=row.note)
        _announce(row.gpu)
    return row


class InvalidRowReport(NamedTuple):
    """One row with an invalid value: its kind, its id, the column and a message."""

    kind: str
    row: str
    field: str
    message: str


MOST_INVALID_ROWS = 1000
"""Alarms that are open at once; more come as these end."""


def report_invalid_rows(reports: Sequence[InvalidRowReport]) -> None:
    """Open an alarm for each row that has none yet, and end those of rows that are not reported any more."""
    now = timezone.now()
    wanted = {(each.kind, each.row[:200]): each for each in reports[:MOST_INVALID_ROWS]}
    with transaction.atomic():
        there = {
            (row.kind, row.row): row
            for row in InvalidRow.objects.select_for_update(of=("self",), no_key=True).filter(
                over_at__isnull=True
            )
        }
        over = [row.pk for key, row in there.items() if key not in wanted]
        InvalidRow.objects.filter(pk__in=over).update(over_at=now)
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
            announce("cluster", {"kind": "invalid_rows"})


def _acknowledged(rows: QuerySet[Alarm], actor: User, public_id: str, note: str) -> Alarm:
    """Mark an open alarm as acknowledged, within a transaction. Raise NotThere or Conflict."""
    row = rows.select_for_update(of=("self",), no_key=True).filter(public_id=public_id).first()
    if row is None:
        raise NotThere("There is no such alarm.")
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
        row = _acknowledged(InvalidRow.objects.all(), actor, public_id, note)
        what = {"kind": row.kind, "row": row.row, "field": row.field}
        record_act(actor, "invalid_row.acknowledge", row, after=what, reason=row.note)
        announce("cluster", {"kind": "invalid_rows"})
    return row


def _raised(gpu: Gpu, kind: AlarmKind, *, code: int = 0, who: str = "", times: int = 1) -> bool:
    """Counts it in the open alarm of a locked GPU, or begins one; True where an open page should show that now."""
    now = timezone.now()
    row = GpuAlarm.objects.filter(gpu=gpu, kind=kind, code=code, acknowledged_at__isnull=True).first()
    if row is None:
        if GpuAlarm.objects.filter(gpu__node=gpu.node_id, acknowledged_at__isnull=True).count() >= MOST_OPEN:
            return False
        GpuAlarm.objects.create(
            gpu=gpu, kind=kind, code=code, who=who[:200], first_at=now, last_at=now, times=times
        )
        return kind is AlarmKind.FOREIGN or grade(code) is not Grade.PROGRAM
    row.who, row.last_at, row.times, row.over_at = who[:200], now, row.times + times, None
    row.save(update_fields=["who", "last_at", "times", "over_at"])
    return False


def _announce(gpu: Gpu) -> None:
    announce("cluster", {"kind": "gpu_alarm", "uuid": gpu.uuid})
