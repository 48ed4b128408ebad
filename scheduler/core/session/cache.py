"""Results kept from one decision to the next: derived from rows, valid while the row objects are the same.

A snapshot shares most row objects with the one before it. Reusing one ``DecisionCache`` saves recomputation
and does not affect the plans.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

from scheduler.core.capacity.fragmentation import DemandHistogram
from scheduler.core.capacity.placement import NodePlacer
from scheduler.core.model.plan import AlternativeKind
from scheduler.core.model.snapshot import NodeId, NodeRow, PendingRow, PoolId, RunningRow, Snapshot
from scheduler.core.session.gang import BatchRequest, Gang

MAX_CLASS_IDS = 100_000
"""Numbering of request classes restarts after this many."""
MAX_VARIANT_LISTS = 200
"""Variants are kept of this many requests, and of as many as are pending: a list takes about 20 kB."""


class RestrictedRow(NamedTuple):
    """A row, the nodes that admin reservations exclude for it, and the row that avoids them."""

    row: object
    excluded_nodes: tuple[NodeId, ...]
    restricted: object


class RequestVariant(NamedTuple):
    """A changed request, by fields of its row, and its batch by pool.

    It can only fit where ``probe`` does, the least of several variants.
    """

    kind: AlternativeKind
    fields: dict[str, Any]
    batches: dict[PoolId, BatchRequest]
    probe: RequestVariant | None = None


class RowChanges(NamedTuple):
    """The rows of a snapshot by ``id()``, and the differences from the snapshot before it."""

    rows: dict[int, object]
    added: list[object]
    removed: list[object]


class DecisionCache:
    """Results kept between decisions; only one decision may use it at a time."""

    def __init__(self) -> None:
        self.validated: Mapping[int, object] = {}
        self.demand = DemandHistogram()
        self.placers: dict[PoolId, NodePlacer] = {}
        self.shape_ids: dict[tuple[object, ...], int] = {}
        self.quota_class_ids: dict[tuple[object, ...], int] = {}
        self.class_ids: dict[tuple[object, ...], int] = {}
        self.feasible_pools: dict[tuple[object, ...], list[PoolId]] = {}
        self.variants: dict[Hashable, list[RequestVariant]] = {}  # by class id, or by request key
        self.restricted_rows: dict[int, RestrictedRow] = {}
        self._pending: dict[int, Gang] = {}
        self._running: dict[int, Gang] = {}
        self._next_running: dict[int, Gang] = {}
        self._hardware: dict[int, tuple[NodeRow, tuple[object, ...]]] = {}
        self._frame: tuple[object, ...] = ()
        self._rows: dict[int, object] = {}
        self._last_placers: dict[PoolId, NodePlacer] = {}

    def hardware_key(self, nodes: tuple[NodeRow, ...]) -> tuple[object, ...]:
        """Return what decides which jobs could ever run: nodes without use, readiness and health."""
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

    def begin(self, frame: tuple[object, ...], pending_count: int) -> None:
        """Start a decision; discard results of rows if ``frame`` (projects, pools, quotas, ...) changed."""
        self._running, self._next_running = self._next_running, {}
        if frame != self._frame:
            self._frame = frame
            self._pending, self._running = {}, {}
            self.validated, self.feasible_pools, self.variants = {}, {}, {}
        if len(self.variants) > MAX_VARIANT_LISTS + pending_count:
            self.variants.clear()  # users preview more requests than ever wait
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
        """Return the rows that differ from the last snapshot."""
        rows: tuple[object, ...] = (*snapshot.nodes, *snapshot.running, *snapshot.pending)
        now, before = dict(zip(map(id, rows), rows, strict=True)), self._rows
        came, left = now.keys() - before.keys(), before.keys() - now.keys()
        return RowChanges(now, [now[key] for key in came], [before[key] for key in left])

    def accept(self, changes: RowChanges) -> None:
        """Record that these rows are valid, and reference them, so that no ``id()`` is reused."""
        self._rows = self.validated = changes.rows
        self.demand.update(changes.added, changes.removed)

    def pending_gangs(self, rows: Iterable[PendingRow]) -> list[Gang | None]:
        """Return for each row the gang that was built from this object, if it is unchanged."""
        return _unchanged_gangs(self._pending, rows, attrgetter("pending_row"))

    def running_gangs(self, rows: Sequence[RunningRow], placer: NodePlacer) -> list[Gang | None]:
        """Return the same for running jobs of one pool, whose slots refer to ``placer``."""
        if not rows or self._last_placers.get(rows[0].pool) is not placer:
            return [None] * len(rows)
        return _unchanged_gangs(self._running, rows, attrgetter("running_row"))

    def store_pending(self, gangs: Collection[Gang]) -> None:
        """Keep pending gangs for the next decision, with their rows, so that no ``id()`` is reused."""
        rows = [gang.pending_row for gang in gangs]
        self._pending = dict(zip(map(id, rows), gangs, strict=True))

    def store_running(self, gangs: Iterable[Gang]) -> None:
        """Keep running gangs, which reference their rows, for the next decision."""
        self._next_running.update((id(gang.running_row), gang) for gang in gangs)

    def finish_running(self) -> None:
        """Mark all running gangs as built; the next decision may reuse them with the same placers."""
        self._last_placers = dict(self.placers)


def _unchanged_gangs(
    known: Mapping[int, Gang], rows: Iterable[object], row_of: Callable[[Gang], object]
) -> list[Gang | None]:
    return [
        gang if (gang := known.get(id(row))) is not None and row_of(gang) is row and not gang.dirty else None
        for row in rows
    ]
