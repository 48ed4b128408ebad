"""Reads reservations: which nodes are reserved for which projects, and which jobs still block them."""

from __future__ import annotations

import datetime as dt
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from django.db.models import Exists, OuterRef, Prefetch, QuerySet
from django.utils import timezone
from django.utils.translation import gettext as _

from portal.access import Requester, project_parents, require_user, visible_nodes, visible_projects
from portal.domain.projects.project_tree import path_to_root
from portal.domain.states import LIVE_ATTEMPT_STATES
from portal.models import Job, Node, Project, Reservation, ReservationNode, Task, User
from portal.selectors.lookup import get_first


class ReservationPhase(StrEnum):
    CURRENT = "current"
    UPCOMING = "upcoming"
    PAST = "past"
    CANCELLED = "cancelled"


@dataclass(frozen=True)
class BlockingJob:
    """A job of another project on reserved nodes. ``job`` is None if the reader may not see it.

    ``until`` is None if it has no time limit.
    """

    job: Job | None
    nodes: tuple[str, ...]
    until: dt.datetime | None


@dataclass
class ReservationView:
    """A reservation as one user may see it."""

    row: Reservation
    phase: ReservationPhase
    nodes: list[str]
    projects: list[Project]
    hidden_project_count: int
    """Number of its projects that the reader may not see."""
    blocking_jobs: list[BlockingJob] = field(default_factory=list)

    @property
    def is_maintenance(self) -> bool:
        return not self.projects and not self.hidden_project_count


def list_reservations(requester: Requester) -> QuerySet[Reservation]:
    """Return all reservations with nodes and projects, by start time, in three queries.

    Reservations are visible to all users who see the nodes.
    """
    visible_nodes(requester)
    reserved = ReservationNode.objects.select_related("node").order_by("node__name")
    return (
        Reservation.objects.select_related("pool", "created_by")
        .prefetch_related(Prefetch("reservation_nodes", queryset=reserved), "projects")
        .order_by("period", "id")
    )


def get_reservation(requester: Requester, public_id: str) -> Reservation:
    rows = list_reservations(requester).filter(public_id=public_id)
    return get_first(rows, _("There is no such reservation."))


def filter_by_phase(rows: QuerySet[Reservation], phase: ReservationPhase) -> QuerySet[Reservation]:
    """Select reservations of one phase; past and cancelled ones are ordered newest first."""
    now = timezone.now()
    if phase is ReservationPhase.CANCELLED:
        return rows.filter(cancelled_at__isnull=False).order_by("-cancelled_at", "-id")
    live = rows.filter(cancelled_at__isnull=True)
    if phase is ReservationPhase.PAST:
        return live.filter(period__endswith__lte=now).order_by("-period", "-id")
    if phase is ReservationPhase.CURRENT:
        return live.filter(period__contains=now)
    return live.filter(period__startswith__gt=now)


def node_reservations(node: Node) -> list[Reservation]:
    """Return present and future reservations of a node, in one query; ``named`` is False for maintenance."""
    rows = Reservation.objects.filter(
        reservation_nodes__node=node, cancelled_at__isnull=True, period__endswith__gt=timezone.now()
    )
    anybody = Exists(Reservation.projects.through.objects.filter(reservation=OuterRef("pk")))
    return list(rows.annotate(named=anybody).order_by("period", "pk"))


def nodes_reserved_for_others(user: User, projects: Collection[int]) -> set[int]:
    """Return the nodes (ids) that are reserved now, and not for these projects (ids) or their ancestors.

    Administrators may launch in every project. At most two queries.
    """
    reserved = list(
        ReservationNode.objects.filter(live=True, period__contains=timezone.now()).values_list(
            "node_id", "reservation_id"
        )
    )
    if not reserved:
        return set()
    named = Reservation.projects.through.objects.filter(reservation_id__in={row for _, row in reserved})
    if not user.is_admin:
        parents = project_parents()
        own = {above for each in projects for above in path_to_root(each, parents.get)}
        named = named.filter(project_id__in=own)
    open_to_user = set(named.values_list("reservation_id", flat=True))
    return {node for node, reservation in reserved if reservation not in open_to_user}


def reservation_phase(row: Reservation) -> ReservationPhase:
    now = timezone.now()
    if row.cancelled_at is not None:
        return ReservationPhase.CANCELLED
    if row.ends_at <= now:
        return ReservationPhase.PAST
    return ReservationPhase.UPCOMING if row.starts_at > now else ReservationPhase.CURRENT


def reservation_views(requester: Requester, rows: Iterable[Reservation]) -> list[ReservationView]:
    """Return reservations as this user may see them, with blocking jobs, in a fixed number of queries."""
    listed = list(rows)
    user = require_user(requester)
    seen = set(visible_projects(user).values_list("pk", flat=True))
    found = [
        ReservationView(
            row,
            reservation_phase(row),
            [one.node.name for one in row.reservation_nodes.all()],
            [project for project in row.projects.all() if project.pk in seen],
            sum(project.pk not in seen for project in row.projects.all()),
        )
        for row in listed
    ]
    ahead = [each for each in found if each.phase in (ReservationPhase.CURRENT, ReservationPhase.UPCOMING)]
    if ahead:
        _add_blocking_jobs(ahead, seen)
    return found


def _add_blocking_jobs(views: list[ReservationView], seen: Collection[int]) -> None:
    """Add the jobs on reserved nodes, in two queries."""
    parents = project_parents()
    nodes = {one.node_id for each in views for one in each.row.reservation_nodes.all()}
    tasks = list(
        Task.objects.filter(node__in=nodes, container_removed=False, attempt__state__in=LIVE_ATTEMPT_STATES)
        .select_related("node", "attempt__job__project", "attempt__job__owner")
        .order_by("attempt__job_id", "rank")
    )
    for each in views:
        mine = {one.node_id for one in each.row.reservation_nodes.all()}
        named = {project.pk for project in each.row.projects.all()}
        standing: dict[int, list[Task]] = {}
        for task in tasks:
            if task.node_id in mine:
                standing.setdefault(task.attempt.job_id, []).append(task)
        for of_job in standing.values():
            attempt, job = of_job[0].attempt, of_job[0].attempt.job
            line: list[int] = path_to_root(job.project_id, parents.get)
            if not named.isdisjoint(line):
                continue
            limit = dt.timedelta(seconds=job.time_limit_s) if job.time_limit_s else None
            until = (attempt.running_at or attempt.created_at) + limit if limit else None
            if until is None or until > each.row.starts_at:
                names = tuple(sorted({task.node.name for task in of_job}))
                visible = job if job.project_id in seen else None
                each.blocking_jobs.append(BlockingJob(visible, names, until))
