"""Who stands where of those that do not mix (``core/company.py``), as it stands in the record."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from portal.errors import Conflict
from portal.models import Job, NodePool, Task
from portal.services.lifecycle import Seat
from portal.words.states import JobKind
from scheduler.album import Built
from scheduler.core.cluster import NodeId, PendingRow, PoolRow, ProjectId, RunningRow
from scheduler.core.company import Guests, Side, closed_to, side_of, strangers
from scheduler.read_running import Holding, min_tasks_of

Row = TypeVar("Row", PendingRow, RunningRow)


def side_of_columns(kind: str, tasks: int, min_tasks: int | None) -> Side | None:
    """The side of a job by its columns."""
    gang = tasks > 1 and min_tasks_of(tasks, min_tasks) is None
    return side_of(workspace=kind == JobKind.WORKSPACE.value, gang=gang)


def guests_of(pools: Iterable[PoolRow], held: Iterable[Holding]) -> Guests:
    """Who of either side stands on nodes of pools that lend gangs their network; empty where none does."""
    lending = {pool.id for pool in pools if pool.node_network}
    found: dict[NodeId, set[tuple[Side, ProjectId]]] = defaultdict(set)
    if lending:
        for attempt in held:
            row = attempt.row
            side = side_of_columns(row["job__kind"], row["job__tasks"], row["job__min_tasks"])
            if side is not None and row["pool__public_id"] in lending:
                for task in attempt.tasks:
                    found[task.node].add((side, ProjectId(row["job__project__public_id"])))
    return dict(found)


def apart(
    rows: Sequence[Row], sides: Mapping[int, Side], ids: Sequence[int], guests: Guests, built: Built[Row, Row]
) -> tuple[Row, ...]:
    """The rows, where those that have a side avoid the nodes that are closed to them.

    ``ids`` are their numbers in the record, ``sides`` the sides by number.
    """
    if not guests or not sides:
        return tuple(rows)
    of_a_side = {id_: row for id_, row in zip(ids, rows, strict=True) if id_ in sides}
    known: dict[tuple[Side, ProjectId], tuple[NodeId, ...]] = {}

    def make(id_: int, row: Row) -> Row:
        whose = sides[id_], row.project
        if whose not in known:
            known[whose] = closed_to(*whose, guests)
        return without(row, known[whose])

    made = dict(zip(of_a_side, built.of(of_a_side, guests, make), strict=True))
    return tuple(made.get(id_, row) for id_, row in zip(ids, rows, strict=True))


def without(row: Row, closed: tuple[NodeId, ...]) -> Row:
    """A row that avoids nodes where strangers stand."""
    return replace(row, avoid_nodes=(*row.avoid_nodes, *closed), strangers=closed) if closed else row


class Company:
    """The same in a transaction that starts jobs: who stands on nodes now, and who was seated since."""

    def __init__(self, jobs: Iterable[Job], pools: Mapping[str, NodePool], nodes: Iterable[str]) -> None:
        """No query where no job has a side, or no pool lends gangs the network of its nodes."""
        self._guests: dict[int, set[tuple[Side, ProjectId]]] = defaultdict(set)
        lends = any(pool.allow_node_network for pool in pools.values())
        if not lends or not any(_side(job) for job in jobs):
            return
        rows = Task.objects.filter(gone=False, node__public_id__in=set(nodes)).values_list(
            "node_id",
            "attempt__job__kind",
            "attempt__job__tasks",
            "attempt__job__min_tasks",
            "attempt__job__project__public_id",
        )
        for node, kind, tasks, least, project in rows:
            if side := side_of_columns(kind, tasks, least):
                self._guests[node].add((side, ProjectId(project)))

    def check(self, job: Job, pool: NodePool, seats: Sequence[Seat]) -> None:
        """Raises Conflict when strangers stand on a node of a start."""
        side, project = _side(job), ProjectId(job.project.public_id)
        if side is None or not pool.allow_node_network:
            return
        for seat in seats:
            if strangers(side, project, self._guests[seat.node.pk]):
                raise Conflict(f"On {seat.node.name} stands whom it shares no node with.", code="company")

    def add(self, job: Job, seats: Sequence[Seat]) -> None:
        """These were seated in this transaction."""
        if side := _side(job):
            for seat in seats:
                self._guests[seat.node.pk].add((side, ProjectId(job.project.public_id)))


def _side(job: Job) -> Side | None:
    return side_of_columns(job.kind, job.tasks, job.min_tasks)


def sides_of(rows: Mapping[int, dict[str, Any]], prefix: str = "") -> dict[int, Side]:
    """The sides of jobs by number, from columns that were read of them."""
    found = {}
    for id_, row in rows.items():
        side = side_of_columns(row[f"{prefix}kind"], row[f"{prefix}tasks"], row[f"{prefix}min_tasks"])
        if side is not None:
            found[id_] = side
    return found
