"""The calendar: administrators keep nodes for projects, or for maintenance, for a span of time.

A reservation decides what may start (``scheduler.core.reserved``). Nobody is thrown out by one, unless it is for
maintenance and says so (``clears``): then who still stands there when it begins is asked to leave.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from django.db import IntegrityError, transaction
from django.db.backends.postgresql.psycopg_any import DateTimeTZRange
from django.db.models import Count, Q
from django.utils import timezone

from portal.access import require_admin
from portal.errors import Conflict, Invalid, Stale
from portal.events import announce
from portal.models import Node, NodePool, Project, Reservation, ReservedNode, Task, User
from portal.services import elastic
from portal.services.audit import record_act
from portal.wake import wake
from portal.words.reasons import EndReason
from portal.words.states import ATTEMPT_LIVE, NodeState

LONGEST = dt.timedelta(days=400)
FARTHEST = dt.timedelta(days=2 * 366)


@dataclass(frozen=True)
class ReservationWords:
    """What an administrator asks for. ``nodes`` by row; ``projects`` empty keeps everybody off."""

    name: str
    pool: NodePool
    nodes: Sequence[Node]
    projects: Sequence[Project]
    begin: dt.datetime
    end: dt.datetime
    reason: str = ""
    clears: bool = False


def do_save_reservation(
    actor: User, words: ReservationWords, row: Reservation | None = None, *, version: int | None = None
) -> Reservation:
    """Makes a reservation, or changes ``row`` if it is still as the editor saw it (``version``).

    Raises Invalid by field, Stale, and Conflict: ``reservation_over``, or ``reserved_already`` for nodes that
    another reservation keeps at that time. A begin that has passed is now.
    """
    require_admin(actor, "reserve nodes")
    now = timezone.now()
    begin = max(words.begin, now) if row is None else words.begin
    if row is not None and row.begin <= now:
        begin = row.begin  # what has begun has begun
    wrong = _wrong(words, begin, now)
    if wrong:
        raise Invalid(fields=wrong)
    during = DateTimeTZRange(begin, words.end, "[)")
    with transaction.atomic():
        saved, before = (
            _locked(row, version, now) if row is not None else (Reservation(created_by=actor), None)
        )
        saved.name, saved.pool, saved.reason = words.name.strip(), words.pool, words.reason.strip()[:500]
        saved.during, saved.clears = during, words.clears
        if row is not None:
            saved.version += 1
        saved.save()
        saved.projects.set(words.projects)
        _keep(saved, words.nodes)
        act = "reservation.create" if row is None else "reservation.change"
        record_act(actor, act, saved, before=before, after=_shown(saved), reason=saved.reason)
        _tell(saved)
    return saved


def do_cancel_reservation(actor: User, row: Reservation, *, reason: str = "") -> Reservation:
    """Lets everybody onto the nodes again; it can be brought back until its end. Repeatable."""
    require_admin(actor, "reserve nodes")
    with transaction.atomic():
        saved = Reservation.objects.select_for_update(no_key=True).get(pk=row.pk)
        if saved.cancelled_at is not None:
            return saved
        if saved.end <= timezone.now():
            raise Conflict("It is over already.", code="reservation_over")
        saved.cancelled_at = timezone.now()
        saved.version += 1
        saved.save(update_fields=["cancelled_at", "version"])
        saved.reserved.update(live=False)
        record_act(actor, "reservation.cancel", saved, before=_shown(saved), reason=reason)
        _tell(saved)
    return saved


def do_restore_reservation(actor: User, row: Reservation) -> Reservation:
    """Takes a cancellation back. Refused as a new one would be when its nodes are reserved otherwise by now."""
    require_admin(actor, "reserve nodes")
    with transaction.atomic():
        saved = Reservation.objects.select_for_update(no_key=True).get(pk=row.pk)
        if saved.cancelled_at is None:
            return saved
        if saved.end <= timezone.now():
            raise Conflict("It would be over already.", code="reservation_over")
        saved.cancelled_at = None
        saved.version += 1
        saved.save(update_fields=["cancelled_at", "version"])
        _keep(saved, [one.node for one in saved.reserved.select_related("node")])
        record_act(actor, "reservation.restore", saved, after=_shown(saved))
        _tell(saved)
    return saved


def clear_begun() -> int:
    """Asks who still stands on nodes whose maintenance has begun to leave, once; gives how many windows that were."""
    begun = Reservation.objects.filter(
        clears=True, cleared_at__isnull=True, cancelled_at__isnull=True, during__contains=timezone.now()
    )
    rows = list(begun.order_by("pk").values_list("pk", flat=True))
    for pk in rows:
        with transaction.atomic():
            row = Reservation.objects.select_for_update(no_key=True).get(pk=pk)
            if row.cleared_at is not None or row.cancelled_at is not None or not row.clears:
                continue
            row.cleared_at = timezone.now()
            row.save(update_fields=["cleared_at"])
            tasks = Task.objects.filter(
                node__in=row.reserved.values("node"), gone=False, attempt__state__in=ATTEMPT_LIVE
            )
            ids = list(tasks.values_list("pk", flat=True))
            sentence = (
                f"Its node is in maintenance until {row.end.astimezone(dt.UTC):%d %b %H:%M} UTC ({row.name})."
            )
            elastic.end_tasks(ids, EndReason.PREEMPTED, sentence=sentence, actor="fairway")
            record_act(None, "reservation.clear", row, after={"tasks": len(ids)}, reason=row.reason)
            _tell(row)
    return len(rows)


def choose_nodes(
    pool: NodePool, count: int, begin: dt.datetime, end: dt.datetime, but: Reservation | None = None
) -> list[Node]:
    """So many nodes of a pool that nothing else reserves then, those with least on them first. Raises Invalid."""
    free = (
        nodes_of(pool)
        .exclude(pk__in=_clashes(begin, end, but).values("node_id"))
        .annotate(held=Count("task_rows", filter=Q(task_rows__gone=False)))
        .order_by("held", "name")
    )
    found = list(free[: max(count, 0)])
    if count < 1 or len(found) < count:
        there = free.count()
        raise Invalid(
            fields={"nodes": f"Of {pool.name}, {there} are not reserved then; ask for 1 to {there}."}
        )
    return found


def named_nodes(pool: NodePool, names: Sequence[str]) -> list[Node]:
    """Nodes of a pool by name or public id, each once. Raises Invalid naming one that is not there."""
    known = {key: node for node in nodes_of(pool) for key in (node.public_id, node.name)}
    unknown = next((name for name in names if name not in known), None)
    if unknown is not None:
        raise Invalid(fields={"nodes": f"{pool.name} has no node called {unknown[:63]}."})
    return list({known[name].pk: known[name] for name in names}.values())


def named_projects(names: Sequence[str]) -> list[Project]:
    """Projects by name or public id, each once. Raises Invalid naming one that is not there."""
    rows = Project.objects.filter(Q(name__in=names) | Q(public_id__in=names), archived_at__isnull=True)
    known = {key: project for project in rows for key in (project.public_id, project.name)}
    unknown = next((name for name in names if name not in known), None)
    if unknown is not None:
        raise Invalid(fields={"projects": f"There is no project called {unknown[:63]}."})
    return list({known[name].pk: known[name] for name in names}.values())


def nodes_of(pool: NodePool) -> Any:
    """The nodes of a pool that can be reserved: all but the retired."""
    return Node.objects.filter(pool=pool).exclude(state=NodeState.RETIRED.value).order_by("name")


# -- inside ----------------------------------------------------------------------------------------


def _wrong(words: ReservationWords, begin: dt.datetime, now: dt.datetime) -> dict[str, str]:
    wrong: dict[str, str] = {}
    if not 1 <= len(words.name.strip()) <= 100 or not words.name.isprintable():
        wrong["name"] = "Give it a name of 1 to 100 characters."
    if len(words.reason) > 500:
        wrong["reason"] = "At most 500 characters."
    if not words.nodes:
        wrong["nodes"] = "Name at least one node."
    elif any(node.pool_id != words.pool.pk for node in words.nodes):
        wrong["nodes"] = f"All nodes must be of the pool {words.pool.name}."
    if words.clears and words.projects:
        wrong["clears"] = "Only a reservation for nobody, for maintenance, asks who stands there to leave."
    if words.end <= begin:
        wrong["end"] = "The end must come after the begin."
    elif words.end <= now:
        wrong["end"] = "The end lies in the past."
    elif words.end - begin > LONGEST:
        wrong["end"] = f"At most {LONGEST.days} days."
    if begin - now > FARTHEST:
        wrong["begin"] = "At most two years ahead."
    return wrong


def _locked(row: Reservation, version: int | None, now: dt.datetime) -> tuple[Reservation, dict[str, Any]]:
    """The row as it stands, locked, with what the audit trail says of it."""
    saved = Reservation.objects.select_for_update(no_key=True).get(pk=row.pk)
    before = _shown(saved)
    if version is not None and version != saved.version:
        raise Stale(
            "Somebody else changed this reservation while you were editing it.",
            facts={"current": before, "version": saved.version},
        )
    if saved.cancelled_at is not None or saved.end <= now:
        raise Conflict("It is cancelled, or over already.", code="reservation_over")
    return saved, before


def _keep(row: Reservation, nodes: Sequence[Node]) -> None:
    """Makes the nodes of a reservation exactly these; Conflict naming what keeps one of them then."""
    taken = _clashes(row.begin, row.end, row).filter(node__in=nodes).select_related("node", "reservation")
    clash = taken.order_by("node__name").first()
    if clash is None:
        row.reserved.all().delete()
        try:
            with transaction.atomic():
                ReservedNode.objects.bulk_create(
                    ReservedNode(reservation=row, node=node, during=row.during) for node in nodes
                )
        except IntegrityError:  # somebody else was faster
            clash = taken.order_by("node__name").first()
            if clash is None:
                raise
    if clash is not None:
        raise Conflict(
            f"{clash.node.name} is reserved at that time already ({clash.reservation.name}).",
            code="reserved_already",
            facts={"node": clash.node.name, "reservation": clash.reservation.public_id},
        )


def _clashes(begin: dt.datetime, end: dt.datetime, but: Reservation | None) -> Any:
    rows = ReservedNode.objects.filter(live=True, during__overlap=DateTimeTZRange(begin, end, "[)"))
    return rows if but is None or but.pk is None else rows.exclude(reservation=but)


def _shown(row: Reservation) -> dict[str, Any]:
    """For the audit trail."""
    return {
        "name": row.name,
        "pool": row.pool.name,
        "nodes": list(row.reserved.order_by("node__name").values_list("node__name", flat=True)),
        "projects": list(row.projects.order_by("name").values_list("name", flat=True)),
        "begin": row.begin.astimezone(dt.UTC).isoformat(),
        "end": row.end.astimezone(dt.UTC).isoformat(),
        "clears": row.clears,
    }


def _tell(row: Reservation) -> None:
    announce("cluster", {"kind": "reservation", "reservation": row.public_id})
    wake("reservation")
