"""Eviction cost by node: the work lost to fit one more task of a shape there.

The cost of a node is the work that its candidates lose together, evicted in order until one more task fits.
It is at least what the first of them loses, so nodes are visited by that bound and few costs are computed per
search.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator
from heapq import heapify, heappop, heappush

from scheduler.core.model.snapshot import ProjectId
from scheduler.core.model.task_shape import SlotBatch, TaskShape
from scheduler.core.session.gang import Gang
from scheduler.core.session.pool import PoolState


class NodeVictims:
    """A set of eviction candidates: those on each node, and the free capacity with all of them gone."""

    def __init__(
        self, pool_state: PoolState, gangs: Iterable[Gang], lost_gpu_seconds: Callable[[Gang], float]
    ) -> None:
        """``gangs`` are in order of eviction."""
        gangs = list(gangs)
        self.lost_gpu_seconds = {gang.job: lost_gpu_seconds(gang) for gang in gangs}
        held = [gang.evictable_slots for gang in gangs]
        self.by_node: dict[int, list[Gang]] = {}
        for gang, places in zip(gangs, held, strict=True):
            for node in {place.node for place in places}:
                self.by_node.setdefault(node, []).append(gang)
        self.capacity_without = pool_state.idle_and_releasing.copy()
        self.capacity_without.release_batch(SlotBatch(held), len(held))

    def min_cost(self, node: int) -> float:
        """Return what the first candidate left on the node would lose."""
        for gang in self.by_node[node]:
            if gang.evictable_tasks:
                return self.lost_gpu_seconds[gang.job]
        return math.inf


class NodeEvictionCosts:
    """Eviction costs of the nodes of a pool for one shape and one set of candidates."""

    def __init__(self, pool_state: PoolState, shape: TaskShape, victims: NodeVictims) -> None:
        self._pool_state = pool_state
        self._shape = shape
        self._victims = victims
        holds = victims.capacity_without.capacity(shape)
        self.max_tasks = int(holds.sum())
        """Upper bound of the tasks that fit with all candidates gone."""
        lost = victims.lost_gpu_seconds
        self._min_costs = [
            (lost[there[0].job], node) for node, there in victims.by_node.items() if holds[node]
        ]
        heapify(self._min_costs)
        self._rejected: set[int] = set()

    def cheapest_nodes(self, victim_projects: Collection[ProjectId]) -> Iterator[int]:
        """Yield nodes by cost of evicting ``victim_projects``, each again while it can free more."""
        self._rejected = set()
        looked: list[tuple[float, int]] = []  # entries to restore to ``_min_costs``
        priced: list[tuple[float, int]] = []
        try:
            while True:
                while self._min_costs and (not priced or self._min_costs[0][0] < priced[0][0]):
                    least, node = heappop(self._min_costs)
                    now = self._victims.min_cost(node)
                    if now > least:
                        if not math.isinf(now):
                            heappush(self._min_costs, (now, node))
                        continue
                    looked.append((least, node))
                    if not math.isinf(price := self._cost(node, victim_projects)):
                        heappush(priced, (price, node))
                if not priced:
                    return
                _, node = heappop(priced)
                yield node
                if node not in self._rejected and not math.isinf(price := self._cost(node, victim_projects)):
                    heappush(priced, (price, node))
        finally:
            for entry in looked:
                heappush(self._min_costs, entry)

    def reject(self, node: int) -> None:
        """Exclude ``node``, the last one yielded, from this search."""
        self._rejected.add(node)

    def victims_on(self, node: int) -> list[Gang]:
        """Return the candidates on a node, in order of eviction."""
        return self._victims.by_node.get(node, [])

    def _cost(self, node: int, victim_projects: Collection[ProjectId]) -> float:
        later, lost = self._pool_state.idle_and_releasing, 0.0
        before = later.capacity_on(self._shape, node)
        taken = []
        price = math.inf
        for gang in self._victims.by_node[node]:
            if gang.leaf_project not in victim_projects:
                continue
            places = [place for task in gang.evictable_tasks for place in task.held if place.node == node]
            if not places:
                continue
            lost += self._victims.lost_gpu_seconds[gang.job]
            for place in places:
                later.adjust(place, +1)
                taken.append(place)
            if later.capacity_on(self._shape, node) > before:
                price = lost
                break
        for place in taken:
            later.adjust(place, -1)
        return price
