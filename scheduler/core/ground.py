"""Where the tasks of waiting jobs can stand, for plays of the queue: cells of alike GPUs, and what is free in them.

A *cell* is those GPUs of one node that the same waiting tasks may use; cells open to the same tasks are of one
*sort*. Which these are is asked of ``Floor`` once. In a pool of equal nodes with equal wishes there is one sort,
and a cell is a node. A task stands in one cell. What it takes of CPU and memory is not followed: a cell is of no
use to a task only where its node has too little of them even when nothing else stands there.

Where a shared GPU is for one project alone, the GPUs with shares of a *tenant* are of use to nobody else, until the
last share has gone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from scheduler.core.cluster import WHOLE_MILLI, NodeId, NodeRow, RunningRow, RunningTask
from scheduler.core.placement import NodePlacer
from scheduler.core.shape import TaskShape

BucketSlots = tuple[int, int, tuple[int, ...]]
"""A cell with a number of whole GPUs; or with thousandths, and the numbers of the GPUs of which they are."""

BucketState = tuple[int, tuple[int, ...]]
"""What a cell has free: whole GPUs, and the thousandths of those with shares that anybody may join, ascending."""

TaskSize = tuple[int, int, int]
"""GPUs of a task, thousandths of each, and its tenant."""


class BucketRequest(NamedTuple):
    """What one task takes: so many GPUs, so much of each, in a cell of one of these sorts (ascending)."""

    gpus: int
    milli: int
    bucket_types: tuple[int, ...]
    tenant: int = 0  # who alone may join its shares; 0: anybody

    @property
    def size(self) -> TaskSize:
        """It without where it may stand."""
        return self.gpus, self.milli, self.tenant


@dataclass(frozen=True, slots=True)
class CapacityBuckets:
    """All cells of a pool and what is free in them now."""

    type_of: tuple[int, ...]
    whole_gpus: tuple[int, ...]
    shared: Mapping[int, Mapping[int, int]]
    """By cell, its GPUs that carry shares, by number: the thousandths free of each."""
    gpu_number_limit: int
    """Numbers of GPUs are smaller than this."""
    tenants: Mapping[int, int] = field(default_factory=dict)
    """By number of a GPU with shares: whose they are, where that matters."""


class BucketBuilder:
    """Divides the nodes of a pool into cells for some shapes of tasks; ``apart`` are sets of nodes to tell apart.

    ``sharing`` are running jobs, where a shared GPU is for one project alone.
    """

    def __init__(
        self,
        nodes: Iterable[NodeRow],
        shapes: Iterable[TaskShape],
        node_sets: Sequence[Iterable[NodeId]],
        sharing: Iterable[RunningRow] | None = None,
    ) -> None:
        self._placer = NodePlacer(nodes, "pack")
        self._placer.load_tenants(sharing)
        shapes = list(dict.fromkeys(shape._replace(tenant=None) for shape in shapes))
        self._width = self._placer.free_milli.shape[1]
        empty = NodePlacer(self._placer.nodes, "pack", empty=True)
        opens = [
            self._placer.matching_slots(shape) & ((empty.capacity(shape) > 0) & self._placer.usable)[:, None]
            for shape in shapes
        ]
        members = [np.isin([node.id for node in self._placer.nodes], list(each)) for each in node_sets]
        every = np.ones(self._placer.free_milli.shape, dtype=bool)
        layers = [*opens, *(every & member[:, None] for member in members)]
        self._bucket_at: dict[tuple[int, int], int] = {}
        self._type_of: list[int] = []
        sorts: dict[bytes, int] = {}
        if opens and len(self._placer.nodes):
            signs = np.packbits(np.stack(layers), axis=0).transpose(1, 2, 0).copy()
            used = np.logical_or.reduce(opens)
            for node in range(len(self._placer.nodes)):
                mine: dict[bytes, int] = {}
                for slot in np.flatnonzero(used[node]).tolist():
                    sign = signs[node, slot].tobytes()
                    if sign not in mine:
                        mine[sign] = len(self._type_of)
                        self._type_of.append(sorts.setdefault(sign, len(sorts)))
                    self._bucket_at[node, slot] = mine[sign]
        bits = [np.unpackbits(np.frombuffer(sign, dtype=np.uint8)) for sign in sorts]
        layer_sorts = [tuple(s for s, has in enumerate(bits) if has[layer]) for layer in range(len(layers))]
        self._types_of = dict(zip(shapes, layer_sorts[: len(shapes)], strict=True))  # by shapes of no tenant
        self.types_by_node_set: list[frozenset[int]] = [frozenset(each) for each in layer_sorts[len(shapes) :]]
        """The sorts of each set of nodes that was to be told apart."""

    def request_for(self, shape: TaskShape) -> BucketRequest:
        """What a task of one of the shapes takes, and where it can stand."""
        sorts = self._types_of[shape._replace(tenant=None)]
        return BucketRequest(shape.gpus, shape.milli, sorts, self._placer.tenant_id(shape))

    def slots_of(self, tasks: Iterable[RunningTask]) -> tuple[BucketSlots, ...]:
        """What running tasks give back once they end; GPUs that no waiting task may use are left out."""
        whole: Counter[int] = Counter()
        shares: list[BucketSlots] = []
        for held in self._placer.slots_held_by(tasks):
            for slot in held.slots:
                cell = self._bucket_at.get((held.node, slot))
                if cell is None:
                    continue
                if held.milli == WHOLE_MILLI:
                    whole[cell] += 1
                else:
                    shares.append((cell, held.milli, (held.node * self._width + slot,)))
        return (*((cell, gpus, ()) for cell, gpus in whole.items()), *shares)

    def build(self, running: Iterable[Sequence[BucketSlots]]) -> CapacityBuckets:
        """What is free now, beside these places."""
        carry = {gpu for places in running for _, _, gpus in places for gpu in gpus}
        whole = [0] * len(self._type_of)
        shared: dict[int, dict[int, int]] = {}
        tenants: dict[int, int] = {}
        for (node, slot), cell in self._bucket_at.items():
            milli, gpu = int(self._placer.free_milli[node, slot]), node * self._width + slot
            if milli == WHOLE_MILLI:
                whole[cell] += 1
            elif milli > 0 or gpu in carry:
                shared.setdefault(cell, {})[gpu] = milli
                if tenant := self._placer.tenant_on(node, slot):
                    tenants[gpu] = tenant
        numbers = len(self._placer.nodes) * self._width
        return CapacityBuckets(tuple(self._type_of), tuple(whole), shared, numbers, tenants)


class BucketOccupancy:
    """What is free in each cell while a queue is played, and which cells have how much."""

    def __init__(self, buckets: CapacityBuckets, sizes: Sequence[TaskSize]) -> None:
        self._type_of = buckets.type_of
        self._sizes = [BucketRequest(gpus, milli, (), tenant) for gpus, milli, tenant in sizes]
        self._sizes_of: dict[int, list[tuple[int, BucketRequest]]] = {}  # by tenant, with their places in the list
        for number, size in enumerate(self._sizes):
            if size.tenant:
                self._sizes_of.setdefault(size.tenant, []).append((number, size))
        self.fit_counts = np.zeros((len(sizes), max(buckets.type_of, default=-1) + 1), dtype=np.int64)
        """How many tasks of each size surely find places, by sort."""
        self._tasks_in: dict[BucketState, np.ndarray] = {}
        self._whole = list(buckets.whole_gpus)
        self._shared: dict[int, dict[int, int]] = {}  # by cell: the GPUs whose shares anybody may join
        self._own: dict[
            int, dict[int, dict[int, int]]
        ] = {}  # by cell and tenant: those that only it may join
        self._buckets_of: dict[int, dict[int, None]] = {}  # by tenant: the cells where it has any
        self._tenants: dict[int, int] = {}  # by GPU
        self._next_gpu = buckets.gpu_number_limit
        self._buckets_by_state: list[dict[BucketState, dict[int, None]]] = [
            {} for _ in range(max(buckets.type_of, default=-1) + 1)
        ]
        self._states: list[BucketState] = [(0, ())] * len(buckets.type_of)
        self._more: dict[int, list[tuple[int, int]]] = {}  # by cell: sizes with more room than for strangers
        for cell, gpus in buckets.shared.items():
            for gpu, milli in gpus.items():
                self._add_shared_gpu(cell, gpu, buckets.tenants.get(gpu, 0), milli)
        for cell in range(len(buckets.type_of)):
            self._count_bucket(cell)

    def allocate(self, request: BucketRequest, bucket_types: Iterable[int]) -> BucketSlots | None:
        """A place for one task in the cell that it fills best; None when there is none."""
        bucket_types = list(bucket_types)
        cell = self._fullest_shared(request, bucket_types) if request.tenant else None
        if cell is None:
            cell = self._best_fit(request, bucket_types)
        if cell is None:
            return None
        self._uncount_bucket(cell)
        place = self._take_whole_gpus(cell, request) if request.milli == WHOLE_MILLI else self._take_shares(cell, request)
        self._count_bucket(cell)
        return place

    def release(self, slots: BucketSlots) -> None:
        """Frees a place."""
        cell, amount, gpus = slots
        self._uncount_bucket(cell)
        if not gpus:
            self._whole[cell] += amount
        for gpu in gpus:
            tenant = self._tenants.get(gpu, 0)
            shared = self._own[cell][tenant] if tenant else self._shared[cell]
            shared[gpu] += amount
            if shared[gpu] == WHOLE_MILLI:
                del shared[gpu]
                self._whole[cell] += 1
                if tenant:
                    del self._tenants[gpu]
                    if not shared:
                        del self._own[cell][tenant], self._buckets_of[tenant][cell]
        self._count_bucket(cell)

    def _best_fit(self, need: BucketRequest, sorts: Iterable[int]) -> int | None:
        """The cell that a task fills best where it joins no shares of its own tenant."""
        best: tuple[tuple[int, int], int, BucketState] | None = None
        for sort in sorts:
            for state in self._buckets_by_state[sort]:
                if _fit_count(state, need):
                    mine = (_tightness(state, need), sort, state)
                    if best is None or mine[0] < best[0]:
                        best = mine
        return None if best is None else next(reversed(self._buckets_by_state[best[1]][best[2]]))

    def _fullest_shared(self, need: BucketRequest, sorts: Sequence[int]) -> int | None:
        """The cell where it joins the fullest GPU of its tenant that has so much left."""
        best: tuple[int, int, int] | None = None
        for cell in self._buckets_of.get(need.tenant, ()):
            if self._type_of[cell] in sorts:
                able = [milli for milli in self._own[cell][need.tenant].values() if milli >= need.milli]
                if able and len(able) + self._whole[cell] >= need.gpus:
                    mine = (min(able), self._whole[cell], cell)
                    best = mine if best is None else min(best, mine)
        return None if best is None else best[2]

    def _take_whole_gpus(self, cell: int, need: BucketRequest) -> BucketSlots:
        self._whole[cell] -= need.gpus
        return cell, need.gpus, ()

    def _take_shares(self, cell: int, need: BucketRequest) -> BucketSlots:
        """Shares of the fullest GPUs that have so much left, then of whole ones."""
        shared = self._own.get(cell, {}).get(need.tenant, {}) if need.tenant else self._shared.get(cell, {})
        roomy = sorted((milli, gpu) for gpu, milli in shared.items() if milli >= need.milli)
        gpus = [gpu for _, gpu in roomy[: need.gpus]]
        for gpu in gpus:
            shared[gpu] -= need.milli
        while len(gpus) < need.gpus:
            self._whole[cell] -= 1
            self._add_shared_gpu(cell, self._next_gpu, need.tenant, WHOLE_MILLI - need.milli)
            gpus.append(self._next_gpu)
            self._next_gpu += 1
        return cell, need.milli, tuple(gpus)

    def _add_shared_gpu(self, cell: int, gpu: int, tenant: int, milli: int) -> None:
        """Notes a GPU that carries shares, with so many thousandths free."""
        if tenant:
            self._tenants[gpu] = tenant
            self._own.setdefault(cell, {}).setdefault(tenant, {})[gpu] = milli
            self._buckets_of.setdefault(tenant, {})[cell] = None
        else:
            self._shared.setdefault(cell, {})[gpu] = milli

    def _count_bucket(self, cell: int) -> None:
        shared = self._shared.get(cell)
        state = (self._whole[cell], tuple(sorted(shared.values())) if shared else ())
        self._states[cell] = state
        sort = self._type_of[cell]
        self._buckets_by_state[sort].setdefault(state, {})[cell] = None
        self.fit_counts[:, sort] += self._tasks_of_sizes(state)
        if own := self._own.get(cell):
            self._more[cell] = [
                (number, _extra_fit_count(size, mine.values(), self._whole[cell]))
                for tenant, mine in own.items()
                for number, size in self._sizes_of.get(tenant, ())
            ]
            for number, more in self._more[cell]:
                self.fit_counts[number, sort] += more

    def _uncount_bucket(self, cell: int) -> None:
        sort = self._type_of[cell]
        having, state = self._buckets_by_state[sort], self._states[cell]
        cells = having[state]
        del cells[cell]
        if not cells:
            del having[state]
        self.fit_counts[:, sort] -= self._tasks_of_sizes(state)
        for number, more in self._more.pop(cell, ()):
            self.fit_counts[number, sort] -= more

    def _tasks_of_sizes(self, state: BucketState) -> np.ndarray:
        """How many tasks of each size a cell in ``state`` takes, of a tenant that has nothing there."""
        known = self._tasks_in.get(state)
        if known is None:
            known = np.array([_fit_count(state, size) for size in self._sizes], dtype=np.int64)
            self._tasks_in[state] = known
        return known


def _fit_count(state: BucketState, need: BucketRequest) -> int:
    """How many tasks a cell in ``state`` takes; of shares of several GPUs no two on one GPU, which is the least.

    Of a tenant as if it had nothing there.
    """
    whole, shared = state if not need.tenant else (state[0], ())
    if need.milli == WHOLE_MILLI:
        return whole // need.gpus
    if need.gpus == 1:
        return whole * (WHOLE_MILLI // need.milli) + sum(milli // need.milli for milli in shared)
    able = whole if need.milli <= WHOLE_MILLI else 0
    return (able + sum(milli >= need.milli for milli in shared)) // need.gpus


def _tightness(state: BucketState, need: BucketRequest) -> tuple[int, int]:
    """What a cell that takes the task has, least first: of the GPU that a share joins, then in all."""
    whole, shared = state if not need.tenant else (state[0], ())
    joins = (
        0 if need.milli == WHOLE_MILLI else min((m for m in shared if m >= need.milli), default=WHOLE_MILLI)
    )
    return joins, whole * WHOLE_MILLI + sum(shared)


def _extra_fit_count(need: BucketRequest, own: Collection[int], whole: int) -> int:
    """How many more tasks a cell takes where their tenant has GPUs of its own with so much free."""
    if need.gpus == 1:
        return sum(milli // need.milli for milli in own)
    able = whole if need.milli <= WHOLE_MILLI else 0
    return (able + sum(milli >= need.milli for milli in own)) // need.gpus - able // need.gpus
