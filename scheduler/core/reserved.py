"""Nodes that administrators reserve: which of them are closed to a job, and what it is told of that.

A job may stand on a reserved node when one of the named projects is its own or above its own, or when it is surely
gone before the reservation begins: by its time limit, counted from now. A job without a limit never surely is. Who
stands there already stays. Inside a decision closed nodes count among those that a job avoids.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TypeVar

from portal.words.reasons import VerdictCode
from scheduler.core import words
from scheduler.core.cluster import (
    JobId,
    NodeId,
    PendingRow,
    PoolId,
    ProjectId,
    ReservationRow,
    RunningRow,
    Snapshot,
)
from scheduler.core.memory import Narrowed
from scheduler.core.plan import Verdict
from scheduler.core.scene import PoolScene
from scheduler.core.tree import Tree

Row = TypeVar("Row", PendingRow, RunningRow)


def stands_in_the_way(
    reservation: ReservationRow, line: Iterable[ProjectId], now_s: float, ends_s: float | None
) -> bool:
    """True when a job of a project (``line``: it and those above) may not start on the reserved nodes now.

    ``ends_s`` is when it is surely gone; None is never.
    """
    if reservation.to_s <= now_s or not set(line).isdisjoint(reservation.projects):
        return False
    return ends_s is None or ends_s > reservation.from_s


class Reserved:
    """The reservations of one photograph. ``narrowed`` holds rows from decision to decision."""

    def __init__(self, snapshot: Snapshot, tree: Tree, narrowed: dict[int, Narrowed]) -> None:
        self._now_s = snapshot.now_s
        self._tree = tree
        self._rows = sorted(snapshot.reservations, key=lambda row: (row.to_s, row.from_s, row.id))
        self._closed: dict[tuple[ProjectId, float | None], tuple[NodeId, ...]] = {}
        self._before = dict(narrowed)
        self._kept = narrowed
        narrowed.clear()
        self._asked: dict[JobId, PendingRow] = {}

    @property
    def any(self) -> bool:
        """True when any nodes are reserved, now or later."""
        return bool(self._rows)

    def narrow(self, snapshot: Snapshot) -> Snapshot:
        """The photograph in which every job avoids the nodes that are closed to it."""
        if not self._rows:
            return snapshot
        self._asked = {row.job: row for row in snapshot.pending}
        return replace(
            snapshot,
            pending=tuple(self._narrow(row, row.time_limit_s) for row in snapshot.pending),
            # one that is moved begins anew at a time that nobody knows yet
            running=tuple(self._narrow(row, None) for row in snapshot.running),
        )

    def _narrow(self, row: Row, lasts_s: float | None) -> Row:
        closed: tuple[NodeId, ...] = self.closed_to(row.project, lasts_s)
        if not closed:
            return row
        known = self._before.get(id(row))
        if known is None or known.row is not row or known.closed != closed:
            known = Narrowed(row, closed, replace(row, avoid_nodes=(*row.avoid_nodes, *closed)))
        self._kept[id(row)] = known
        return known.narrow  # type: ignore[return-value]

    def closed_to(self, project: ProjectId, lasts_s: float | None) -> tuple[NodeId, ...]:
        """The nodes on which a job of ``project`` that lasts at most so long may not start now."""
        key = (project, lasts_s)
        if key not in self._closed:
            nodes = {node for row in self._rows if self._blocks(row, project, lasts_s) for node in row.nodes}
            self._closed[key] = tuple(sorted(nodes))
        return self._closed[key]

    def _blocks(self, row: ReservationRow, project: ProjectId, lasts_s: float | None) -> bool:
        ends_s = None if lasts_s is None else self._now_s + lasts_s
        return stands_in_the_way(row, self._tree.path[self._tree.leaf_of[project]], self._now_s, ends_s)

    def explained(
        self,
        job: PendingRow,
        verdict: Verdict,
        possible: Iterable[PoolId],
        scenes: Mapping[PoolId, PoolScene],
    ) -> Verdict:
        """The verdict of a job that waits, where a reservation alone is what keeps it from starting."""
        asked = self._asked.get(job.job)
        if asked is None or asked is job or verdict.code not in _ABOUT_PLACES:
            return verdict
        pools = [scenes[pool] for pool in possible]
        free = any(scene.fits_now(asked) for scene in pools)
        if not free and any(scene.would_fit_empty(job) for scene in pools):
            return verdict
        inside = {node.id for scene in pools for node in scene.floor.nodes}
        blocking = (row for row in self._rows if self._blocks(row, job.project, job.time_limit_s))
        first = next((row for row in blocking if not inside.isdisjoint(row.nodes)), None)
        if first is None:  # the reserved nodes are in other pools
            return verdict
        return replace(
            verdict,
            code=VerdictCode.HELD_FOR_RESERVATION,
            sentence=self._sentence(job, first, free),
            numbers={
                **verdict.numbers,
                "reservation": first.name,
                "reserved_from_s": first.from_s,
                "reserved_until_s": first.to_s,
            },
            cheapest=verdict.cheapest,
        )

    def _sentence(self, job: PendingRow, row: ReservationRow, free: bool) -> str:
        """Which reservation, until when, and what would let the job pass."""
        nodes = "1 node is" if len(row.nodes) == 1 else f"{len(row.nodes)} nodes are"
        need = f"Needs {words.request(job)}; " + ("so much is free now, but " if free else "")
        until = f"until {words.moment(row.to_s)}"
        if row.from_s <= self._now_s:
            return f"{need}{nodes} reserved {until} ({row.name})."
        return (
            f"{need}{nodes} reserved from {words.moment(row.from_s)} {until} ({row.name}). "
            "With a time limit that ends before, it could start now."
        )


_ABOUT_PLACES = frozenset({VerdictCode.NO_FIT_NOW, VerdictCode.SHARE_USED_UP})
