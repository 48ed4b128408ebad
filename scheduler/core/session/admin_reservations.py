"""Admin reservations: which nodes they exclude for a job.

A job may use a reserved node if its project or an ancestor of it is named in the reservation, or if its time
limit, counted from now, ends before the reservation begins. Jobs that already run there stay. Within a
decision, excluded nodes are added to ``avoid_nodes`` of the job.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import replace
from typing import TypeVar

from scheduler.core.model.project_tree import ProjectTree
from scheduler.core.model.snapshot import (
    JobId,
    NodeId,
    PendingRow,
    ProjectId,
    ReservationRow,
    RunningRow,
    Snapshot,
)
from scheduler.core.session.cache import RestrictedRow

Row = TypeVar("Row", PendingRow, RunningRow)


def reservation_blocks(
    reservation: ReservationRow, ancestors: Iterable[ProjectId], now_s: float, ends_s: float | None
) -> bool:
    """Return True if a job may not start on the reserved nodes now.

    ``ancestors`` are its project and those above; ``ends_s`` is its latest end, None is unbounded.
    """
    if reservation.end_s <= now_s or not set(ancestors).isdisjoint(reservation.projects):
        return False
    return ends_s is None or ends_s > reservation.start_s


class AdminReservations:
    """The reservations of one snapshot. ``restricted_rows`` caches rows from decision to decision."""

    def __init__(
        self, snapshot: Snapshot, tree: ProjectTree, restricted_rows: dict[int, RestrictedRow]
    ) -> None:
        self._now_s = snapshot.now_s
        self._tree = tree
        self.rows = sorted(snapshot.reservations, key=lambda row: (row.end_s, row.start_s, row.id))
        self._excluded_nodes: dict[tuple[ProjectId, float | None], tuple[NodeId, ...]] = {}
        self._before = dict(restricted_rows)
        self._restricted_rows = restricted_rows
        restricted_rows.clear()
        self._original_rows: dict[JobId, PendingRow] = {}

    def restrict(self, snapshot: Snapshot) -> Snapshot:
        """Return the snapshot with the excluded nodes added to every job."""
        if not self.rows:
            return snapshot
        self._original_rows = {row.job: row for row in snapshot.pending}
        return replace(
            snapshot,
            pending=tuple(self._restrict_row(row, row.time_limit_s) for row in snapshot.pending),
            # a migrated job starts again at an unknown time
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
        """Return the nodes where a job of ``project`` with this maximal duration may not start now."""
        key = (project, max_duration_s)
        if key not in self._excluded_nodes:
            nodes = {
                node for row in self.rows if self._blocks(row, project, max_duration_s) for node in row.nodes
            }
            self._excluded_nodes[key] = tuple(sorted(nodes))
        return self._excluded_nodes[key]

    def _blocks(self, row: ReservationRow, project: ProjectId, max_duration_s: float | None) -> bool:
        ends_s = None if max_duration_s is None else self._now_s + max_duration_s
        return reservation_blocks(row, self._tree.path[self._tree.leaf_of[project]], self._now_s, ends_s)

    def original_row(self, job: PendingRow) -> PendingRow | None:
        """Return the row of a pending job before it was restricted; None if it was not."""
        asked = self._original_rows.get(job.job)
        return None if asked is job else asked

    def first_blocking(self, job: PendingRow, nodes: Set[NodeId]) -> ReservationRow | None:
        """Return the reservation of these nodes that blocks the job and ends first."""
        blocking = (row for row in self.rows if self._blocks(row, job.project, job.time_limit_s))
        return next((row for row in blocking if not nodes.isdisjoint(row.nodes)), None)
