"""What room costs, node by node: the work that would be lost to seat one more task of a shape there.

For a pending shape and a set of gangs that may leave, every node has a price: walk the gangs that stand there,
first to leave first, until one more task fits; the price is what they would lose together. No price is below what
the first of them would lose, so nodes are looked at by that, and few of them are priced in one search.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator
from heapq import heapify, heappop, heappush

from scheduler.core.cluster import ProjectId
from scheduler.core.gang import Gang
from scheduler.core.scene import PoolScene
from scheduler.core.shape import Pile, Shape


class Leavers:
    """A set of gangs that may leave: who stands on each node, and the floor with all of them gone."""

    def __init__(self, scene: PoolScene, gangs: Iterable[Gang], lost_work: Callable[[Gang], float]) -> None:
        """``gangs`` come in the order in which they leave."""
        gangs = list(gangs)
        self.lost = {gang.job: lost_work(gang) for gang in gangs}
        held = [gang.places for gang in gangs]
        self.there: dict[int, list[Gang]] = {}
        for gang, places in zip(gangs, held, strict=True):
            for node in {place.node for place in places}:
                self.there.setdefault(node, []).append(gang)
        self.cleared = scene.later.copy()
        self.cleared.give_back_pile(Pile(held), len(held))

    def least(self, node: int) -> float:
        """What the first of those who still stand on a node would lose."""
        for gang in self.there[node]:
            if gang.standing:
                return self.lost[gang.job]
        return math.inf


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
        self._least = [(lost[there[0].job], node) for node, there in leavers.there.items() if holds[node]]
        heapify(self._least)
        self._refused: set[int] = set()

    def cheapest(self, givers: Collection[ProjectId]) -> Iterator[int]:
        """Nodes from the cheapest on, where only gangs of ``givers`` leave; each as often as it has more to give."""
        self._refused = set()
        looked: list[tuple[float, int]] = []  # as they stood in ``_least``
        priced: list[tuple[float, int]] = []
        try:
            while True:
                while self._least and (not priced or self._least[0][0] < priced[0][0]):
                    least, node = heappop(self._least)
                    now = self._leavers.least(node)
                    if now > least:
                        if not math.isinf(now):
                            heappush(self._least, (now, node))
                        continue
                    looked.append((least, node))
                    if not math.isinf(price := self._price(node, givers)):
                        heappush(priced, (price, node))
                if not priced:
                    return
                _, node = heappop(priced)
                yield node
                if node not in self._refused and not math.isinf(price := self._price(node, givers)):
                    heappush(priced, (price, node))
        finally:
            for entry in looked:
                heappush(self._least, entry)

    def refuse(self, node: int) -> None:
        """``node``, which was handed out last, is of no use in this search."""
        self._refused.add(node)

    def there(self, node: int) -> list[Gang]:
        """Who may leave a node, first to leave first."""
        return self._leavers.there.get(node, [])

    def _price(self, node: int, givers: Collection[ProjectId]) -> float:
        later, lost = self._scene.later, 0.0
        before = later.capacity_on(self._shape, node)
        taken = []
        price = math.inf
        for gang in self._leavers.there[node]:
            if gang.leaf not in givers:
                continue
            places = [place for task in gang.standing for place in task.held if place.node == node]
            if not places:
                continue
            lost += self._leavers.lost[gang.job]
            for place in places:
                later.change(place, +1)
                taken.append(place)
            if later.capacity_on(self._shape, node) > before:
                price = lost
                break
        for place in taken:
            later.change(place, -1)
        return price
