"""What room costs, node by node: the work that would be lost to seat one more task of a shape there.

For a pending shape and a set of gangs that may leave, every node has a price: walk the gangs that stand there,
first to leave first, until one more task fits; the price is what they would lose together. Cheapest first, a
search needs to look at few nodes. A price is made when its node may be the cheapest, never before.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from heapq import heapify, heappop, heappush, heapreplace

import numpy as np

from scheduler.core.gang import Gang, State, Task
from scheduler.core.placement import Shape
from scheduler.core.scene import PoolScene


class Leavers:
    """A set of gangs that may leave: who stands on each node, and the floor with all of them gone."""

    def __init__(self, scene: PoolScene, gangs: Iterable[Gang], lost_work: Callable[[Gang], float]) -> None:
        """``gangs`` come in the order in which they leave."""
        self.lost = {}
        self.there: dict[int, list[Gang]] = {}
        self.cleared = scene.later.copy()
        for gang in gangs:
            self.lost[gang.job] = lost_work(gang)
            nodes = set()
            for task in standing(gang):
                for place in task.held:
                    self.cleared.change(place, +1)
                    nodes.add(place.node)
            for node in nodes:
                self.there.setdefault(node, []).append(gang)


class Prices:
    """Prices of the nodes of a pool for one shape and one set of leavers."""

    def __init__(self, scene: PoolScene, shape: Shape, leavers: Leavers) -> None:
        self._scene = scene
        self._shape = shape
        self._leavers = leavers
        holds = leavers.cleared.capacity(shape)
        self.most = int(holds.sum())
        """How many tasks would fit with every leaver gone; never too few."""
        lost = leavers.lost
        self._heap = [
            (lost[there[0].job], node) for node, there in leavers.there.items() if holds[node]
        ]  # no price is below the first leaver's
        heapify(self._heap)
        self._refused: list[tuple[float, int]] = []

    def cheapest(self) -> Iterator[int]:
        """Nodes from the cheapest on, each as often as it has more to give; ``refuse`` sets one aside."""
        self._refused = []
        try:
            while self._heap:
                price, node = self._heap[0]
                if math.isinf(price):
                    return
                now = self._price(node)
                if now != price:
                    heapreplace(self._heap, (now, node))
                    continue
                yield node
        finally:
            for entry in self._refused:
                heappush(self._heap, entry)

    def refuse(self, node: int) -> None:
        """``node``, which was handed out last, is of no use in this search."""
        self._refused.append(heappop(self._heap))

    def there(self, node: int) -> list[Gang]:
        """Who may leave a node, first to leave first."""
        return self._leavers.there.get(node, [])

    def _price(self, node: int) -> float:
        later, lost = self._scene.later, 0.0
        rows = np.array([node])
        before = int(later.capacity_of(self._shape, rows)[0])
        taken = []
        price = math.inf
        for gang in self._leavers.there[node]:
            places = [place for task in standing(gang) for place in task.held if place.node == node]
            if not places:
                continue
            lost += self._leavers.lost[gang.job]
            for place in places:
                later.change(place, +1)
                taken.append(place)
            if int(later.capacity_of(self._shape, rows)[0]) > before:
                price = lost
                break
        for place in taken:
            later.change(place, -1)
        return price


def standing(gang: Gang) -> list[Task]:
    """The tasks that could leave."""
    return [task for task in gang.tasks if task.state is State.RUNS or task.state is State.STARTS]
