"""Reads the calendar: which nodes are reserved, for whom, and who is still in the way."""

from __future__ import annotations

import datetime as dt
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from django.db.models import Exists, OuterRef, Prefetch, QuerySet
from django.utils import timezone

from portal.access import Person, parent_rows, signed_in, visible_nodes, visible_projects
from portal.errors import NotThere
from portal.lineage import lineage
from portal.models import Job, Node, Project, Reservation, ReservedNode, Task
from portal.words.states import ATTEMPT_LIVE


class Phase(StrEnum):
    """Where a reservation stands in time."""

    CURRENT = "current"
    UPCOMING = "upcoming"
    PAST = "past"
    CANCELLED = "cancelled"


@dataclass(frozen=True)
class InTheWay:
    """A job of others that stands on reserved nodes. ``job`` None: it is not for the reader.

    ``until`` None: it has no time limit, so nobody knows.
    """

    job: Job | None
    nodes: tuple[str, ...]
    until: dt.datetime | None


@dataclass
class Shown:
    """A reservation as one person may see it."""

    row: Reservation
    phase: Phase
    nodes: list[str]
    projects: list[Project]
    hidden: int
    """How many of its projects the reader may not see."""
    in_the_way: list[InTheWay] = field(default_factory=list)

    @property
    def maintenance(self) -> bool:
        """True when it is for nobody."""
        return not self.projects and not self.hidden


def reservations_for(person: Person) -> QuerySet[Reservation]:
    """All of them with nodes and projects, those that begin first standing first; three queries.

    Everybody sees the nodes, and so what keeps them.
    """
    visible_nodes(person)
    reserved = ReservedNode.objects.select_related("node").order_by("node__name")
    return (
        Reservation.objects.select_related("pool", "created_by")
        .prefetch_related(Prefetch("reserved", queryset=reserved), "projects")
        .order_by("during", "id")
    )


def reservation_for(person: Person, public_id: str) -> Reservation:
    """One by its public id; NotThere otherwise."""
    row = reservations_for(person).filter(public_id=public_id).first()
    if row is None:
        raise NotThere("There is no such reservation.")
    return row


def in_phase(rows: QuerySet[Reservation], phase: Phase) -> QuerySet[Reservation]:
    """Those of one phase; past and cancelled ones newest first."""
    now = timezone.now()
    if phase is Phase.CANCELLED:
        return rows.filter(cancelled_at__isnull=False).order_by("-cancelled_at", "-id")
    live = rows.filter(cancelled_at__isnull=True)
    if phase is Phase.PAST:
        return live.filter(during__endswith__lte=now).order_by("-during", "-id")
    if phase is Phase.CURRENT:
        return live.filter(during__contains=now)
    return live.filter(during__startswith__gt=now)


def windows_of(node: Node) -> list[Reservation]:
    """What a node is reserved for now or later, with ``named``: whether it is for anybody; one query."""
    rows = Reservation.objects.filter(
        reserved__node=node, cancelled_at__isnull=True, during__endswith__gt=timezone.now()
    )
    anybody = Exists(Reservation.projects.through.objects.filter(reservation=OuterRef("pk")))
    return list(rows.annotate(named=anybody).order_by("during", "pk"))


def phase_of(row: Reservation) -> Phase:
    """Where it stands now."""
    now = timezone.now()
    if row.cancelled_at is not None:
        return Phase.CANCELLED
    if row.end <= now:
        return Phase.PAST
    return Phase.UPCOMING if row.begin > now else Phase.CURRENT


def shown_to(person: Person, rows: Iterable[Reservation]) -> list[Shown]:
    """Reservations as this person may see them, with who is in the way; a fixed number of queries."""
    listed = list(rows)
    user = signed_in(person)
    seen = set(visible_projects(user).values_list("pk", flat=True))
    found = [
        Shown(
            row,
            phase_of(row),
            [one.node.name for one in row.reserved.all()],
            [project for project in row.projects.all() if project.pk in seen],
            sum(project.pk not in seen for project in row.projects.all()),
        )
        for row in listed
    ]
    ahead = [each for each in found if each.phase in (Phase.CURRENT, Phase.UPCOMING)]
    if ahead:
        _add_in_the_way(ahead, seen)
    return found


def _add_in_the_way(shown: list[Shown], seen: Collection[int]) -> None:
    """Two queries: what stands on the nodes, and the tree of projects."""
    parents = parent_rows()
    nodes = {one.node_id for each in shown for one in each.row.reserved.all()}
    tasks = list(
        Task.objects.filter(node__in=nodes, gone=False, attempt__state__in=ATTEMPT_LIVE)
        .select_related("node", "attempt__job__project", "attempt__job__owner")
        .order_by("attempt__job_id", "rank")
    )
    for each in shown:
        mine = {one.node_id for one in each.row.reserved.all()}
        named = {project.pk for project in each.row.projects.all()}
        standing: dict[int, list[Task]] = {}
        for task in tasks:
            if task.node_id in mine:
                standing.setdefault(task.attempt.job_id, []).append(task)
        for of_job in standing.values():
            attempt, job = of_job[0].attempt, of_job[0].attempt.job
            line: list[int] = lineage(job.project_id, parents.get)
            if not named.isdisjoint(line):
                continue
            limit = dt.timedelta(seconds=job.time_limit_s) if job.time_limit_s else None
            until = (attempt.running_at or attempt.created_at) + limit if limit else None
            if until is None or until > each.row.begin:
                names = tuple(sorted({task.node.name for task in of_job}))
                visible = job if job.project_id in seen else None
                each.in_the_way.append(InTheWay(visible, names, until))
