"""Network isolation: a gang on the host network shares no node with a workspace or service of another project.

What listens on a node can be reached from the host network, and both run a user's own servers there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from enum import Enum
from typing import Any, TypeVar

from portal.domain.states import JobKind
from portal.errors import Conflict
from portal.models import Job, NodePool, Task
from portal.services.lifecycle.job_control import RankPlacement
from scheduler.core.model.snapshot import NodeId, PendingRow, PoolRow, ProjectId, RunningRow
from scheduler.snapshot.job_columns import spans_nodes
from scheduler.snapshot.row_cache import DerivedCache
from scheduler.snapshot.running import LiveAttempt

Row = TypeVar("Row", PendingRow, RunningRow)
_SIDE_COLUMNS = ("kind", "tasks", "min_tasks", "launcher")


class IsolationClass(Enum):
    """The two classes of jobs that must not mix; other jobs have none."""

    HOST_NETWORK = "network"  # a gang, in a pool that allows the host network
    PUBLISHED_PORT = "port"  # a workspace or a replica of a service


IsolatedOccupants = Mapping[NodeId, Collection[tuple[IsolationClass, ProjectId]]]
"""Class and project of isolated jobs by node, for pools that allow gangs the host network."""


def must_be_separated(
    isolation_class: IsolationClass,
    project: ProjectId,
    occupants: Collection[tuple[IsolationClass, ProjectId]],
) -> bool:
    """Return True if ``occupants`` include the other class of another project."""
    return any(other is not isolation_class and owner != project for other, owner in occupants)


def isolation_excluded_nodes(
    isolation_class: IsolationClass, project: ProjectId, occupants: IsolatedOccupants
) -> tuple[NodeId, ...]:
    """Return the nodes where a job of this class and project must not run now."""
    return tuple(
        sorted(
            node for node, there in occupants.items() if must_be_separated(isolation_class, project, there)
        )
    )


def isolation_side(kind: str, tasks: int, min_tasks: int | None, launcher: str) -> IsolationClass | None:
    """Return the isolation class of a job, independent of its placement: any gang may span several nodes."""
    if kind != JobKind.TRAINING.value:
        return IsolationClass.PUBLISHED_PORT
    return IsolationClass.HOST_NETWORK if spans_nodes(tasks, min_tasks, launcher) else None


def read_isolated_workloads(pools: Iterable[PoolRow], attempts: Iterable[LiveAttempt]) -> IsolatedOccupants:
    """Return the isolated workloads by node, in pools that allow host networking to gangs."""
    host_network_pools = {pool.id for pool in pools if pool.allow_host_network}
    found: dict[NodeId, set[tuple[IsolationClass, ProjectId]]] = defaultdict(set)
    if host_network_pools:
        for attempt in attempts:
            row = attempt.row
            side = isolation_side(*(row[f"job__{name}"] for name in _SIDE_COLUMNS))
            if side is not None and row["pool__public_id"] in host_network_pools:
                for task in attempt.tasks:
                    found[task.node].add((side, ProjectId(row["job__project__public_id"])))
    return dict(found)


def exclude_isolated_nodes(
    rows: Sequence[Row],
    columns: Mapping[int, Mapping[str, Any]],
    prefix: str,
    workloads: IsolatedOccupants,
    cache: DerivedCache[Row, Row],
) -> tuple[Row, ...]:
    """Return the rows, where those with an isolation class avoid the nodes closed to them.

    ``columns`` are those of their jobs by primary key, in the order of ``rows``; names begin with ``prefix``.
    """
    sides = {}
    for id_, job in columns.items():
        if side := isolation_side(*(job[f"{prefix}{name}"] for name in _SIDE_COLUMNS)):
            sides[id_] = side
    if not workloads or not sides:
        return tuple(rows)
    isolated_rows = {id_: row for id_, row in zip(columns, rows, strict=True) if id_ in sides}
    known: dict[tuple[IsolationClass, ProjectId], tuple[NodeId, ...]] = {}

    def make(id_: int, row: Row) -> Row:
        owner_key = sides[id_], row.project
        if owner_key not in known:
            known[owner_key] = isolation_excluded_nodes(*owner_key, workloads)
        return exclude_nodes(row, known[owner_key])

    made = dict(zip(isolated_rows, cache.map(isolated_rows, workloads, make), strict=True))
    return tuple(made.get(id_, row) for id_, row in zip(columns, rows, strict=True))


def exclude_nodes(row: Row, nodes: tuple[NodeId, ...]) -> Row:
    """Return the row with ``nodes`` added to those it avoids."""
    return (
        replace(row, avoid_nodes=(*row.avoid_nodes, *nodes), isolation_excluded_nodes=nodes) if nodes else row
    )


class NetworkIsolationCheck:
    """Commit-time isolation check against running workloads and those added in this transaction."""

    def __init__(self, jobs: Iterable[Job], pools: Mapping[str, NodePool], nodes: Iterable[str]) -> None:
        """Runs no query when no job has an isolation class or no pool allows host networking."""
        self._workloads: dict[int, set[tuple[IsolationClass, ProjectId]]] = defaultdict(set)
        allows_host_network = any(pool.allow_host_network for pool in pools.values())
        if not allows_host_network or not any(_side(job) for job in jobs):
            return
        rows = Task.objects.filter(container_removed=False, node__public_id__in=set(nodes)).values_list(
            "node_id",
            *(f"attempt__job__{name}" for name in _SIDE_COLUMNS),
            "attempt__job__project__public_id",
        )
        for node, *columns, project in rows:
            if side := isolation_side(*columns):
                self._workloads[node].add((side, ProjectId(project)))

    def check(self, job: Job, pool: NodePool, placements: Sequence[RankPlacement]) -> None:
        """Raise Conflict when a node of the start runs a workload that the job must not share a node with."""
        side, project = _side(job), ProjectId(job.project.public_id)
        if side is None or not pool.allow_host_network:
            return
        for placement in placements:
            if must_be_separated(side, project, self._workloads[placement.node.pk]):
                raise Conflict(
                    f"{placement.node.name} runs a workload this job must not share a node with.",
                    code="network_isolation",
                )

    def add(self, job: Job, placements: Sequence[RankPlacement]) -> None:
        """Add the workload of a start of this transaction."""
        if side := _side(job):
            for placement in placements:
                self._workloads[placement.node.pk].add((side, ProjectId(job.project.public_id)))


def _side(job: Job) -> IsolationClass | None:
    return isolation_side(job.kind, job.tasks, job.min_tasks, job.launcher)
