"""Coarse free capacity for queue simulations: buckets of equivalent GPUs and what is free in them.

A *bucket* is the set of GPUs of one node that the same pending tasks may use; buckets open to the same tasks
have one *bucket type*. ``NodePlacer`` determines this once. In a pool of equal nodes and unconstrained
requests there is one type, and a bucket is a node. A task uses one bucket. CPU and memory use is not
simulated: a bucket is closed to a task only if even the empty node has too little of them.

Where GPU sharing is exclusive, GPUs with shares of a *tenant* are closed to others until the last share is
gone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from scheduler.core.capacity.placement import NodePlacer
from scheduler.core.model.snapshot import WHOLE_MILLI, NodeId, NodeRow, RunningRow, RunningTask, TaskShape

BucketSlots = tuple[int, int, tuple[int, ...]]
"""A bucket with a number of whole GPUs; or with milli, and the numbers of the shared GPUs."""

BucketState = tuple[int, tuple[int, ...]]
"""Free capacity of a bucket: whole GPUs, and the free milli of shared GPUs open to all tenants, ascending."""

TaskSize = tuple[int, int, int]
"""Number of GPUs of a task, milli of each, and its tenant."""


class BucketRequest(NamedTuple):
    """What one task takes: GPUs and milli of each, in a bucket of one of these types (ascending)."""

    gpus: int
    milli: int
    bucket_types: tuple[int, ...]
    tenant: int = 0  # which alone may share its GPUs; 0 is any

    @property
    def size(self) -> TaskSize:
        return self.gpus, self.milli, self.tenant


@dataclass(frozen=True, slots=True)
class CapacityBuckets:
    """All buckets of a pool and their free capacity now."""

    type_of: tuple[int, ...]
    whole_gpus: tuple[int, ...]
    shared: Mapping[int, Mapping[int, int]]
    """By bucket: the free milli of its shared GPUs, by GPU number."""
    gpu_number_limit: int
    """Upper bound (exclusive) of GPU numbers."""
    tenants: Mapping[int, int] = field(default_factory=dict)
    """Tenant of a shared GPU by number, where sharing is exclusive."""


class BucketBuilder:
    """Divides the nodes of a pool into buckets for given task shapes.

    ``node_sets`` are sets of nodes to distinguish; ``sharing`` are the running jobs if GPU sharing is
    exclusive.
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
        alike = dict.fromkeys(shape._replace(tenant=None) for shape in shapes)
        restricted = (self._placer.hardware.restricted_shapes(shape) for shape in alike)
        shapes = list(alike | dict.fromkeys(each for mine in restricted if len(mine) > 1 for each in mine))
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
        bucket_types: dict[bytes, int] = {}
        if opens and len(self._placer.nodes):
            signs = np.packbits(np.stack(layers), axis=0).transpose(1, 2, 0).copy()
            used = np.logical_or.reduce(opens)
            for node in range(len(self._placer.nodes)):
                mine: dict[bytes, int] = {}
                for slot in np.flatnonzero(used[node]).tolist():
                    sign = signs[node, slot].tobytes()
                    if sign not in mine:
                        mine[sign] = len(self._type_of)
                        self._type_of.append(bucket_types.setdefault(sign, len(bucket_types)))
                    self._bucket_at[node, slot] = mine[sign]
        bits = [np.unpackbits(np.frombuffer(sign, dtype=np.uint8)) for sign in bucket_types]
        layer_sorts = [tuple(s for s, has in enumerate(bits) if has[layer]) for layer in range(len(layers))]
        self._types_of = dict(zip(shapes, layer_sorts[: len(shapes)], strict=True))  # by shape without tenant
        self.types_by_node_set: list[frozenset[int]] = [
            frozenset(each) for each in layer_sorts[len(shapes) :]
        ]
        """The bucket types of each of the ``node_sets``."""

    def request_for(self, shape: TaskShape) -> BucketRequest:
        """Return the request of a task of one of the shapes."""
        bucket_types = self._types_of[shape._replace(tenant=None)]
        return BucketRequest(
            shape.request.gpus, shape.request.milli, bucket_types, self._placer.tenant_id(shape)
        )

    def hardware_types(self, shapes: Collection[TaskShape]) -> tuple[frozenset[int], ...]:
        """Return for each hardware that a gang of these shapes may use its bucket types; empty for any."""
        choices = self._placer.hardware.choices(shapes)
        return tuple(
            frozenset(
                bucket_type
                for shape in shapes
                for bucket_type in self._types_of[hardware.restrict(shape)._replace(tenant=None)]
            )
            for hardware in (choices if len(choices) > 1 else ())
        )

    def slots_of(self, tasks: Iterable[RunningTask]) -> tuple[BucketSlots, ...]:
        """Return what running tasks will release, without GPUs that no pending task may use."""
        whole: Counter[int] = Counter()
        shares: list[BucketSlots] = []
        for held in self._placer.slots_held_by(tasks):
            for slot in held.slots:
                bucket = self._bucket_at.get((held.node, slot))
                if bucket is None:
                    continue
                if held.milli == WHOLE_MILLI:
                    whole[bucket] += 1
                else:
                    shares.append((bucket, held.milli, (held.node * self._width + slot,)))
        return (*((bucket, gpus, ()) for bucket, gpus in whole.items()), *shares)

    def build(self, running: Iterable[Sequence[BucketSlots]]) -> CapacityBuckets:
        """Return the buckets with what is free now, next to these slots of running jobs."""
        carry = {gpu for places in running for _, _, gpus in places for gpu in gpus}
        whole = [0] * len(self._type_of)
        shared: dict[int, dict[int, int]] = {}
        tenants: dict[int, int] = {}
        for (node, slot), bucket in self._bucket_at.items():
            milli, gpu = int(self._placer.free_milli[node, slot]), node * self._width + slot
            if milli == WHOLE_MILLI:
                whole[bucket] += 1
            elif milli > 0 or gpu in carry:
                shared.setdefault(bucket, {})[gpu] = milli
                if tenant := self._placer.tenant_on(node, slot):
                    tenants[gpu] = tenant
        numbers = len(self._placer.nodes) * self._width
        return CapacityBuckets(tuple(self._type_of), tuple(whole), shared, numbers, tenants)


class BucketOccupancy:
    """Free capacity per bucket during a simulation, with an index of buckets by state."""

    def __init__(self, buckets: CapacityBuckets, sizes: Sequence[TaskSize]) -> None:
        self.type_of = buckets.type_of
        self._sizes = [BucketRequest(gpus, milli, (), tenant) for gpus, milli, tenant in sizes]
        self._sizes_of: dict[int, list[tuple[int, BucketRequest]]] = {}
        """By tenant: indexes in ``sizes`` and requests."""
        for number, size in enumerate(self._sizes):
            if size.tenant:
                self._sizes_of.setdefault(size.tenant, []).append((number, size))
        self.fit_counts = np.zeros((len(sizes), max(buckets.type_of, default=-1) + 1), dtype=np.int64)
        """Lower bound of the tasks of each size that fit, by bucket type."""
        self._tasks_in: dict[BucketState, np.ndarray] = {}
        self.whole_gpus = list(buckets.whole_gpus)
        self._shared: dict[int, dict[int, int]] = {}  # by bucket: shared GPUs open to all tenants
        self._own: dict[int, dict[int, dict[int, int]]] = {}
        """By bucket and tenant: shared GPUs open to that tenant only."""
        self._buckets_of: dict[int, dict[int, None]] = {}  # by tenant: buckets with such GPUs
        self._tenants: dict[int, int] = {}  # by GPU
        self._next_gpu = buckets.gpu_number_limit
        self._buckets_by_state: list[dict[BucketState, dict[int, None]]] = [
            {} for _ in range(max(buckets.type_of, default=-1) + 1)
        ]
        self._states: list[BucketState] = [(0, ())] * len(buckets.type_of)
        self._more: dict[int, list[tuple[int, int]]] = {}
        """By bucket: index of size, and additional tasks of its tenant."""
        for bucket, gpus in buckets.shared.items():
            for gpu, milli in gpus.items():
                self._add_shared_gpu(bucket, gpu, buckets.tenants.get(gpu, 0), milli)
        for bucket in range(len(buckets.type_of)):
            self._count_bucket(bucket)

    def freest_buckets(self, bucket_types: Iterable[int]) -> Iterator[int]:
        """Yield the buckets of these types with free whole GPUs, those with the most first."""
        states = [
            (-state[0], bucket_type, state)
            for bucket_type in bucket_types
            for state in self._buckets_by_state[bucket_type]
            if state[0]
        ]
        for _, bucket_type, state in sorted(states):
            yield from self._buckets_by_state[bucket_type][state]

    def allocate(self, request: BucketRequest, bucket_types: Iterable[int]) -> BucketSlots | None:
        """Allocate one task in the bucket with the tightest fit; return None if none fits."""
        bucket_types = list(bucket_types)
        bucket = self._fullest_shared(request, bucket_types) if request.tenant else None
        if bucket is None:
            bucket = self._best_fit(request, bucket_types)
        if bucket is None:
            return None
        self._uncount_bucket(bucket)
        if request.milli == WHOLE_MILLI:
            self.whole_gpus[bucket] -= request.gpus
            place: BucketSlots = bucket, request.gpus, ()
        else:
            place = self._take_shares(bucket, request)
        self._count_bucket(bucket)
        return place

    def release(self, slots: BucketSlots) -> None:
        bucket, amount, gpus = slots
        self._uncount_bucket(bucket)
        if not gpus:
            self.whole_gpus[bucket] += amount
        for gpu in gpus:
            tenant = self._tenants.get(gpu, 0)
            shared = self._own[bucket][tenant] if tenant else self._shared[bucket]
            shared[gpu] += amount
            if shared[gpu] == WHOLE_MILLI:
                del shared[gpu]
                self.whole_gpus[bucket] += 1
                if tenant:
                    del self._tenants[gpu]
                    if not shared:
                        del self._own[bucket][tenant], self._buckets_of[tenant][bucket]
        self._count_bucket(bucket)

    def _best_fit(self, request: BucketRequest, bucket_types: Iterable[int]) -> int | None:
        """Return the tightest bucket for a task that joins no GPU of its own tenant."""
        best: tuple[tuple[int, int], int, BucketState] | None = None
        for bucket_type in bucket_types:
            for state in self._buckets_by_state[bucket_type]:
                if _fit_count(state, request):
                    mine = (_tightness(state, request), bucket_type, state)
                    if best is None or mine[0] < best[0]:
                        best = mine
        return None if best is None else next(reversed(self._buckets_by_state[best[1]][best[2]]))

    def _fullest_shared(self, request: BucketRequest, bucket_types: Sequence[int]) -> int | None:
        """Return the bucket where the task joins the fullest GPU of its tenant that has enough left."""
        best: tuple[int, int, int] | None = None
        for bucket in self._buckets_of.get(request.tenant, ()):
            if self.type_of[bucket] in bucket_types:
                able = [
                    milli for milli in self._own[bucket][request.tenant].values() if milli >= request.milli
                ]
                if able and len(able) + self.whole_gpus[bucket] >= request.gpus:
                    mine = (min(able), self.whole_gpus[bucket], bucket)
                    best = mine if best is None else min(best, mine)
        return None if best is None else best[2]

    def _take_shares(self, bucket: int, request: BucketRequest) -> BucketSlots:
        """Take shares of the fullest GPUs that have enough left, then of whole ones."""
        shared = (
            self._own.get(bucket, {}).get(request.tenant, {})
            if request.tenant
            else self._shared.get(bucket, {})
        )
        roomy = sorted((milli, gpu) for gpu, milli in shared.items() if milli >= request.milli)
        gpus = [gpu for _, gpu in roomy[: request.gpus]]
        for gpu in gpus:
            shared[gpu] -= request.milli
        while len(gpus) < request.gpus:
            self.whole_gpus[bucket] -= 1
            self._add_shared_gpu(bucket, self._next_gpu, request.tenant, WHOLE_MILLI - request.milli)
            gpus.append(self._next_gpu)
            self._next_gpu += 1
        return bucket, request.milli, tuple(gpus)

    def _add_shared_gpu(self, bucket: int, gpu: int, tenant: int, milli: int) -> None:
        if tenant:
            self._tenants[gpu] = tenant
            self._own.setdefault(bucket, {}).setdefault(tenant, {})[gpu] = milli
            self._buckets_of.setdefault(tenant, {})[bucket] = None
        else:
            self._shared.setdefault(bucket, {})[gpu] = milli

    def _count_bucket(self, bucket: int) -> None:
        shared = self._shared.get(bucket)
        state = (self.whole_gpus[bucket], tuple(sorted(shared.values())) if shared else ())
        self._states[bucket] = state
        bucket_type = self.type_of[bucket]
        self._buckets_by_state[bucket_type].setdefault(state, {})[bucket] = None
        self.fit_counts[:, bucket_type] += self._tasks_of_sizes(state)
        if own := self._own.get(bucket):
            self._more[bucket] = [
                (number, _extra_fit_count(size, mine.values(), self.whole_gpus[bucket]))
                for tenant, mine in own.items()
                for number, size in self._sizes_of.get(tenant, ())
            ]
            for number, more in self._more[bucket]:
                self.fit_counts[number, bucket_type] += more

    def _uncount_bucket(self, bucket: int) -> None:
        bucket_type = self.type_of[bucket]
        having, state = self._buckets_by_state[bucket_type], self._states[bucket]
        buckets = having[state]
        del buckets[bucket]
        if not buckets:
            del having[state]
        self.fit_counts[:, bucket_type] -= self._tasks_of_sizes(state)
        for number, more in self._more.pop(bucket, ()):
            self.fit_counts[number, bucket_type] -= more

    def _tasks_of_sizes(self, state: BucketState) -> np.ndarray:
        """Return the tasks of each size that fit a bucket in ``state``, for tenants with nothing there."""
        known = self._tasks_in.get(state)
        if known is None:
            known = np.array([_fit_count(state, size) for size in self._sizes], dtype=np.int64)
            self._tasks_in[state] = known
        return known


def _fit_count(state: BucketState, request: BucketRequest) -> int:
    """Return how many tasks fit a bucket in ``state``; a lower bound for tasks with shares of several GPUs.

    A tenant counts as having nothing there.
    """
    whole, shared = state if not request.tenant else (state[0], ())
    if request.milli == WHOLE_MILLI:
        return whole // request.gpus
    if request.gpus == 1:
        return whole * (WHOLE_MILLI // request.milli) + sum(milli // request.milli for milli in shared)
    able = whole if request.milli <= WHOLE_MILLI else 0
    return (able + sum(milli >= request.milli for milli in shared)) // request.gpus


def _tightness(state: BucketState, request: BucketRequest) -> tuple[int, int]:
    """Return the capacity of the GPU that a share joins, and of the bucket; the least is tightest."""
    whole, shared = state if not request.tenant else (state[0], ())
    joins = (
        0
        if request.milli == WHOLE_MILLI
        else min((m for m in shared if m >= request.milli), default=WHOLE_MILLI)
    )
    return joins, whole * WHOLE_MILLI + sum(shared)


def _extra_fit_count(request: BucketRequest, own: Collection[int], whole: int) -> int:
    """Return how many more tasks fit where their tenant has GPUs of its own with this much free."""
    if request.gpus == 1:
        return sum(milli // request.milli for milli in own)
    able = whole if request.milli <= WHOLE_MILLI else 0
    return (able + sum(milli >= request.milli for milli in own)) // request.gpus - able // request.gpus
