"""The order of a queue in which nothing changes any more: what ``TurnQueue`` would hand out, made in one go."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from heapq import heapify, heappop, heapreplace

from scheduler.core.cluster import ProjectId
from scheduler.core.gang import Gang
from scheduler.core.order_rules import SiblingKey
from scheduler.core.scene import PoolScene
from scheduler.core.turns import sort_by_turn


def in_turn(scene: PoolScene, gangs: Iterable[Gang]) -> list[Gang]:
    """Waiting gangs of one pool in fair order, as the ledger stands; none is started meanwhile."""
    tree = scene.tree
    by_leaf: dict[ProjectId, list[Gang]] = {}
    for gang in gangs:
        by_leaf.setdefault(gang.leaf, []).append(gang)
    below: dict[ProjectId | None, set[ProjectId]] = {}
    for leaf in by_leaf:
        for level in tree.path[leaf]:
            below.setdefault(tree.parent[level], set()).add(level)

    def order(parent: ProjectId | None) -> Sequence[Gang]:
        parts = {
            project: _of_leaf(scene, by_leaf[project]) if project in by_leaf else order(project)
            for project in below.get(parent, ())
        }
        return _merged(scene, parts)

    return list(order(None))


def _of_leaf(scene: PoolScene, gangs: list[Gang]) -> list[Gang]:
    """Priority, then the person who used least (where people take turns), then the order of each one's gangs."""
    sort_by_turn(gangs)
    people = scene.people_of(gangs[0].leaf) if scene.policy.people_in_turn else None
    if people is not None and len(users := {gang.user for gang in gangs}) > 1:
        rank = {user: people.rank_key(user) for user in users}
        gangs.sort(key=lambda gang: rank[gang.user])
    if len({gang.priority for gang in gangs}) > 1:
        gangs.sort(key=lambda gang: -gang.priority)
    return gangs


def _merged(scene: PoolScene, parts: dict[ProjectId, Sequence[Gang]]) -> Sequence[Gang]:
    """The queues of siblings as one: whoever's next gang has the smallest key is next, gang by gang."""
    if len(parts) == 1:
        return next(iter(parts.values()))
    heap: list[tuple[SiblingKey[ProjectId], int]] = []  # and how much of its queue has been handed out
    for project, queue in parts.items():
        heap.append((scene.sibling_key(project, queue[0].asked), 0))
    heapify(heap)
    merged: list[Gang] = []
    while heap:
        key, at = heap[0]
        queue = parts[key.project]
        asked, kind, end = queue[at].asked, queue[at].kind, at + 1
        while end < len(queue) and (queue[end].kind == kind >= 0 or queue[end].asked == asked):
            end += 1  # the key is the same: still the smallest
        merged += queue[at:end]
        if end == len(queue):
            heappop(heap)
        else:
            heapreplace(heap, (scene.sibling_key(key.project, queue[end].asked), end))
    return merged
