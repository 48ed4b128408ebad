"""Reservations: administrators reserve nodes for projects, or for maintenance, for a period.

A reservation restricts what may start (``scheduler.core.session.admin_reservations``). It evicts nothing, except for
maintenance with ``drain_at_start``, which evicts the jobs on its nodes when it starts.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from django.db import IntegrityError, transaction
from django.db.backends.postgresql.psycopg_any import DateTimeTZRange
from django.db.models import Count, Q, QuerySet
from django.utils import timezone
from django.utils.translation import gettext as _

from portal.access import require_admin
from portal.domain.jobs.reasons import EndReason
from portal.domain.states import LIVE_ATTEMPT_STATES, NodeState
from portal.domain.stored_texts import stored_text
from portal.errors import Conflict, InvalidRequest, PreconditionFailed
from portal.live_events import publish_on_commit
from portal.models import Node, NodePool, Project, Reservation, ReservationNode, Task, User
from portal.outbox import trigger_cycle
from portal.selectors.lookup import get_rows_by_key
from portal.services.audit import record_action
from portal.services.lifecycle import elastic
from portal.services.notices.write import notify_users_of_nodes

MAX_DURATION = dt.timedelta(days=400)
MAX_LEAD_TIME = dt.timedelta(days=2 * 366)


@dataclass(frozen=True)
class ReservationInput:
    """Input of a reservation. ``nodes`` are rows; without ``projects`` it is for maintenance."""

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
    """Create a reservation, or change ``row`` if it still has ``version``.

    Raise InvalidRequest by field, PreconditionFailed, and Conflict: ``reservation_over``, or
    ``already_reserved`` for nodes in another reservation of that period. A start in the past becomes now.
    """
    require_admin(actor, "reserve nodes")
    now = timezone.now()
    begin = max(spec.starts_at, now) if row is None else spec.starts_at
    if row is not None and row.starts_at <= now:
        begin = row.starts_at  # a past start cannot change
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
        after = _audit_values(saved)
        record_action(actor, act, saved, before=before, after=after, reason=saved.reason)
        if before != after:
            _notify_of_maintenance(saved, spec.nodes)
        _publish(saved)
    return saved


def do_cancel_reservation(actor: User, row: Reservation) -> Reservation:
    """Cancel a reservation; it can be restored until its end. Repeatable."""
    return _set_cancelled(actor, row, True)


def do_restore_reservation(actor: User, row: Reservation) -> Reservation:
    """Restore a cancelled reservation. Raise Conflict if its nodes are reserved otherwise by now."""
    return _set_cancelled(actor, row, False)


def _set_cancelled(actor: User, row: Reservation, cancelled: bool) -> Reservation:
    require_admin(actor, "reserve nodes")
    with transaction.atomic():
        saved = Reservation.objects.select_for_update(no_key=True).get(pk=row.pk)
        now = timezone.now()
        if (saved.cancelled_at is not None) == cancelled:
            return saved
        if saved.ends_at <= now:
            message = _("It has already ended.") if cancelled else _("It would already have ended.")
            raise Conflict(message, code="reservation_over")
        saved.cancelled_at = now if cancelled else None
        saved.version += 1
        saved.save(update_fields=["cancelled_at", "version"])
        if cancelled:
            saved.reservation_nodes.update(live=False)
            record_action(actor, "reservation.cancel", saved, before=_audit_values(saved))
        else:
            _set_nodes(saved, [one.node for one in saved.reservation_nodes.select_related("node")])
            record_action(actor, "reservation.restore", saved, after=_audit_values(saved))
        _notify_of_maintenance(saved, [one.node for one in saved.reservation_nodes.select_related("node")])
        _publish(saved)
    return saved


def drain_started_reservations() -> int:
    """Evict jobs from nodes whose maintenance has started, once; return the number of reservations."""
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
            live = Task.objects.filter(container_removed=False, attempt__state__in=LIVE_ATTEMPT_STATES)
            tasks = live.filter(node__in=row.reservation_nodes.values("node"))
            ids = list(tasks.values_list("pk", flat=True))
            until = row.ends_at.astimezone(dt.UTC)
            message = stored_text(f"Its node is in maintenance until {until:%d %b %H:%M} UTC ({row.name}).")
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
    """Return ``count`` unreserved nodes of a pool, those with fewest tasks first. Raise InvalidRequest."""
    free = (
        reservable_nodes(pool)
        .exclude(pk__in=_conflicting_reservations(starts_at, ends_at, exclude).values("node_id"))
        .annotate(held=Count("task_rows", filter=Q(task_rows__container_removed=False)))
        .order_by("held", "name")
    )
    found: list[Node] = [*free[: max(count, 0)]]
    if count < 1 or len(found) < count:
        there = free.count()
        message = _(
            "Nodes of {name} without a reservation at that time: {there}. Enter 1 to {there}."
        ).format(name=pool.name, there=there)
        raise InvalidRequest(fields={"nodes": message})
    return found


def get_nodes(pool: NodePool, names: Sequence[str]) -> list[Node]:
    """Return nodes of a pool by name or public id, each once. Raise InvalidRequest for an unknown one."""
    found, unknown = get_rows_by_key(reservable_nodes(pool), names)
    if unknown is not None:
        raise InvalidRequest(
            fields={
                "nodes": _("{name} has no node called {unknown}.").format(
                    name=pool.name, unknown=unknown[:63]
                )
            }
        )
    return found


def get_projects(names: Sequence[str]) -> list[Project]:
    """Return projects by name or public id, each once. Raise InvalidRequest for an unknown one."""
    found, unknown = get_rows_by_key(Project.objects.filter(archived_at__isnull=True), names)
    if unknown is not None:
        raise InvalidRequest(
            fields={"projects": _("There is no project called {unknown}.").format(unknown=unknown[:63])}
        )
    return found


def reservable_nodes(pool: NodePool) -> QuerySet[Node]:
    """Return the nodes of a pool except retired ones."""
    return Node.objects.filter(pool=pool).exclude(state=NodeState.RETIRED.value).order_by("name")


def _validation_errors(spec: ReservationInput, starts_at: dt.datetime, now: dt.datetime) -> dict[str, str]:
    wrong: dict[str, str] = {}
    if not 1 <= len(spec.name.strip()) <= 100 or not spec.name.isprintable():
        wrong["name"] = _("Enter a name of 1 to 100 characters.")
    if len(spec.reason) > 500:
        wrong["reason"] = _("At most 500 characters.")
    if not spec.nodes:
        wrong["nodes"] = _("Select at least one node.")
    elif any(node.pool_id != spec.pool.pk for node in spec.nodes):
        wrong["nodes"] = _("All nodes must belong to the pool {name}.").format(name=spec.pool.name)
    if spec.drain_at_start and spec.projects:
        wrong["drain_at_start"] = _(
            "Only a maintenance reservation, without projects, can preempt running jobs."
        )
    if spec.ends_at <= starts_at:
        wrong["ends_at"] = _("The end must be after the start.")
    elif spec.ends_at <= now:
        wrong["ends_at"] = _("The end is in the past.")
    elif spec.ends_at - starts_at > MAX_DURATION:
        wrong["ends_at"] = _("At most {days} days.").format(days=MAX_DURATION.days)
    if starts_at - now > MAX_LEAD_TIME:
        wrong["starts_at"] = _("At most two years ahead.")
    return wrong


def _lock_reservation(
    row: Reservation, version: int | None, now: dt.datetime
) -> tuple[Reservation, dict[str, Any]]:
    """Return the locked row and its present values for the audit trail."""
    saved = Reservation.objects.select_for_update(no_key=True).get(pk=row.pk)
    before = _audit_values(saved)
    if version is not None and version != saved.version:
        message = _("Another user changed this reservation while you were editing it.")
        raise PreconditionFailed(message, details={"current": before, "version": saved.version})
    if saved.cancelled_at is not None or saved.ends_at <= now:
        raise Conflict(_("It is cancelled or has ended."), code="reservation_over")
    return saved, before


def _set_nodes(row: Reservation, nodes: Sequence[Node]) -> None:
    """Set the nodes of a reservation. Raise Conflict, naming the other reservation of a node."""
    others = _conflicting_reservations(row.starts_at, row.ends_at, row).filter(node__in=nodes)
    taken = others.select_related("node", "reservation").order_by("node__name")
    clash = taken.first()
    if clash is None:
        row.reservation_nodes.all().delete()
        try:
            with transaction.atomic():
                ReservationNode.objects.bulk_create(
                    ReservationNode(reservation=row, node=node, period=row.period) for node in nodes
                )
        except IntegrityError:  # a concurrent request reserved one of them
            clash = taken.first()
            if clash is None:
                raise
    if clash is not None:
        raise Conflict(
            _("{name} is already reserved at that time ({reservation}).").format(
                name=clash.node.name, reservation=clash.reservation.name
            ),
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
    return {
        "name": row.name,
        "pool": row.pool.name,
        "nodes": list(row.reservation_nodes.order_by("node__name").values_list("node__name", flat=True)),
        "projects": list(row.projects.order_by("name").values_list("name", flat=True)),
        "starts_at": row.starts_at.astimezone(dt.UTC).isoformat(),
        "ends_at": row.ends_at.astimezone(dt.UTC).isoformat(),
        "drain_at_start": row.drain_at_start,
    }


def _notify_of_maintenance(row: Reservation, nodes: Sequence[Node]) -> None:
    """Notify users with jobs on the nodes of a maintenance that is planned, changed or cancelled."""
    if row.projects.exists():
        return
    names = ", ".join(node.name for node in nodes[:5]) + (", …" if len(nodes) > 5 else "")
    if row.cancelled_at is not None:
        title, follow = stored_text(f"Maintenance of {names} at {{starts_at}} is cancelled"), ""
    else:
        title = stored_text(f"Maintenance of {names} from {{starts_at}} to {{ends_at}}")
        follow = stored_text(
            " Jobs that still run there are preempted when it starts."
            if row.drain_at_start
            else " Running jobs continue; no job starts there in that time."
        )
    times = {"starts_at": row.starts_at, "ends_at": row.ends_at}
    notify_users_of_nodes(nodes, title, f"{row.reason or row.name}.{follow}", times)


def _publish(row: Reservation) -> None:
    publish_on_commit("cluster", {"kind": "reservation", "reservation": row.public_id})
    trigger_cycle("reservation")
