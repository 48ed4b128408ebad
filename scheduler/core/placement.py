"""Where tasks should stand: one pool's nodes, scored per shape of task.

Capacities and scores are kept per shape and made anew only for nodes that changed since. Equal scores fall to the
node whose name and id sort first, so the same photograph gives the same places whatever order its rows came in.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Self, TypeVar

import numpy as np

from portal.words.throughput import Speed, models_as_one
from scheduler.core.cluster import (
    WHOLE_MILLI,
    Ask,
    NodeRow,
    TopologyRow,
)
from scheduler.core.fragmentation import TOGETHER, Fragmentation, Kind, Task, usual
from scheduler.core.pace import UNSEEN, Pace, Spot, Spots, SpotTable
from scheduler.core.shape import Bools, Held, Ints, Shape
from scheduler.core.stock import NO_BOUND, Stock
from scheduler.core.tenants import RoomOfShares
from scheduler.core.topology import NOWHERE, fabric_of, near_slots

_Number = TypeVar("_Number", int, Ints)

WORST = np.int64(1) << 60


class _Scores:
    """Capacities and scores of one shape over all nodes, and how much of the change log they have seen."""

    __slots__ = ("best_free", "capacity", "fitting", "room", "score", "seen")

    def __init__(self, nodes: int, seen: int) -> None:
        self.capacity: Ints = np.zeros(nodes, dtype=np.int64)
        self.score: Ints = np.zeros(nodes, dtype=np.int64)
        self.best_free: Ints = np.zeros(nodes, dtype=np.int64)  # of the GPU that a share takes; 0 is any
        self.fitting: Bools = np.zeros(nodes, dtype=bool)
        self.seen = seen
        self.room: int | None = None  # the sum of capacities, once somebody asks


class Floor(Stock):
    """The nodes of one pool, what is free on them and which of them a task should have.

    A gang that needs several nodes keeps within few levels of the fabric that ``topologies`` tell.
    ``asked`` tells the strategy "fragmentation" what tasks ask here and how often; without it, it packs.
    """

    def __init__(
        self,
        nodes: Iterable[NodeRow],
        strategy: str,
        *,
        empty: bool = False,
        asked: Mapping[Ask, int] | None = None,
        together: int = TOGETHER,
        topologies: Iterable[TopologyRow] = (),
    ) -> None:
        super().__init__(nodes, empty=empty)
        self.strategy = strategy
        self.topologies = tuple(topologies)
        self._fabric = None if strategy == "spread" else fabric_of(self.topologies, self.nodes)
        self._islands = [
            [NOWHERE if gpu.island is None else gpu.island for gpu in gpus]
            if len({gpu.island for gpu in gpus}) > 1
            else None
            for gpus in self.gpus
        ]
        self._sliced = any(gpu.mig_profile for gpus in self.gpus for gpu in gpus)
        self._scores: dict[Shape, _Scores] = {}
        self._shared_rooms: dict[Shape, RoomOfShares] = {}  # by shapes of no tenant
        self._measured: dict[Shape, _Scores] = {}  # by fragmentation
        self._spots: dict[tuple[Shape, int], Spots] = {}
        self._spot_table = SpotTable()
        self._fragmentation: Fragmentation | None = None
        self._usual: dict[Ask, int] = {}
        self._lost_seen = 0
        if strategy == "fragmentation" and asked:
            self._measure_fragmentation(asked, together)

    def refresh(self, nodes: Iterable[NodeRow], asked: Mapping[Ask, int] | None = None) -> bool:
        """Take over newer rows of the very same nodes; False and nothing changed when they are built otherwise."""
        opened = self._renew(nodes)
        if opened is None:
            return False
        if opened:
            self._scores.clear()
            self._shared_rooms.clear()
            self._measured.clear()
        for scores in (*self._scores.values(), *self._measured.values()):
            scores.seen = 0
        for room in self._shared_rooms.values():
            room.seen = 0
        for spots in self._spots.values():
            spots.seen = 0
        self._lost_seen = 0
        if self.strategy == "fragmentation" and asked and usual(asked) != self._usual:
            self._measured.clear()
            self._measure_fragmentation(asked, TOGETHER)
        return True

    def _measure_fragmentation(self, asked: Mapping[Ask, int], together: int) -> None:
        """Get ready to score by fragmentation. A node of several kinds of GPU counts as its first one."""
        first = [Kind.of(gpus[0]) if gpus else Kind("", 0) for gpus in self.gpus]
        kinds = sorted(set(first))
        self._kind: Ints = np.array([kinds.index(kind) for kind in first], dtype=np.int64)
        self._usual = usual(asked)
        self._fragmentation = Fragmentation(kinds, self._usual, together)
        self._as_published = not together  # FGD's ties, too
        self._lost: Ints = self._lost_on(np.arange(len(self.nodes)))
        self._lost_seen = len(self._changed)

    def copy(self) -> Self:
        """The same floor, to change on its own; what never changes is shared."""
        other = super().copy()
        other._scores = {}
        other._shared_rooms = {}
        other._measured = {}
        other._spots = {}
        if self._fragmentation is not None:
            # what it lost stays known of the nodes that have not changed since
            other._lost = self._lost.copy()
            other._changed = self._changed[self._lost_seen :]
            other._lost_seen = 0
        return other

    def capacity(self, shape: Shape) -> Ints:
        """How many tasks of ``shape`` each node could take now, exactly."""
        measured = bool(self._measured) and shape in self._measured
        return self._fresh(shape, measured).capacity

    def room(self, shape: Shape) -> int:
        """How many tasks of ``shape`` all nodes together could take now."""
        if shape.tenant is not None and shape.gpus == 1 and self._tenants.apart:
            return self._room_of_shares(shape._replace(tenant=None)).of(self._tenants.number_of(shape.tenant))
        scores = self._fresh(shape, bool(self._measured) and shape in self._measured)
        if scores.room is None:
            scores.room = int(scores.capacity.sum())
        return scores.room

    def _room_of_shares(self, shape: Shape) -> RoomOfShares:
        """The room of tasks of this shape for every tenant: for one alone it costs nearly as much."""
        room = self._shared_rooms.get(shape)
        if room is None:
            room = self._shared_rooms[shape] = RoomOfShares(len(self.nodes), len(self._changed))
            rows = np.arange(len(self.nodes))
        elif room.seen < len(self._changed):
            rows = np.fromiter(set(self._changed[room.seen :]), dtype=np.int64)
            room.seen = len(self._changed)
        else:
            return room
        free = self.free_milli[rows]
        fits = np.where(self.eligible(shape)[rows], free // self._milli(shape, rows), 0)
        tenants = self._tenants.of_gpu[rows]
        room.update(rows, fits, free == WHOLE_MILLI, tenants, self._bound_beside_gpus(shape, rows))
        return room

    def place_gang(
        self, shape: Shape, tasks: int, rather_not: Floor | None = None, speeds: Sequence[Speed] = ()
    ) -> list[Held] | None:
        """Take places for all ``tasks`` of a gang, or None and nothing taken.

        On a node, GPUs that are free on the floor ``rather_not`` are taken last. Of nodes with equal scores one goes
        first that gives the gang a faster layout by ``speeds``.
        """
        measured = tasks == 1 and self._fragmentation is not None
        if tasks == 1 and (shape.whole or not measured):
            fitting = np.flatnonzero(self._fresh(shape, False).fitting)
            if len(fitting) <= 1:  # there is nothing to choose between
                return [self._take(int(node), shape, 1, rather_not) for node in fitting] or None
        scores = self._fresh(shape, measured)
        if tasks > 1 and int(np.minimum(scores.capacity, tasks).sum()) < tasks:
            return None
        if tasks == 1 and not scores.fitting.any():
            return None
        held: list[Held] = []
        near: Bools | None = None
        if self._fabric is not None and tasks > int(scores.capacity.max()):
            near = self._fabric.nearest(scores.capacity, tasks)
        pace = Pace(speeds, self._crossed(near)) if speeds else None
        while len(held) < tasks:
            scores = self._fresh(shape, measured)
            missing = tasks - len(held)
            rank, count = self._ranked(scores, missing, near)
            node = int(rank.argmin())
            if pace is not None:
                node = self._fastest(pace, shape, missing, count, np.flatnonzero(rank == rank[node]))
            best_free = int(scores.best_free[node]) if measured else 0
            held.extend(self._take(node, shape, count - i, rather_not, best_free) for i in range(count))
        return held

    def _ranked(self, scores: _Scores, missing: int, near: Bools | None) -> tuple[Ints, int]:
        """How good each node is for the next tasks of a gang, least first, and how many of them it is to take.

        Of the nodes ``near`` if any are named.

        Pack: the tightest node that holds all that is missing, else the roomiest one filled up, so that a
        gang stands on few nodes. Spread: one task on the emptiest node.
        """
        fitting = scores.fitting if near is None else scores.fitting & near
        if self.strategy == "spread" or missing == 1:
            return np.where(fitting, scores.score, WORST), 1
        capacity = scores.capacity if near is None else np.where(near, scores.capacity, 0)
        enough = capacity >= missing
        if enough.any():
            return np.where(enough, scores.score, WORST), missing
        most = int(capacity.max())
        return np.where(capacity == most, scores.score, WORST), most

    def _crossed(self, near: Bools | None) -> int:
        """Levels of the fabric that a gang crosses on several of the nodes ``near``, or of all."""
        if self._fabric is None:
            return 0
        return len(self._fabric.levels) if near is None else self._fabric.crossed(near)

    def _fastest(self, pace: Pace, shape: Shape, missing: int, count: int, equal: Ints) -> int:
        """Of nodes with equal scores the first of those where ``pace`` is best."""
        numbers, first = np.unique(self._lying(shape, count, equal), return_index=True)
        order = first.argsort()
        spots = [self._spot_table.spots[number] for number in numbers[order]]
        return int(equal[first[order[pace.choose(spots, missing, count)]]])

    def _lying(self, shape: Shape, count: int, nodes: Ints) -> Ints:
        """How ``count`` tasks of ``shape`` would lie on these nodes, as numbers of the table of spots."""
        spots = self._spots.get((shape, count))
        if spots is None:
            spots = self._spots[shape, count] = Spots(len(self.nodes), len(self._changed))
        elif spots.seen < len(self._changed):
            spots.of_node[self._changed[spots.seen :]] = UNSEEN
            spots.seen = len(self._changed)
        for node in nodes[spots.of_node[nodes] == UNSEEN].tolist():
            spots.of_node[node] = self._spot_table.number(self._spot(shape, count, node))
        return np.asarray(spots.of_node[nodes])

    def _spot(self, shape: Shape, count: int, node: int) -> Spot:
        """How ``count`` tasks would lie on a node that can take them."""
        gpus = self.gpus[node]
        models = {gpu.model for gpu in gpus}
        if len(models) == 1 and self._islands[node] is None:
            return Spot(models.pop(), 1)
        milli = shape.milli if shape.share_mib is None else int(self.milli_on(shape)[node])
        free = self.free_milli[node].tolist()
        taken: set[int] = set()
        for i in range(count):
            slots = self._pick(node, shape, count - i, milli, free)
            for slot in slots:
                free[slot] -= milli
            taken.update(slots)
        return Spot(
            models_as_one(gpus[slot].model for slot in taken), len({gpus[slot].island for slot in taken})
        )

    def _fresh(self, shape: Shape, measured: bool) -> _Scores:
        """Scores of ``shape`` that know of every change so far; ``measured`` by fragmentation."""
        cache = self._measured if measured else self._scores
        scores = cache.get(shape)
        if scores is None:
            rows = np.arange(len(self.nodes))
            scores = cache[shape] = _Scores(len(rows), len(self._changed))
        elif scores.seen < len(self._changed):
            changed = set(self._changed[scores.seen :])
            scores.seen, scores.room = len(self._changed), None
            if len(changed) == 1 and not measured and self._refresh_one(scores, shape, *changed):
                return scores
            rows = np.fromiter(changed, dtype=np.int64)
        else:
            return scores
        capacity = self.capacity_of(shape, rows)
        scores.capacity[rows] = capacity
        scores.fitting[rows] = capacity > 0
        if measured:
            scores.score[rows], scores.best_free[rows] = self._by_fragmentation(shape, rows, capacity)
        else:
            scores.score[rows] = self._by_room(shape, rows)
        return scores

    def _refresh_one(self, scores: _Scores, shape: Shape, node: int) -> bool:
        """Bring the scores of one node up to date without the cost of arrays; False when that cannot be done."""
        if self.strategy != "spread" and not shape.whole and shape.gpus == 1:
            return False  # it looks for the GPU that it fills best
        capacity, free = self.capacity_on(shape, node), self.free_milli[node].tolist()
        scores.capacity[node] = capacity
        scores.fitting[node] = capacity > 0
        room = sum(free)
        scores.score[node] = -room if self.strategy == "spread" else _packed(free.count(WHOLE_MILLI), room)
        return True

    def _by_room(self, shape: Shape, rows: Ints) -> Ints:
        """How much room a node would leave broken up, or its load when spreading.

        Pack ranks nodes by whole GPUs free, then by what is free in all, so that holes stay large; a share
        of a GPU first looks for the shared GPU that it fills best.
        """
        free = self.free_milli[rows]
        whole_free = (free == WHOLE_MILLI).sum(axis=1)
        room = _packed(whole_free, free.sum(axis=1))
        if self.strategy == "spread":
            return np.asarray(-free.sum(axis=1), dtype=np.int64)
        if shape.whole or shape.gpus != 1:
            return np.asarray(room, dtype=np.int64)
        eligible = self.welcome(shape, rows)
        milli = self._milli(shape, rows)
        shared = eligible & (free < WHOLE_MILLI) & (free >= milli)
        left = np.where(shared, free - milli, WHOLE_MILLI).min(axis=1)
        return np.asarray(np.where(left < WHOLE_MILLI, left, WHOLE_MILLI + room), dtype=np.int64)

    def _by_fragmentation(self, shape: Shape, rows: Ints, capacity: Ints) -> tuple[Ints, Ints]:
        """How much of the free GPUs a task on each node would lose to the usual requests; see fragmentation.py."""
        score, best_free = np.full(len(rows), WORST), np.zeros(len(rows), dtype=np.int64)
        able = (capacity > 0).nonzero()[0]  # an overfull node has less than none
        if not len(able) or self._fragmentation is None:
            return score, best_free
        if self._lost_seen < len(self._changed):
            changed = np.fromiter(set(self._changed[self._lost_seen :]), dtype=np.int64)
            self._lost[changed] = self._lost_on(changed)
            self._lost_seen = len(self._changed)
        nodes = rows[able]
        free, slots = self._emptiest_first(nodes)
        fits = free >= self._milli(shape, nodes)
        if self._sliced or shape.picky or shape.tenant is not None:
            eligible = self.welcome(shape, nodes)
            fits &= np.take_along_axis(eligible, slots, axis=1)
        task = Task(
            shape.gpus,
            self.milli_on(shape)[nodes],
            self.cpu_free[nodes] - shape.cpu_milli,
            self.memory_free[nodes] - shape.memory_mib,
        )
        points, best = self._fragmentation.best(task, free, fits, self._kind[nodes], self._lost[nodes])
        score[able], best_free[able] = (100 - points) * NO_BOUND, best
        if not shape.gpus and not self._as_published:  # among equals it leaves nodes with free GPUs alone
            score[able] += free.sum(axis=1)
        return score, best_free

    def _lost_on(self, nodes: Ints) -> Ints:
        free, _ = self._emptiest_first(nodes)
        if self._fragmentation is None:
            return np.zeros(len(nodes), dtype=np.int64)
        return self._fragmentation.lost(
            free, self._kind[nodes], self.cpu_free[nodes], self.memory_free[nodes]
        )

    def _emptiest_first(self, nodes: Ints) -> tuple[Ints, Ints]:
        """What is free on each GPU, the emptiest first, and which slots these are."""
        width = self.free_milli.shape[1]
        keys = np.sort(np.arange(width) - np.maximum(self.free_milli[nodes], 0) * width, axis=1)
        return -(keys // width), keys % width

    # -- taking ------------------------------------------------------------------------------------------

    def _take(
        self, node: int, shape: Shape, count: int, rather_not: Floor | None, best_free: int = 0
    ) -> Held:
        """Take one of the ``count`` tasks that come to ``node``; a share best where ``best_free`` is free."""
        milli = shape.milli if shape.share_mib is None else int(self.milli_on(shape)[node])
        slots: tuple[int, ...] = ()
        if shape.gpus:
            free = self.free_milli[node].tolist()
            slots = self._pick(node, shape, count, milli, free, rather_not, best_free)
        tenant = self._tenants.number_of(shape.tenant)
        held = Held(node, slots, milli, shape.cpu_milli, shape.memory_mib, tenant)
        self.change(held, -1)
        return held

    def _pick(
        self,
        node: int,
        shape: Shape,
        count: int,
        milli: int,
        free: list[int],
        rather_not: Floor | None = None,
        best_free: int = 0,
    ) -> tuple[int, ...]:
        """The GPUs for one of ``count`` tasks on a node that has so much ``free`` on each."""
        eligible = self.welcome(shape, node).tolist()
        fitting = [s for s, ok in enumerate(eligible) if ok and free[s] >= milli]
        roomy = [s for s in fitting if free[s] >= milli * count]
        alone = shape.whole or shape.gpus == 1
        if alone or len(roomy) >= shape.gpus:
            # The fullest that fit; with several GPUs a task those that hold all of its sisters too.
            fitting = sorted(fitting if alone else roomy, key=lambda s: free[s])
            islands = self._islands[node]
            if islands is not None and shape.whole:
                first = near_slots(fitting, islands, shape.gpus)
                fitting = first + [s for s in fitting if s not in first]
            if best_free:
                fitting.sort(key=lambda s: free[s] != best_free)
            if rather_not is not None:
                free_there = rather_not.free_milli[node].tolist()
                fitting.sort(key=lambda s: free_there[s] >= milli)
        else:
            fitting.sort(key=lambda s: -free[s])  # the emptiest, which leave most room to the sisters
        return tuple(fitting[: shape.gpus])

    def fragmented_milli(self) -> float:
        """Milli-GPU free here that a request of the usual mix cannot use, on average; 0 where none is known."""
        if self._fragmentation is None:
            return 0.0
        lost = int(self._lost_on(np.arange(len(self.nodes))).sum())
        return self._fragmentation.milli(lost)


def _packed(whole: _Number, milli: _Number) -> _Number:
    """How much room is left broken up on nodes with so many whole GPUs free, and so much in all."""
    return whole * 1_000_000 + milli
