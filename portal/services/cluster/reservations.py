"""The calendar: administrators keep nodes for projects, or for maintenance, for a span of time.

A reservation decides what may start (``scheduler.core.session.reserved``). Nobody is thrown out by one, unless it is for
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
from portal.domain.reasons import EndReason
from portal.domain.states import LIVE_ATTEMPT_STATES, NodeState
from portal.errors import Conflict, InvalidRequest, PreconditionFailed
from portal.live_events import publish_on_commit
from portal.models import Node, NodePool, Project, Reservation, ReservationNode, Task, User
from portal.outbox import trigger_cycle
from portal.services.audit import record_action
from portal.services.lifecycle import elastic

MAX_DURATION = dt.timedelta(days=400)
MAX_LEAD_TIME = dt.timedelta(days=2 * 366)


@dataclass(frozen=True)
class ReservationInput:
    """What an administrator asks for. ``nodes`` by row; ``projects`` empty keeps everybody off."""

    name: str
    pool: NodePool
    nodes: Sequence[Node]
    projects: Sequence[Project]
    starts_at: dt.datetime
    ends_at: dt.datetime
    reason: str = ""
    drain_at_start: bool = False


def do_save_reservation(
    actor: User, spec: ReservationInput, row: Reservation | None = None, *, version: int | None = None
) -> Reservation:
    """Makes a reservation, or changes ``row`` if it is still as the editor saw it (``version``).

    Raises Invalid by field, Stale, and Conflict: ``reservation_over``, or ``already_reserved`` for nodes that
    another reservation keeps at that time. A begin that has passed is now.
    """
    require_admin(actor, "reserve nodes")
    now = timezone.now()
    begin = max(spec.starts_at, now) if row is None else spec.starts_at
    if row is not None and row.starts_at <= now:
        begin = row.starts_at  # what has begun has begun
    wrong = _validation_errors(spec, begin, now)
    if wrong:
        raise InvalidRequest(fields=wrong)
    during = DateTimeTZRange(begin, spec.ends_at, "[)")
    with transaction.atomic():
        saved, before = (
            _lock_reservation(row, version, now) if row is not None else (Reservation(created_by=actor), None)
        )
        saved.name, saved.pool, saved.reason = spec.name.strip(), spec.pool, spec.reason.strip()[:500]
        saved.period, saved.drain_at_start = during, spec.drain_at_start
        if row is not None:
            saved.version += 1
        saved.save()
        saved.projects.set(spec.projects)
        _set_nodes(saved, spec.nodes)
        act = "reservation.create" if row is None else "reservation.change"
        record_action(actor, act, saved, before=before, after=_audit_values(saved), reason=saved.reason)
        _publish(saved)
    return saved


def do_cancel_reservation(actor: User, row: Reservation, *, reason: str = "") -> Reservation:
    """Lets everybody onto the nodes again; it can be brought back until its end. Repeatable."""
    require_admin(actor, "reserve nodes")
    with transaction.atomic():
        saved = Reservation.objects.select_for_update(no_key=True).get(pk=row.pk)
        if saved.cancelled_at is not None:
            return saved
        if saved.ends_at <= timezone.now():
            raise Conflict("It is over already.", code="reservation_over")
        saved.cancelled_at = timezone.now()
        saved.version += 1
        saved.save(update_fields=["cancelled_at", "version"])
        saved.reservation_nodes.update(live=False)
        record_action(actor, "reservation.cancel", saved, before=_audit_values(saved), reason=reason)
        _publish(saved)
    return saved


def do_restore_reservation(actor: User, row: Reservation) -> Reservation:
    """Takes a cancellation back. Refused as a new one would be when its nodes are reserved otherwise by now."""
    require_admin(actor, "reserve nodes")
    with transaction.atomic():
        saved = Reservation.objects.select_for_update(no_key=True).get(pk=row.pk)
        if saved.cancelled_at is None:
            return saved
        if saved.ends_at <= timezone.now():
            raise Conflict("It would be over already.", code="reservation_over")
        saved.cancelled_at = None
        saved.version += 1
        saved.save(update_fields=["cancelled_at", "version"])
        _set_nodes(saved, [one.node for one in saved.reservation_nodes.select_related("node")])
        record_action(actor, "reservation.restore", saved, after=_audit_values(saved))
        _publish(saved)
    return saved


def drain_started_reservations() -> int:
    """Asks who still stands on nodes whose maintenance has begun to leave, once; gives how many windows that were."""
    begun = Reservation.objects.filter(
        drain_at_start=True,
        drained_at__isnull=True,
        cancelled_at__isnull=True,
        period__contains=timezone.now(),
    )
    rows = list(begun.order_by("pk").values_list("pk", flat=True))
    for pk in rows:
        with transaction.atomic():
            row = Reservation.objects.select_for_update(no_key=True).get(pk=pk)
            if row.drained_at is not None or row.cancelled_at is not None or not row.drain_at_start:
                continue
            row.drained_at = timezone.now()
            row.save(update_fields=["drained_at"])
            tasks = Task.objects.filter(
                node__in=row.reservation_nodes.values("node"),
                container_removed=False,
                attempt__state__in=LIVE_ATTEMPT_STATES,
            )
            ids = list(tasks.values_list("pk", flat=True))
            message = f"Its node is in maintenance until {row.ends_at.astimezone(dt.UTC):%d %b %H:%M} UTC ({row.name})."
            elastic.end_tasks(ids, EndReason.PREEMPTED, message=message, actor="fairway")
            record_action(None, "reservation.clear", row, after={"tasks": len(ids)}, reason=row.reason)
            _publish(row)
    return len(rows)


def choose_nodes(
    pool: NodePool,
    count: int,
    starts_at: dt.datetime,
    ends_at: dt.datetime,
    exclude: Reservation | None = None,
) -> list[Node]:
    """So many nodes of a pool that nothing else reserves then, those with least on them first. Raises Invalid."""
    free = (
        reservable_nodes(pool)
        .exclude(pk__in=_conflicting_reservations(starts_at, ends_at, exclude).values("node_id"))
        .annotate(held=Count("task_rows", filter=Q(task_rows__container_removed=False)))
        .order_by("held", "name")
    )
    found = list(free[: max(count, 0)])
    if count < 1 or len(found) < count:
        there = free.count()
        raise InvalidRequest(
            fields={"nodes": f"Of {pool.name}, {there} are not reserved then; ask for 1 to {there}."}
        )
    return found


def get_nodes(pool: NodePool, names: Sequence[str]) -> list[Node]:
    """Nodes of a pool by name or public id, each once. Raises Invalid naming one that is not there."""
    known = {key: node for node in reservable_nodes(pool) for key in (node.public_id, node.name)}
    unknown = next((name for name in names if name not in known), None)
    if unknown is not None:
        raise InvalidRequest(fields={"nodes": f"{pool.name} has no node called {unknown[:63]}."})
    return list({known[name].pk: known[name] for name in names}.values())


def get_projects(names: Sequence[str]) -> list[Project]:
    """Projects by name or public id, each once. Raises Invalid naming one that is not there."""
    rows = Project.objects.filter(Q(name__in=names) | Q(public_id__in=names), archived_at__isnull=True)
    known = {key: project for project in rows for key in (project.public_id, project.name)}
    unknown = next((name for name in names if name not in known), None)
    if unknown is not None:
        raise InvalidRequest(fields={"projects": f"There is no project called {unknown[:63]}."})
    return list({known[name].pk: known[name] for name in names}.values())


def reservable_nodes(pool: NodePool) -> Any:
    """The nodes of a pool that can be reserved: all but the retired."""
    return Node.objects.filter(pool=pool).exclude(state=NodeState.RETIRED.value).order_by("name")


# -- inside ----------------------------------------------------------------------------------------


def _validation_errors(spec: ReservationInput, starts_at: dt.datetime, now: dt.datetime) -> dict[str, str]:
    wrong: dict[str, str] = {}
    if not 1 <= len(spec.name.strip()) <= 100 or not spec.name.isprintable():
        wrong["name"] = "Give it a name of 1 to 100 characters."
    if len(spec.reason) > 500:
        wrong["reason"] = "At most 500 characters."
    if not spec.nodes:
        wrong["nodes"] = "Name at least one node."
    elif any(node.pool_id != spec.pool.pk for node in spec.nodes):
        wrong["nodes"] = f"All nodes must be of the pool {spec.pool.name}."
    if spec.drain_at_start and spec.projects:
        wrong["clears"] = "Only a reservation for nobody, for maintenance, asks who stands there to leave."
    if spec.ends_at <= starts_at:
        wrong["end"] = "The end must come after the begin."
    elif spec.ends_at <= now:
        wrong["end"] = "The end lies in the past."
    elif spec.ends_at - starts_at > MAX_DURATION:
        wrong["end"] = f"At most {MAX_DURATION.days} days."
    if starts_at - now > MAX_LEAD_TIME:
        wrong["begin"] = "At most two years ahead."
    return wrong


def _lock_reservation(
    row: Reservation, version: int | None, now: dt.datetime
) -> tuple[Reservation, dict[str, Any]]:
    """The row as it stands, locked, with what the audit trail says of it."""
    saved = Reservation.objects.select_for_update(no_key=True).get(pk=row.pk)
    before = _audit_values(saved)
    if version is not None and version != saved.version:
        raise PreconditionFailed(
            "Somebody else changed this reservation while you were editing it.",
            details={"current": before, "version": saved.version},
        )
    if saved.cancelled_at is not None or saved.ends_at <= now:
        raise Conflict("It is cancelled, or over already.", code="reservation_over")
    return saved, before


def _set_nodes(row: Reservation, nodes: Sequence[Node]) -> None:
    """Makes the nodes of a reservation exactly these; Conflict naming what keeps one of them then."""
    taken = (
        _conflicting_reservations(row.starts_at, row.ends_at, row)
        .filter(node__in=nodes)
        .select_related("node", "reservation")
    )
    clash = taken.order_by("node__name").first()
    if clash is None:
        row.reservation_nodes.all().delete()
        try:
            with transaction.atomic():
                ReservationNode.objects.bulk_create(
                    ReservationNode(reservation=row, node=node, period=row.period) for node in nodes
                )
        except IntegrityError:  # somebody else was faster
            clash = taken.order_by("node__name").first()
            if clash is None:
                raise
    if clash is not None:
        raise Conflict(
            f"{clash.node.name} is reserved at that time already ({clash.reservation.name}).",
            code="already_reserved",
            details={"node": clash.node.name, "reservation": clash.reservation.public_id},
        )


def _conflicting_reservations(
    starts_at: dt.datetime, ends_at: dt.datetime, exclude: Reservation | None
) -> Any:
    rows = ReservationNode.objects.filter(
        live=True, period__overlap=DateTimeTZRange(starts_at, ends_at, "[)")
    )
    return rows if exclude is None or exclude.pk is None else rows.exclude(reservation=exclude)


def _audit_values(row: Reservation) -> dict[str, Any]:
    """For the audit trail."""
    return {
        "name": row.name,
        "pool": row.pool.name,
        "nodes": list(row.reservation_nodes.order_by("node__name").values_list("node__name", flat=True)),
        "projects": list(row.projects.order_by("name").values_list("name", flat=True)),
        "begin": row.starts_at.astimezone(dt.UTC).isoformat(),
        "end": row.ends_at.astimezone(dt.UTC).isoformat(),
        "clears": row.drain_at_start,
    }


def _publish(row: Reservation) -> None:
    publish_on_commit("cluster", {"kind": "reservation", "reservation": row.public_id})
    trigger_cycle("reservation")
