"""What a decision leaves for the next one: things that follow from rows alone, kept while the rows are the same.

A photograph that differs little from the one before shares most of its row objects with it. Whoever hands the same
``Memory`` to each decision spares the making of what is known already; the plans are the same with and without.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from scheduler.core.asked import Asked
from scheduler.core.cluster import NodeId, NodeRow, PendingRow, PoolId, RunningRow, Snapshot
from scheduler.core.gang import Gang, Wanted
from scheduler.core.placement import Floor
from scheduler.core.plan import ChangeKind

MOST_QUESTIONS = 100_000
"""After so many different requests the numbers given to them begin anew."""


class Narrowed(NamedTuple):
    """A row, the nodes that reservations close to it, and the row that avoids them."""

    row: object
    closed: tuple[NodeId, ...]
    narrow: object


class Variant(NamedTuple):
    """A change to a request, by fields of its row, and what it wants by pool as long as nodes are built alike."""

    kind: ChangeKind
    fields: dict[str, Any]
    wanted: dict[PoolId, Wanted]


class Seen(NamedTuple):
    """The rows of a photograph by their ``id``, and how they differ from those of the one before."""

    rows: dict[int, object]
    came: list[object]
    left: list[object]


class Memory:
    """Kept between decisions; one at a time may use it."""

    def __init__(self) -> None:
        self.checked: Mapping[int, object] = {}
        self.asked = Asked()
        self.floors: dict[PoolId, Floor] = {}
        self.keys: dict[tuple[object, ...], int] = {}
        self.questions: dict[tuple[object, ...], int] = {}
        self.kinds: dict[tuple[object, ...], int] = {}
        self.possible: dict[tuple[object, ...], list[PoolId]] = {}
        self.changes: dict[Hashable, list[Variant]] = {}  # by kind, or by all that is asked
        self.narrowed: dict[int, Narrowed] = {}
        self._waiting: dict[int, Gang] = {}
        self._running: dict[int, Gang] = {}
        self._next_running: dict[int, Gang] = {}
        self._builds: dict[int, tuple[NodeRow, tuple[object, ...]]] = {}
        self._frame: tuple[object, ...] = ()
        self._rows: dict[int, object] = {}
        self._floor_of: dict[PoolId, Floor] = {}

    def build(self, nodes: tuple[NodeRow, ...]) -> tuple[object, ...]:
        """What of the nodes decides which jobs could ever run: all but what is used, ready or healthy."""
        before, self._builds = self._builds, {}
        found = []
        for node in nodes:
            known = before.get(id(node))
            if known is None or known[0] is not node:
                gpus = tuple(
                    (gpu.uuid, gpu.model, gpu.memory_mib, gpu.mig_profile, gpu.compute_capability)
                    for gpu in node.gpus
                )
                known = (node, (node.id, node.pool, node.cpu_milli, node.memory_mib, node.labels, gpus))
            self._builds[id(node)] = known
            found.append(known[1])
        return tuple(found)

    def begin(self, frame: tuple[object, ...]) -> None:
        """Start a decision; when its ``frame`` (projects, pools, quotas, ...) is another, rows are made anew."""
        self._running, self._next_running = self._next_running, {}
        if frame != self._frame:
            self._frame = frame
            self._waiting, self._running = {}, {}
            self.checked, self.possible, self.changes = {}, {}, {}
        if max(map(len, (self.keys, self.questions, self.kinds))) > MOST_QUESTIONS:
            for known in (self.keys, self.questions, self.kinds, self.possible, self.changes, self._waiting):
                known.clear()

    def look(self, snapshot: Snapshot) -> Seen:
        """Which rows are not those of the last photograph."""
        rows: tuple[object, ...] = (*snapshot.nodes, *snapshot.running, *snapshot.pending)
        now, before = dict(zip(map(id, rows), rows, strict=True)), self._rows
        came, left = now.keys() - before.keys(), before.keys() - now.keys()
        return Seen(now, [now[key] for key in came], [before[key] for key in left])

    def take(self, seen: Seen) -> None:
        """These rows passed the checks; as they are held here, no others take their ids."""
        self._rows = self.checked = seen.rows
        self.asked.change(seen.came, seen.left)

    def waiting(self, rows: Iterable[PendingRow]) -> list[Gang | None]:
        """For each row the gang made of this very row, if the last decision left it as it was."""
        known = self._waiting.get
        return [
            gang if (gang := known(id(row))) is not None and gang.row is row and not gang.touched else None
            for row in rows
        ]

    def running(self, rows: Sequence[RunningRow], floor: Floor) -> list[Gang | None]:
        """The same for the running jobs of a pool, whose places are places of ``floor``."""
        if not rows or self._floor_of.get(rows[0].pool) is not floor:
            return [None] * len(rows)
        known = self._running.get
        return [
            gang
            if (gang := known(id(row))) is not None and gang.running is row and not gang.touched
            else None
            for row in rows
        ]

    def keep_waiting(self, gangs: Collection[Gang]) -> None:
        """For the next decision: gangs of which nothing runs. Each holds its row, so no other takes the row's id."""
        rows = [gang.row for gang in gangs]
        self._waiting = dict(zip(map(id, rows), gangs, strict=True))

    def keep_running(self, gangs: Iterable[Gang]) -> None:
        """For the next decision: gangs that run and hold their rows."""
        self._next_running.update((id(gang.running), gang) for gang in gangs)

    def end_of_scenes(self) -> None:
        """All running jobs of this decision are made: the next one may use them with the same floors."""
        self._floor_of = dict(self.floors)
