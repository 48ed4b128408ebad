"""Node placement: the nodes of one pool, scored per shape of task.

Capacities and scores are cached per shape and recomputed only for changed nodes. Equal scores go to the first
node by name and id, so that the result does not depend on the order of rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Self, TypeVar

import numpy as np

from portal.domain.jobs.feasibility import UNBOUNDED_TASKS, GpuKind
from portal.domain.scheduling.throughput import LayoutSpeed, joined_models
from scheduler.core.capacity.fragmentation import (
    GROUP_WEIGHT,
    CandidateTask,
    Fragmentation,
    typical_mix,
)
from scheduler.core.capacity.gang_hardware import PoolHardware
from scheduler.core.capacity.node_capacity import Bools, Ints, NodeCapacity, SharedGpuCapacity
from scheduler.core.capacity.throughput import (
    UNKNOWN_LAYOUT,
    NodeLayout,
    NodeLayouts,
    ThroughputTieBreak,
)
from scheduler.core.capacity.topology import NO_DOMAIN, default_topology, pick_slots_by_island
from scheduler.core.model.snapshot import (
    WHOLE_MILLI,
    HeldSlots,
    NodeRow,
    TaskRequest,
    TaskShape,
    TopologyRow,
)

_Number = TypeVar("_Number", int, Ints)

WORST_SCORE = np.int64(1) << 60


class _ShapeScores:
    """Capacities and scores of one shape on all nodes, and their position in the change log."""

    __slots__ = ("best_free", "capacity", "fitting", "log_position", "score", "total_capacity")

    def __init__(self, nodes: int, log_position: int) -> None:
        self.capacity: Ints = np.zeros(nodes, dtype=np.int64)
        self.score: Ints = np.zeros(nodes, dtype=np.int64)
        self.best_free: Ints = np.zeros(nodes, dtype=np.int64)  # of the GPU that a share takes; 0 is any
        self.fitting: Bools = np.zeros(nodes, dtype=bool)
        self.log_position = log_position
        self.total_capacity: int | None = None  # sum of the capacities, computed on demand


class NodePlacer(NodeCapacity):
    """Chooses nodes for the tasks of gangs in one pool.

    A gang on several nodes crosses few levels of the first topology in ``topologies`` that labels nodes. The
    strategy "fragmentation" scores by ``demand``, the number of tasks by request; without it, it packs.
    """

    def __init__(
        self,
        nodes: Iterable[NodeRow],
        strategy: str,
        *,
        empty: bool = False,
        demand: Mapping[TaskRequest, int] | None = None,
        group_weight: int = GROUP_WEIGHT,
        topologies: Iterable[TopologyRow] = (),
    ) -> None:
        super().__init__(nodes, empty=empty)
        self.strategy = strategy
        self.hardware = PoolHardware(self.nodes, self.gpus)
        self.topologies = tuple(topologies)
        self._topology = None if strategy == "spread" else default_topology(self.topologies, self.nodes)
        self._islands = [
            [NO_DOMAIN if gpu.nvlink_island is None else gpu.nvlink_island for gpu in gpus]
            if len({gpu.nvlink_island for gpu in gpus}) > 1
            else None
            for gpus in self.gpus
        ]
        self._has_mig_slices = any(gpu.mig_profile for gpus in self.gpus for gpu in gpus)
        self._scores: dict[TaskShape, _ShapeScores] = {}
        self._shared_capacities: dict[TaskShape, SharedGpuCapacity] = {}  # by shape without tenant
        self._fragmentation_scores: dict[TaskShape, _ShapeScores] = {}  # scored by fragmentation
        self._node_layouts: dict[tuple[TaskShape, int], NodeLayouts] = {}
        self._layouts: dict[NodeLayout, int] = {}
        """The number of each layout; they are few, because nodes are similar."""
        self._fragmentation: Fragmentation | None = None
        self._typical_mix: dict[TaskRequest, int] = {}
        self._unusable_log_position = 0
        if strategy == "fragmentation" and demand:
            self._measure_fragmentation(demand, group_weight)

    def refresh(self, nodes: Iterable[NodeRow], demand: Mapping[TaskRequest, int] | None = None) -> bool:
        """Load newer rows of the same nodes; return False and change nothing if the hardware differs."""
        opened = self._update_rows(nodes)
        if opened is None:
            return False
        if opened:
            self._scores.clear()
            self._shared_capacities.clear()
            self._fragmentation_scores.clear()
        for scores in (*self._scores.values(), *self._fragmentation_scores.values()):
            scores.log_position = 0
        for space in self._shared_capacities.values():
            space.log_position = 0
        for spots in self._node_layouts.values():
            spots.log_position = 0
        self._unusable_log_position = 0
        if self.strategy == "fragmentation" and demand and typical_mix(demand) != self._typical_mix:
            self._fragmentation_scores.clear()
            self._measure_fragmentation(demand, GROUP_WEIGHT)
        return True

    def _measure_fragmentation(self, demand: Mapping[TaskRequest, int], group_weight: int) -> None:
        """Prepare scoring by fragmentation. A node with several kinds of GPU counts as its first one."""
        first = [gpus[0].kind if gpus else GpuKind("", 0) for gpus in self.gpus]
        kinds = sorted(set(first))
        self._gpu_kind: Ints = np.array([kinds.index(kind) for kind in first], dtype=np.int64)
        self._typical_mix = typical_mix(demand)
        self._fragmentation = Fragmentation(kinds, self._typical_mix, group_weight)
        self._as_published = not group_weight  # then ties are FGD's, too
        self._unusable: Ints = self._unusable_on(np.arange(len(self.nodes)))
        self._unusable_log_position = len(self._changed)

    def copy(self) -> Self:
        """Return an independent copy that shares what never changes."""
        other = super().copy()
        other._scores = {}
        other._shared_capacities = {}
        other._fragmentation_scores = {}
        other._node_layouts = {}
        if self._fragmentation is not None:
            # unusable capacity stays valid for nodes that have not changed since it was computed
            other._unusable = self._unusable.copy()
            other._changed = self._changed[self._unusable_log_position :]
            other._unusable_log_position = 0
        return other

    def capacity(self, shape: TaskShape) -> Ints:
        """Return how many tasks of ``shape`` each node could take now, exactly; (nodes,)."""
        measured = bool(self._fragmentation_scores) and shape in self._fragmentation_scores
        return self._current_scores(shape, measured).capacity

    def fit_count(self, shape: TaskShape) -> int:
        """Return how many tasks of ``shape`` all nodes together could take now.

        With ``same_gpus`` only nodes with one kind of hardware count, those that could take most.
        """
        if shape.same_gpus:
            return max(map(self.fit_count, self.hardware.restricted_shapes(shape)))
        if shape.tenant is not None and shape.request.gpus == 1 and self._tenants.is_exclusive:
            return self._shared_capacity(shape._replace(tenant=None)).fit_count(
                self._tenants.id_of(shape.tenant)
            )
        scores = self._current_scores(
            shape, bool(self._fragmentation_scores) and shape in self._fragmentation_scores
        )
        if scores.total_capacity is None:
            scores.total_capacity = int(scores.capacity.sum())
        return scores.total_capacity

    def _shared_capacity(self, shape: TaskShape) -> SharedGpuCapacity:
        """Return the counts for all tenants; one tenant alone would cost nearly as much."""
        space = self._shared_capacities.get(shape)
        if space is None:
            space = self._shared_capacities[shape] = SharedGpuCapacity(len(self.nodes), len(self._changed))
            rows = np.arange(len(self.nodes))
        elif space.log_position < len(self._changed):
            rows = np.fromiter(set(self._changed[space.log_position :]), dtype=np.int64)
            space.log_position = len(self._changed)
        else:
            return space
        free = self.free_milli[rows]
        fits = np.where(self.matching_slots(shape)[rows], free // self._milli(shape, rows), 0)
        tenants = self._tenants.by_slot[rows]
        space.update(rows, fits, free == WHOLE_MILLI, tenants, self._bound_without_gpus(shape, rows))
        return space

    def place_gang(
        self,
        shape: TaskShape,
        tasks: int,
        prefer_not_idle_in: NodePlacer | None = None,
        speeds: Sequence[LayoutSpeed] = (),
    ) -> list[HeldSlots] | None:
        """Take slots for all ``tasks`` of a gang; return None and take nothing if they do not fit.

        On a node, GPUs that are free in ``prefer_not_idle_in`` are taken last. Among nodes with equal scores,
        the one that gives the gang the fastest layout by ``speeds`` goes first.
        """
        measured = tasks == 1 and self._fragmentation is not None
        if tasks == 1 and (shape.request.uses_whole_gpus or not measured):
            fitting = np.flatnonzero(self._current_scores(shape, False).fitting)
            if len(fitting) <= 1:  # no choice to make
                return [self._take(int(node), shape, 1, prefer_not_idle_in) for node in fitting] or None
        scores = self._current_scores(shape, measured)
        if tasks > 1 and int(np.minimum(scores.capacity, tasks).sum()) < tasks:
            return None
        if tasks == 1 and not scores.fitting.any():
            return None
        held: list[HeldSlots] = []
        near: Bools | None = None
        if self._topology is not None and tasks > int(scores.capacity.max()):
            near = self._topology.smallest_domain(scores.capacity, tasks)
        pace = ThroughputTieBreak(speeds, self._levels_crossed(near)) if speeds else None
        while len(held) < tasks:
            scores = self._current_scores(shape, measured)
            missing = tasks - len(held)
            rank, count = self._rank_nodes(scores, missing, near)
            node = int(rank.argmin())
            # fractions taken on one GPU may leave less than the capacity counted
            if rank[node] == WORST_SCORE:
                self.release(held)
                return None
            if pace is not None:
                node = self._fastest(pace, shape, missing, count, np.flatnonzero(rank == rank[node]))
            best_free = int(scores.best_free[node]) if measured else 0
            held.extend(
                self._take(node, shape, count - i, prefer_not_idle_in, best_free) for i in range(count)
            )
        return held

    def _rank_nodes(self, scores: _ShapeScores, missing: int, domain: Bools | None) -> tuple[Ints, int]:
        """Return the rank of each node for the next tasks of a gang (least first), and how many it takes.

        Only nodes of ``domain`` count, if given. Pack: the tightest node that holds all missing tasks, else
        the one with the largest capacity, filled up, so that a gang uses few nodes. Spread: one task on the
        emptiest node.
        """
        fitting = scores.fitting if domain is None else scores.fitting & domain
        if self.strategy == "spread" or missing == 1:
            return np.where(fitting, scores.score, WORST_SCORE), 1
        capacity = scores.capacity if domain is None else np.where(domain, scores.capacity, 0)
        enough = capacity >= missing
        if enough.any():
            return np.where(enough, scores.score, WORST_SCORE), missing
        most = int(capacity.max())
        return np.where(capacity == most, scores.score, WORST_SCORE), most

    def domain_position(self, node: int) -> tuple[int, ...]:
        """Return the position of a node's domains, outermost first: ranks in this order have near neighbours."""
        return () if self._topology is None else tuple(self._topology.domain_index[:, node].tolist())

    def _levels_crossed(self, domain: Bools | None) -> int:
        """Return the topology levels that a gang on several nodes of ``domain`` (None is all) crosses."""
        if self._topology is None:
            return 0
        return len(self._topology.levels) if domain is None else self._topology.levels_crossed(domain)

    def _fastest(
        self, tie_break: ThroughputTieBreak, shape: TaskShape, missing: int, count: int, equal: Ints
    ) -> int:
        """Return the first of the ``equal`` nodes whose layout ``tie_break`` prefers."""
        numbers, first = np.unique(self._layout_numbers(shape, count, equal), return_index=True)
        order = first.argsort()
        layouts = list(self._layouts)
        spots = [layouts[number] for number in numbers[order]]
        return int(equal[first[order[tie_break.choose(spots, missing, count)]]])

    def _layout_numbers(self, shape: TaskShape, count: int, nodes: Ints) -> Ints:
        spots = self._node_layouts.get((shape, count))
        if spots is None:
            spots = self._node_layouts[shape, count] = NodeLayouts(len(self.nodes), len(self._changed))
        elif spots.log_position < len(self._changed):
            spots.layout_of_node[self._changed[spots.log_position :]] = UNKNOWN_LAYOUT
            spots.log_position = len(self._changed)
        for node in nodes[spots.layout_of_node[nodes] == UNKNOWN_LAYOUT].tolist():
            layout = self._layout_on(shape, count, node)
            spots.layout_of_node[node] = self._layouts.setdefault(layout, len(self._layouts))
        return np.asarray(spots.layout_of_node[nodes])

    def _layout_on(self, shape: TaskShape, count: int, node: int) -> NodeLayout:
        """Return the layout of ``count`` tasks on a node that can take them."""
        gpus = self.gpus[node]
        models = {gpu.model for gpu in gpus}
        if len(models) == 1 and self._islands[node] is None:
            return NodeLayout(models.pop(), 1)
        milli = shape.request.milli if shape.request.share_mib is None else int(self.milli_on(shape)[node])
        free = self.free_milli[node].tolist()
        taken: set[int] = set()
        for i in range(count):
            slots = self._pick(node, shape, count - i, milli, free)
            for slot in slots:
                free[slot] -= milli
            taken.update(slots)
        return NodeLayout(
            joined_models(gpus[slot].model for slot in taken),
            len({gpus[slot].nvlink_island for slot in taken}),
        )

    def _current_scores(self, shape: TaskShape, by_fragmentation: bool) -> _ShapeScores:
        cache = self._fragmentation_scores if by_fragmentation else self._scores
        scores = cache.get(shape)
        if scores is None:
            rows = np.arange(len(self.nodes))
            scores = cache[shape] = _ShapeScores(len(rows), len(self._changed))
        elif scores.log_position < len(self._changed):
            changed = set(self._changed[scores.log_position :])
            scores.log_position, scores.total_capacity = len(self._changed), None
            if len(changed) == 1 and not by_fragmentation and self._refresh_one(scores, shape, *changed):
                return scores
            rows = np.fromiter(changed, dtype=np.int64)
        else:
            return scores
        capacity = self.capacity_of(shape, rows)
        scores.capacity[rows] = capacity
        scores.fitting[rows] = capacity > 0
        if by_fragmentation:
            scores.score[rows], scores.best_free[rows] = self._score_by_fragmentation(shape, rows, capacity)
        else:
            scores.score[rows] = self._score_by_packing(shape, rows)
        return scores

    def _refresh_one(self, scores: _ShapeScores, shape: TaskShape, node: int) -> bool:
        """Update the scores of one node without the cost of arrays; return False if that is not possible."""
        if self.strategy != "spread" and not shape.request.uses_whole_gpus and shape.request.gpus == 1:
            return False  # its score depends on single GPUs
        capacity, free = self.capacity_on(shape, node), self.free_milli[node].tolist()
        scores.capacity[node] = capacity
        scores.fitting[node] = capacity > 0
        space = sum(free)
        scores.score[node] = (
            -space if self.strategy == "spread" else _packing_score(free.count(WHOLE_MILLI), space)
        )
        return True

    def _score_by_packing(self, shape: TaskShape, rows: Ints) -> Ints:
        """Return a score by free capacity, least first, or by load when spreading.

        Pack ranks nodes by free whole GPUs, then by free milli, so that large free blocks stay; a share of a
        GPU first looks for the shared GPU that it fills best.
        """
        free = self.free_milli[rows]
        whole_free = (free == WHOLE_MILLI).sum(axis=1)
        space = _packing_score(whole_free, free.sum(axis=1))
        if self.strategy == "spread":
            return np.asarray(-free.sum(axis=1), dtype=np.int64)
        if shape.request.uses_whole_gpus or shape.request.gpus != 1:
            return np.asarray(space, dtype=np.int64)
        eligible = self.allowed_slots(shape, rows)
        milli = self._milli(shape, rows)
        shared = eligible & (free < WHOLE_MILLI) & (free >= milli)
        left = np.where(shared, free - milli, WHOLE_MILLI).min(axis=1)
        return np.asarray(np.where(left < WHOLE_MILLI, left, WHOLE_MILLI + space), dtype=np.int64)

    def _score_by_fragmentation(self, shape: TaskShape, rows: Ints, capacity: Ints) -> tuple[Ints, Ints]:
        """Return scores by the free GPU capacity that a task makes unusable; see ``fragmentation.py``."""
        score, best_free = np.full(len(rows), WORST_SCORE), np.zeros(len(rows), dtype=np.int64)
        able = (capacity > 0).nonzero()[0]  # an overcommitted node has a negative capacity
        if not len(able) or self._fragmentation is None:
            return score, best_free
        if self._unusable_log_position < len(self._changed):
            changed = np.fromiter(set(self._changed[self._unusable_log_position :]), dtype=np.int64)
            self._unusable[changed] = self._unusable_on(changed)
            self._unusable_log_position = len(self._changed)
        nodes = rows[able]
        free, slots = self._emptiest_first(nodes)
        fits = free >= self._milli(shape, nodes)
        restricted = shape.request.constraints.restricts or shape.tenant is not None
        if self._has_mig_slices or restricted:
            eligible = self.allowed_slots(shape, nodes)
            fits &= np.take_along_axis(eligible, slots, axis=1)
        task = CandidateTask(
            shape.request.gpus,
            self.milli_on(shape)[nodes],
            self.cpu_free[nodes] - shape.request.cpu_milli,
            self.memory_free[nodes] - shape.request.memory_mib,
        )
        points, best = self._fragmentation.best(
            task, free, fits, self._gpu_kind[nodes], self._unusable[nodes]
        )
        score[able], best_free[able] = (100 - points) * UNBOUNDED_TASKS, best
        if not shape.request.gpus and not self._as_published:  # among equals, prefer nodes without free GPUs
            score[able] += free.sum(axis=1)
        return score, best_free

    def _unusable_on(self, nodes: Ints) -> Ints:
        free, _ = self._emptiest_first(nodes)
        if self._fragmentation is None:
            return np.zeros(len(nodes), dtype=np.int64)
        return self._fragmentation.unusable(
            free, self._gpu_kind[nodes], self.cpu_free[nodes], self.memory_free[nodes]
        )

    def _emptiest_first(self, nodes: Ints) -> tuple[Ints, Ints]:
        """Return the free milli of each GPU, largest first, and the slots in that order."""
        width = self.free_milli.shape[1]
        keys = np.sort(np.arange(width) - np.maximum(self.free_milli[nodes], 0) * width, axis=1)
        return -(keys // width), keys % width

    # -- taking slots ------------------------------------------------------------------------------------

    def _take(
        self,
        node: int,
        shape: TaskShape,
        count: int,
        prefer_not_idle_in: NodePlacer | None,
        best_free: int = 0,
    ) -> HeldSlots:
        """Take slots for one of ``count`` tasks on ``node``; a share prefers a GPU with ``best_free``."""
        milli = shape.request.milli if shape.request.share_mib is None else int(self.milli_on(shape)[node])
        slots: tuple[int, ...] = ()
        if shape.request.gpus:
            free = self.free_milli[node].tolist()
            slots = self._pick(node, shape, count, milli, free, prefer_not_idle_in, best_free)
        tenant = self._tenants.id_of(shape.tenant)
        held = HeldSlots(node, slots, milli, shape.request.cpu_milli, shape.request.memory_mib, tenant)
        self.adjust(held, -1)
        return held

    def _pick(
        self,
        node: int,
        shape: TaskShape,
        count: int,
        milli: int,
        free: list[int],
        prefer_not_idle_in: NodePlacer | None = None,
        best_free: int = 0,
    ) -> tuple[int, ...]:
        """Return the GPU slots for one of ``count`` tasks on a node with ``free`` milli on each GPU."""
        eligible = self.allowed_slots(shape, node).tolist()
        fitting = [s for s, ok in enumerate(eligible) if ok and free[s] >= milli]
        roomy = [s for s in fitting if free[s] >= milli * count]
        alone = shape.request.uses_whole_gpus or shape.request.gpus == 1
        if alone or len(roomy) >= shape.request.gpus:
            # The fullest that fit; a task with several GPUs prefers those that also fit its siblings.
            fitting = sorted(fitting if alone else roomy, key=lambda s: free[s])
            islands = self._islands[node]
            if islands is not None and shape.request.uses_whole_gpus:
                first = pick_slots_by_island(fitting, islands, shape.request.gpus)
                fitting = first + [s for s in fitting if s not in first]
            if best_free:
                fitting.sort(key=lambda s: free[s] != best_free)
            if prefer_not_idle_in is not None:
                free_there = prefer_not_idle_in.free_milli[node].tolist()
                fitting.sort(key=lambda s: free_there[s] >= milli)
        else:
            fitting.sort(key=lambda s: -free[s])  # the emptiest, to leave most capacity for sibling tasks
        return tuple(fitting[: shape.request.gpus])

    def fragmented_milli(self) -> float:
        """Return the free milli that an average request of the typical mix cannot use; 0 without a mix."""
        if self._fragmentation is None:
            return 0.0
        lost = int(self._unusable_on(np.arange(len(self.nodes))).sum())
        return self._fragmentation.milli(lost)


def _packing_score(whole: _Number, milli: _Number) -> _Number:
    return whole * 1_000_000 + milli
