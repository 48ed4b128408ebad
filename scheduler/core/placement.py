"""Where tasks can stand: one pool's nodes as numpy arrays, filtered and scored per shape of task.

A *shape* (``shape.py``) is everything of a request that decides where one task fits. Capacities and scores are kept
per shape and made anew only for nodes that changed since. Equal scores fall to the node whose name and
id sort first, so the same photograph gives the same places whatever order its rows came in.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from typing import TypeVar

import numpy as np

from portal.words.throughput import Speed, models_as_one
from scheduler.core.cluster import (
    WHOLE_MILLI,
    Ask,
    GpuShare,
    NodeId,
    NodeRow,
    ProjectId,
    RunningRow,
    RunningTask,
    TopologyRow,
)
from scheduler.core.fragmentation import TOGETHER, Fragmentation, Kind, Task, milli_by_memory, suits, usual
from scheduler.core.pace import UNSEEN, Pace, Spot, Spots, SpotTable
from scheduler.core.plan import TaskPlacement
from scheduler.core.shape import Bools, Held, Ints, Pile, Shape
from scheduler.core.tenants import RoomOfShares, Tenants
from scheduler.core.topology import NOWHERE, fabric_of, near_slots

_Number = TypeVar("_Number", int, Ints)

NO_BOUND = 1_000_000
"""Tasks of a shape that asks for nothing countable: as many as anyone asks."""

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


class Floor:
    """The nodes of one pool and what is free on them.

    ``empty`` photographs the same nodes as if nothing ran and all were ready: what could ever fit.
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
        self.nodes: list[NodeRow] = sorted(nodes, key=lambda node: (node.name, node.id))
        self.strategy = strategy
        self.topologies = tuple(topologies)
        self.index_of: dict[NodeId, int] = {node.id: i for i, node in enumerate(self.nodes)}
        self.gpus = [sorted(node.gpus, key=lambda g: (g.memory_mib, g.index, g.uuid)) for node in self.nodes]
        width = max((len(gpus) for gpus in self.gpus), default=0) or 1
        self.models = frozenset(gpu.model for gpus in self.gpus for gpu in gpus)
        self.free_milli: Ints = np.zeros((len(self.nodes), width), dtype=np.int64)
        self.cpu_free: Ints = np.zeros(len(self.nodes), dtype=np.int64)
        self.memory_free: Ints = np.zeros(len(self.nodes), dtype=np.int64)
        self.usable: Bools = np.zeros(len(self.nodes), dtype=bool)
        self._tenants = Tenants(self.free_milli)
        self._fabric = None if strategy == "spread" else fabric_of(self.topologies, self.nodes)
        self._islands = [
            [NOWHERE if gpu.island is None else gpu.island for gpu in gpus]
            if len({gpu.island for gpu in gpus}) > 1
            else None
            for gpus in self.gpus
        ]
        self._slot_of: dict[str, tuple[int, int]] = {}
        for i, node in enumerate(self.nodes):
            self.usable[i] = empty or (node.schedulable and node.reachable)
            self.cpu_free[i] = node.cpu_milli - (0 if empty else node.cpu_used_milli)
            self.memory_free[i] = node.memory_mib - (0 if empty else node.memory_used_mib)
            for slot, gpu in enumerate(self.gpus[i]):
                self._slot_of[gpu.uuid] = (i, slot)
                if empty or gpu.healthy:
                    self.free_milli[i, slot] = WHOLE_MILLI - (0 if empty else gpu.used_milli)
        self._masks: dict[tuple[str | None, int | None, str | None, float | None], Bools] = {}
        self._sliced = any(gpu.mig_profile for gpus in self.gpus for gpu in gpus)
        self._shares: dict[int, Ints] = {}
        self._open: dict[tuple[tuple[NodeId, ...], NodeId | None], Bools] = {}
        self._scores: dict[Shape, _Scores] = {}
        self._shared_rooms: dict[Shape, RoomOfShares] = {}  # by shapes of no tenant
        self._measured: dict[Shape, _Scores] = {}  # by fragmentation
        self._spots: dict[tuple[Shape, int], Spots] = {}
        self._spot_table = SpotTable()
        self._changed: list[int] = []
        self._fragmentation: Fragmentation | None = None
        self._usual: dict[Ask, int] = {}
        self._lost_seen = 0
        if strategy == "fragmentation" and asked:
            self._measure_fragmentation(asked, together)

    def refresh(self, nodes: Iterable[NodeRow], asked: Mapping[Ask, int] | None = None) -> bool:
        """Take over newer rows of the very same nodes; False and nothing changed when they are built otherwise."""
        rows = sorted(nodes, key=lambda node: (node.name, node.id))
        if len(rows) != len(self.nodes):
            return False
        newer = [i for i, (row, old) in enumerate(zip(rows, self.nodes, strict=True)) if row is not old]
        if not all(_same_build(rows[i], self.nodes[i]) for i in newer):
            return False
        for i in newer:
            node = self.nodes[i] = rows[i]
            self.gpus[i] = sorted(node.gpus, key=lambda g: (g.memory_mib, g.index, g.uuid))
            if self.usable[i] != (node.schedulable and node.reachable):
                self.usable[i] = not self.usable[i]
                self._open.clear()
                self._scores.clear()
                self._shared_rooms.clear()
                self._measured.clear()
        stale = {*newer, *self._changed}
        for i in stale:
            node = self.nodes[i]
            self.cpu_free[i] = node.cpu_milli - node.cpu_used_milli
            self.memory_free[i] = node.memory_mib - node.memory_used_mib
            for slot, gpu in enumerate(self.gpus[i]):
                self.free_milli[i, slot] = WHOLE_MILLI - gpu.used_milli if gpu.healthy else 0
        self._changed = list(stale)
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

    # -- what fits ------------------------------------------------------------------------------------

    def eligible(self, shape: Shape) -> Bools:
        """Which GPU slots are of the kind asked for, free or not."""
        key = (shape.gpu_model, shape.min_gpu_memory_mib, shape.mig_profile, shape.min_compute_capability)
        if key not in self._masks:
            mask = np.zeros(self.free_milli.shape, dtype=bool)
            for i, gpus in enumerate(self.gpus):
                for slot, gpu in enumerate(gpus):
                    mask[i, slot] = suits(Kind.of(gpu), *key)
            self._masks[key] = mask
        return self._masks[key]

    def let_share(self, running: Iterable[RunningRow] | None) -> None:
        """Shares of a GPU are for one project alone: those of ``running`` stand already. None: for anybody."""
        self._changed += self._tenants.stand(running, self._slot_of)

    def tenant(self, shape: Shape) -> int:
        """Who alone may join the shares of such a task, as a number; 0: anybody, or it takes none."""
        return self._tenants.number_of(shape.tenant) if self._tenants.apart else 0

    def tenant_on(self, node: int, slot: int) -> int:
        """Whose shares stand on a GPU, by that number; 0: nobody's, or it does not matter."""
        return int(self._tenants.of_gpu[node, slot]) if self._tenants.apart else 0

    def welcome(self, shape: Shape, rows: Ints | int) -> Bools:
        """Which GPU slots of these nodes are of the kind asked for, and shared with no other project."""
        kind: Bools = self.eligible(shape)[rows]
        if shape.tenant is None or not self._tenants.apart:
            return kind
        return np.asarray(kind & self._tenants.welcome(shape.tenant, rows, self.free_milli[rows]))

    def shared_elsewhere(self, shape: Shape) -> int:
        """GPUs with enough free for a share, on nodes open to it, beside which another project's stand."""
        rows = np.flatnonzero(self.open_to(shape))
        roomy = self.eligible(shape)[rows] & (self.free_milli[rows] >= self._milli(shape, rows))
        return int((roomy & ~self.welcome(shape, rows)).sum())

    def milli_on(self, shape: Shape) -> Ints:
        """What a task takes of each of its GPUs, by node; more than a whole GPU where it cannot stand.

        A share by memory is counted by the node's smallest GPU and rounded up, so it never takes too little.
        """
        if shape.share_mib is None:
            return np.full(len(self.nodes), shape.milli)
        if shape.share_mib not in self._shares:
            smallest = [min((gpu.memory_mib for gpu in gpus), default=0) for gpus in self.gpus]
            milli = [min(milli_by_memory(shape.share_mib, mib), WHOLE_MILLI + 1) for mib in smallest]
            self._shares[shape.share_mib] = np.array(milli, dtype=np.int64)
        return self._shares[shape.share_mib]

    def _milli(self, shape: Shape, rows: Ints) -> Ints | int:
        """``milli_on`` in the form that broadcasts over the GPUs of ``rows``."""
        return shape.milli if shape.share_mib is None else self.milli_on(shape)[rows][:, None]

    def open_to(self, shape: Shape) -> Bools:
        """Nodes that take work, that the shape does not avoid, and its home volume's node only."""
        key = (shape.avoid_nodes, shape.node_affinity)
        if key not in self._open:
            mask = self.usable.copy()
            if shape.node_affinity is not None:
                mask &= np.arange(len(self.nodes)) == self.index_of.get(shape.node_affinity, -1)
            mask[[self.index_of[node] for node in shape.avoid_nodes if node in self.index_of]] = False
            self._open[key] = mask
        return self._open[key]

    def closed(self) -> tuple[int, int] | None:
        """How many nodes take no new work and how many do not answer, when that is all of them; else None."""
        if not self.nodes or self.usable.any():
            return None
        silent = sum(not node.reachable for node in self.nodes)
        return len(self.nodes) - silent, silent

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

    def capacity_on(self, shape: Shape, node: int) -> int:
        """``capacity`` of one node, made anew without the cost of arrays."""
        if shape.share_mib is not None or not (shape.whole or shape.gpus <= 1):
            return int(self.capacity_of(shape, np.array([node]))[0])
        if not self.open_to(shape)[node]:
            return 0
        most = NO_BOUND
        if shape.gpus:
            milli = shape.milli
            eligible = self.welcome(shape, node).tolist()
            free = self.free_milli[node].tolist()
            most = sum(amount // milli for amount, ok in zip(free, eligible, strict=True) if ok) // shape.gpus
        if shape.cpu_milli:
            most = min(most, max(int(self.cpu_free[node]), 0) // shape.cpu_milli)
        if shape.memory_mib:
            most = min(most, max(int(self.memory_free[node]), 0) // shape.memory_mib)
        return most

    def capacity_of(self, shape: Shape, rows: Ints) -> Ints:
        """``capacity`` of the nodes in ``rows`` only, made anew."""
        bound = self._bound_beside_gpus(shape, rows)
        return np.minimum(bound, self._gpu_capacities(shape, rows)) if shape.gpus else bound

    def _bound_beside_gpus(self, shape: Shape, rows: Ints) -> Ints:
        """Tasks of a shape that the nodes in ``rows`` hold by everything but GPUs."""
        capacity = np.where(self.open_to(shape)[rows], NO_BOUND, 0).astype(np.int64)
        if shape.cpu_milli:
            capacity = np.minimum(capacity, np.maximum(self.cpu_free[rows], 0) // shape.cpu_milli)
        if shape.memory_mib:
            capacity = np.minimum(capacity, np.maximum(self.memory_free[rows], 0) // shape.memory_mib)
        return capacity

    def _gpu_capacities(self, shape: Shape, rows: Ints) -> Ints:
        eligible = self.welcome(shape, rows)
        per_gpu = np.where(eligible, self.free_milli[rows], 0) // self._milli(shape, rows)
        if shape.whole or shape.gpus == 1:
            return np.asarray(per_gpu.sum(axis=1) // shape.gpus, dtype=np.int64)
        # Shares of several GPUs: a task takes distinct ones, so k tasks use at most k shares of each.
        low = np.zeros(len(rows), dtype=np.int64)
        high = per_gpu.sum(axis=1) // shape.gpus
        while (low < high).any():
            middle = (low + high + 1) // 2
            holds = np.minimum(per_gpu, middle[:, None]).sum(axis=1) >= middle * shape.gpus
            low = np.where(holds, middle, low)
            high = np.where(holds, high, middle - 1)
        return low

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

    # -- taking and giving back ---------------------------------------------------------------------------

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

    def change(self, held: Held, sign: int) -> None:
        """Take (-1) or give back (+1) what a task holds."""
        for slot in held.slots:
            self.free_milli[held.node, slot] += sign * held.milli
            if held.tenant and sign < 0:
                self._tenants.of_gpu[held.node, slot] = held.tenant
        self.cpu_free[held.node] += sign * held.cpu_milli
        self.memory_free[held.node] += sign * held.memory_mib
        self._changed.append(held.node)

    def copy(self) -> Floor:
        """The same floor, to change on its own; what never changes is shared."""
        other = copy(self)
        other.free_milli = self.free_milli.copy()
        other._tenants = self._tenants.copy()
        other.cpu_free = self.cpu_free.copy()
        other.memory_free = self.memory_free.copy()
        other._scores = {}
        other._shared_rooms = {}
        other._measured = {}
        other._spots = {}
        other._changed = []
        if (
            self._fragmentation is not None
        ):  # what it lost stays known of the nodes that have not changed since
            other._lost = self._lost.copy()
            other._changed = self._changed[self._lost_seen :]
            other._lost_seen = 0
        return other

    def set_to_least(self, one: Floor, other: Floor, nodes: Iterable[int]) -> None:
        """Have free on ``nodes`` what is free on both of two other floors of the same nodes."""
        for node in set(nodes):
            self.free_milli[node] = np.minimum(one.free_milli[node], other.free_milli[node])
            self._tenants.set_to_both(
                node, (one._tenants, one.free_milli[node]), (other._tenants, other.free_milli[node])
            )
            self.cpu_free[node] = min(one.cpu_free[node], other.cpu_free[node])
            self.memory_free[node] = min(one.memory_free[node], other.memory_free[node])
            self._changed.append(node)

    def held_by(self, tasks: Iterable[RunningTask]) -> list[Held]:
        """What running tasks would give back; a GPU that is not healthy gives nothing."""
        held = []
        for task in tasks:
            if task.node not in self.index_of:
                continue
            node = self.index_of[task.node]
            held.append(Held(node, (), 0, task.cpu_milli, task.memory_mib))
            for gpu in task.gpus:
                slot = self._slot_of[gpu.uuid][1]
                if self.gpus[node][slot].healthy:
                    tenant = int(self._tenants.of_gpu[node, slot]) if gpu.milli < WHOLE_MILLI else 0
                    held.append(Held(node, (slot,), gpu.milli, 0, 0, tenant))
        return held

    def overfull(self, held: Iterable[Held]) -> bool:
        """True when more is held of these places than there is."""
        return any(
            self.cpu_free[one.node] < 0
            or self.memory_free[one.node] < 0
            or any(self.free_milli[one.node, slot] < 0 for slot in one.slots)
            for one in held
        )

    def give_back(self, held: Sequence[Held]) -> None:
        """Undo a gang's places."""
        for one in held:
            self.change(one, +1)

    def give_back_pile(self, pile: Pile, first: int) -> None:
        """Give back the places of the ``first`` of a pile's owners, all at once."""
        places, gpus = pile.places[first], pile.gpus[first]
        node = pile.node[:places]
        np.add.at(self.cpu_free, node, pile.cpu_milli[:places])
        np.add.at(self.memory_free, node, pile.memory_mib[:places])
        np.add.at(self.free_milli, (pile.gpu_node[:gpus], pile.gpu_slot[:gpus]), pile.gpu_milli[:gpus])
        self._changed += np.unique(node).tolist()

    def place_of(self, stand: RunningTask, tenant: ProjectId | None) -> Held | None:
        """The place where a task was to stand; None when it is no place here any more, or of several kinds."""
        node = self.index_of.get(stand.node)
        slots = [self._slot_of.get(gpu.uuid) for gpu in stand.gpus]
        if node is None or any(slot is None or slot[0] != node for slot in slots):
            return None
        if len({gpu.milli for gpu in stand.gpus}) > 1:
            return None
        milli = stand.gpus[0].milli if stand.gpus else WHOLE_MILLI
        taken = tuple(slot[1] for slot in slots if slot)
        return Held(node, taken, milli, stand.cpu_milli, stand.memory_mib, self._tenants.number_of(tenant))

    def is_welcome(self, shape: Shape, place: Held) -> bool:
        """True when no share of another project stands at a place of a task."""
        return bool(self.welcome(shape, place.node)[list(place.slots)].all())

    def placement(self, rank: int, place: Held) -> TaskPlacement:
        """A place in the words of the plan."""
        return TaskPlacement(
            rank,
            self.nodes[place.node].id,
            tuple(GpuShare(self.gpus[place.node][slot].uuid, place.milli) for slot in place.slots),
        )

    # -- numbers for people ---------------------------------------------------------------------------------

    def fragmented_milli(self) -> float:
        """Milli-GPU free here that a request of the usual mix cannot use, on average; 0 where none is known."""
        if self._fragmentation is None:
            return 0.0
        lost = int(self._lost_on(np.arange(len(self.nodes))).sum())
        return self._fragmentation.milli(lost)

    def free_gpus(self, shape: Shape) -> tuple[int, int]:
        """Whole GPUs of the asked kind free on nodes open to it: in all, and on the best node."""
        per_node = self._free_whole(shape)
        return int(per_node.sum()), int(per_node.max(initial=0))

    def histogram(self, shape: Shape) -> dict[int, int]:
        """Nodes open to the shape, by how many whole GPUs of the asked kind they have free."""
        counts, nodes = np.unique(self._free_whole(shape)[self.open_to(shape)], return_counts=True)
        return {int(count): int(n) for count, n in zip(counts, nodes, strict=True)}

    def _free_whole(self, shape: Shape) -> Ints:
        eligible = self.eligible(shape)
        free = ((self.free_milli == WHOLE_MILLI) & eligible).sum(axis=1)
        return np.asarray(np.where(self.open_to(shape), free, 0), dtype=np.int64)


def _packed(whole: _Number, milli: _Number) -> _Number:
    """How much room is left broken up on nodes with so many whole GPUs free, and so much in all."""
    return whole * 1_000_000 + milli


def _same_build(one: NodeRow, other: NodeRow) -> bool:
    """True when two rows of a node differ only in what is used, ready or healthy."""
    return (
        (one.id, one.name, one.labels, one.cpu_milli, one.memory_mib, len(one.gpus))
        == (other.id, other.name, other.labels, other.cpu_milli, other.memory_mib, len(other.gpus))
    ) and all(
        (a.uuid, a.index, a.model, a.memory_mib, a.island, a.mig_profile, a.compute_capability)
        == (b.uuid, b.index, b.model, b.memory_mib, b.island, b.mig_profile, b.compute_capability)
        for a, b in zip(one.gpus, other.gpus, strict=True)
    )
