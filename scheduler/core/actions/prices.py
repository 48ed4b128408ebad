"""What room costs, node by node: the work that would be lost to seat one more task of a shape there.

For a pending shape and a set of gangs that may leave, every node has a price: walk the gangs that stand there,
first to leave first, until one more task fits; the price is what they would lose together. No price is below what
the first of them would lose, so nodes are looked at by that, and few of them are priced in one search.
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
    """A set of gangs that may leave: who stands on each node, and the floor with all of them gone."""

    def __init__(
        self, pool_state: PoolState, gangs: Iterable[Gang], lost_gpu_seconds: Callable[[Gang], float]
    ) -> None:
        """``gangs`` come in the order in which they leave."""
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
        """What the first of those who still stand on a node would lose."""
        for gang in self.by_node[node]:
            if gang.evictable_tasks:
                return self.lost_gpu_seconds[gang.job]
        return math.inf


class NodeEvictionCosts:
    """Prices of the nodes of a pool for one shape and one set of leavers."""

    def __init__(self, pool_state: PoolState, shape: TaskShape, victims: NodeVictims) -> None:
        self._pool_state = pool_state
        self._shape = shape
        self._victims = victims
        holds = victims.capacity_without.capacity(shape)
        self.max_tasks = int(holds.sum())
        """How many tasks would fit with every leaver gone; never too few."""
        lost = victims.lost_gpu_seconds
        self._min_costs = [
            (lost[there[0].job], node) for node, there in victims.by_node.items() if holds[node]
        ]
        heapify(self._min_costs)
        self._rejected: set[int] = set()

    def cheapest_nodes(self, victim_projects: Collection[ProjectId]) -> Iterator[int]:
        """Nodes from the cheapest on, where only gangs of ``givers`` leave; each as often as it has more to give."""
        self._rejected = set()
        looked: list[tuple[float, int]] = []  # as they stood in ``_least``
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
        """``node``, which was handed out last, is of no use in this search."""
        self._rejected.add(node)

    def victims_on(self, node: int) -> list[Gang]:
        """Who may leave a node, first to leave first."""
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
