"""What a decision leaves for the next one: things that follow from rows alone, kept while the rows are the same.

A snapshot that differs little from the one before shares most of its row objects with it. Whoever hands the same
``Memory`` to each decision spares the making of what is known already; the plans are the same with and without.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from scheduler.core.capacity.asked import DemandHistogram
from scheduler.core.capacity.placement import NodePlacer
from scheduler.core.model.plan import AlternativeKind
from scheduler.core.model.snapshot import NodeId, NodeRow, PendingRow, PoolId, RunningRow, Snapshot
from scheduler.core.session.gang import BatchRequest, Gang

MAX_CLASS_IDS = 100_000
"""After so many different requests the numbers given to them begin anew."""


class RestrictedRow(NamedTuple):
    """A row, the nodes that reservations close to it, and the row that avoids them."""

    row: object
    excluded_nodes: tuple[NodeId, ...]
    restricted: object


class RequestVariant(NamedTuple):
    """A change to a request, by fields of its row, and what it wants by pool as long as nodes are built alike."""

    kind: AlternativeKind
    fields: dict[str, Any]
    batches: dict[PoolId, BatchRequest]


class RowChanges(NamedTuple):
    """The rows of a snapshot by their ``id``, and how they differ from those of the one before."""

    rows: dict[int, object]
    added: list[object]
    removed: list[object]


class DecisionCache:
    """Kept between decisions; one at a time may use it."""

    def __init__(self) -> None:
        self.validated: Mapping[int, object] = {}
        self.demand = DemandHistogram()
        self.placers: dict[PoolId, NodePlacer] = {}
        self.shape_ids: dict[tuple[object, ...], int] = {}
        self.quota_class_ids: dict[tuple[object, ...], int] = {}
        self.class_ids: dict[tuple[object, ...], int] = {}
        self.feasible_pools: dict[tuple[object, ...], list[PoolId]] = {}
        self.variants: dict[Hashable, list[RequestVariant]] = {}  # by kind, or by all that is asked
        self.restricted_rows: dict[int, RestrictedRow] = {}
        self._pending: dict[int, Gang] = {}
        self._running: dict[int, Gang] = {}
        self._next_running: dict[int, Gang] = {}
        self._hardware: dict[int, tuple[NodeRow, tuple[object, ...]]] = {}
        self._frame: tuple[object, ...] = ()
        self._rows: dict[int, object] = {}
        self._last_placers: dict[PoolId, NodePlacer] = {}

    def hardware_key(self, nodes: tuple[NodeRow, ...]) -> tuple[object, ...]:
        """What of the nodes decides which jobs could ever run: all but what is used, ready or healthy."""
        before, self._hardware = self._hardware, {}
        found = []
        for node in nodes:
            known = before.get(id(node))
            if known is None or known[0] is not node:
                gpus = tuple(
                    (gpu.uuid, gpu.model, gpu.memory_mib, gpu.mig_profile, gpu.compute_capability)
                    for gpu in node.gpus
                )
                known = (node, (node.id, node.pool, node.cpu_milli, node.memory_mib, node.labels, gpus))
            self._hardware[id(node)] = known
            found.append(known[1])
        return tuple(found)

    def begin(self, frame: tuple[object, ...]) -> None:
        """Start a decision; when its ``frame`` (projects, pools, quotas, ...) is another, rows are made anew."""
        self._running, self._next_running = self._next_running, {}
        if frame != self._frame:
            self._frame = frame
            self._pending, self._running = {}, {}
            self.validated, self.feasible_pools, self.variants = {}, {}, {}
        if max(map(len, (self.shape_ids, self.quota_class_ids, self.class_ids))) > MAX_CLASS_IDS:
            for known in (
                self.shape_ids,
                self.quota_class_ids,
                self.class_ids,
                self.feasible_pools,
                self.variants,
                self._pending,
            ):
                known.clear()

    def compare(self, snapshot: Snapshot) -> RowChanges:
        """Which rows are not those of the last snapshot."""
        rows: tuple[object, ...] = (*snapshot.nodes, *snapshot.running, *snapshot.pending)
        now, before = dict(zip(map(id, rows), rows, strict=True)), self._rows
        came, left = now.keys() - before.keys(), before.keys() - now.keys()
        return RowChanges(now, [now[key] for key in came], [before[key] for key in left])

    def accept(self, changes: RowChanges) -> None:
        """These rows passed the checks; as they are held here, no others take their ids."""
        self._rows = self.validated = changes.rows
        self.demand.update(changes.added, changes.removed)

    def pending_gangs(self, rows: Iterable[PendingRow]) -> list[Gang | None]:
        """For each row the gang made of this very row, if the last decision left it as it was."""
        known = self._pending.get
        return [
            gang
            if (gang := known(id(row))) is not None and gang.pending_row is row and not gang.dirty
            else None
            for row in rows
        ]

    def running_gangs(self, rows: Sequence[RunningRow], placer: NodePlacer) -> list[Gang | None]:
        """The same for the running jobs of a pool, whose places are places of ``placer``."""
        if not rows or self._last_placers.get(rows[0].pool) is not placer:
            return [None] * len(rows)
        known = self._running.get
        return [
            gang
            if (gang := known(id(row))) is not None and gang.running_row is row and not gang.dirty
            else None
            for row in rows
        ]

    def store_pending(self, gangs: Collection[Gang]) -> None:
        """For the next decision: gangs of which nothing runs. Each holds its row, so no other takes the row's id."""
        rows = [gang.pending_row for gang in gangs]
        self._pending = dict(zip(map(id, rows), gangs, strict=True))

    def store_running(self, gangs: Iterable[Gang]) -> None:
        """For the next decision: gangs that run and hold their rows."""
        self._next_running.update((id(gang.running_row), gang) for gang in gangs)

    def finish_running(self) -> None:
        """All running jobs of this decision are made: the next one may use them with the same floors."""
        self._last_placers = dict(self.placers)
