"""Nodes that administrators reserve: which of them are closed to a job, and what it is told of that.

A job may stand on a reserved node when one of the named projects is its own or above its own, or when it is surely
gone before the reservation begins: by its time limit, counted from now. A job without a limit never surely is. Who
stands there already stays. Inside a decision closed nodes count among those that a job avoids.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TypeVar

from portal.domain.reasons import VerdictCode
from scheduler.core.model.plan import Verdict
from scheduler.core.model.project_tree import ProjectTree
from scheduler.core.model.snapshot import (
    JobId,
    NodeId,
    PendingRow,
    PoolId,
    ProjectId,
    ReservationRow,
    RunningRow,
    Snapshot,
)
from scheduler.core.session.cache import RestrictedRow
from scheduler.core.session.pool import PoolState
from scheduler.core.verdicts import formatting

Row = TypeVar("Row", PendingRow, RunningRow)


def reservation_blocks(
    reservation: ReservationRow, ancestors: Iterable[ProjectId], now_s: float, ends_s: float | None
) -> bool:
    """True when a job of a project (``line``: it and those above) may not start on the reserved nodes now.

    ``ends_s`` is when it is surely gone; None is never.
    """
    if reservation.end_s <= now_s or not set(ancestors).isdisjoint(reservation.projects):
        return False
    return ends_s is None or ends_s > reservation.start_s


class AdminReservations:
    """The reservations of one snapshot. ``narrowed`` holds rows from decision to decision."""

    def __init__(
        self, snapshot: Snapshot, tree: ProjectTree, restricted_rows: dict[int, RestrictedRow]
    ) -> None:
        self._now_s = snapshot.now_s
        self._tree = tree
        self._rows = sorted(snapshot.reservations, key=lambda row: (row.end_s, row.start_s, row.id))
        self._excluded_nodes: dict[tuple[ProjectId, float | None], tuple[NodeId, ...]] = {}
        self._before = dict(restricted_rows)
        self._restricted_rows = restricted_rows
        restricted_rows.clear()
        self._original_rows: dict[JobId, PendingRow] = {}

    @property
    def has_reservations(self) -> bool:
        """True when any nodes are reserved, now or later."""
        return bool(self._rows)

    def restrict(self, snapshot: Snapshot) -> Snapshot:
        """The snapshot in which every job avoids the nodes that are closed to it."""
        if not self._rows:
            return snapshot
        self._original_rows = {row.job: row for row in snapshot.pending}
        return replace(
            snapshot,
            pending=tuple(self._restrict_row(row, row.time_limit_s) for row in snapshot.pending),
            # one that is moved begins anew at a time that nobody knows yet
            running=tuple(self._restrict_row(row, None) for row in snapshot.running),
        )

    def _restrict_row(self, row: Row, max_duration_s: float | None) -> Row:
        closed: tuple[NodeId, ...] = self.excluded_nodes(row.project, max_duration_s)
        if not closed:
            return row
        known = self._before.get(id(row))
        if known is None or known.row is not row or known.excluded_nodes != closed:
            known = RestrictedRow(row, closed, replace(row, avoid_nodes=(*row.avoid_nodes, *closed)))
        self._restricted_rows[id(row)] = known
        return known.restricted  # type: ignore[return-value]

    def excluded_nodes(self, project: ProjectId, max_duration_s: float | None) -> tuple[NodeId, ...]:
        """The nodes on which a job of ``project`` that lasts at most so long may not start now."""
        key = (project, max_duration_s)
        if key not in self._excluded_nodes:
            nodes = {
                node for row in self._rows if self._blocks(row, project, max_duration_s) for node in row.nodes
            }
            self._excluded_nodes[key] = tuple(sorted(nodes))
        return self._excluded_nodes[key]

    def _blocks(self, row: ReservationRow, project: ProjectId, max_duration_s: float | None) -> bool:
        ends_s = None if max_duration_s is None else self._now_s + max_duration_s
        return reservation_blocks(row, self._tree.path[self._tree.leaf_of[project]], self._now_s, ends_s)

    def explain(
        self,
        job: PendingRow,
        verdict: Verdict,
        feasible_pools: Iterable[PoolId],
        pool_states: Mapping[PoolId, PoolState],
    ) -> Verdict:
        """The verdict of a job that waits, where a reservation alone is what keeps it from starting."""
        asked = self._original_rows.get(job.job)
        if asked is None or asked is job or verdict.code not in _CAPACITY_CODES:
            return verdict
        pools = [pool_states[pool] for pool in feasible_pools]
        free = any(pool_state.fits_now(asked) for pool_state in pools)
        if not free and any(pool_state.fits_when_empty(job) for pool_state in pools):
            return verdict
        inside = {node.id for pool_state in pools for node in pool_state.available.nodes}
        blocking = (row for row in self._rows if self._blocks(row, job.project, job.time_limit_s))
        first = next((row for row in blocking if not inside.isdisjoint(row.nodes)), None)
        if first is None:  # the reserved nodes are in other pools
            return verdict
        return replace(
            verdict,
            code=VerdictCode.RESERVED_FOR_OTHER_JOB,
            message=self._message(job, first, free),
            details={
                **verdict.details,
                "reservation": first.name,
                "reserved_from_s": first.start_s,
                "reserved_until_s": first.end_s,
            },
            suggestion=verdict.suggestion,
        )

    def _message(self, job: PendingRow, row: ReservationRow, free: bool) -> str:
        """Which reservation, until when, and what would let the job pass."""
        nodes = "1 node is" if len(row.nodes) == 1 else f"{len(row.nodes)} nodes are"
        need = f"Needs {formatting.format_request(job)}; " + ("so much is free now, but " if free else "")
        until = f"until {formatting.format_time(row.end_s)}"
        if row.start_s <= self._now_s:
            return f"{need}{nodes} reserved {until} ({row.name})."
        return (
            f"{need}{nodes} reserved from {formatting.format_time(row.start_s)} {until} ({row.name}). "
            "With a time limit that ends before, it could start now."
        )


_CAPACITY_CODES = frozenset({VerdictCode.INSUFFICIENT_RESOURCES, VerdictCode.OVER_FAIR_SHARE})
