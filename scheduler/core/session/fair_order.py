"""The fair order of a queue whose state does not change: the order of ``JobQueue``, computed at once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from heapq import heapify, heappop, heapreplace

from scheduler.core.model.snapshot import ProjectId
from scheduler.core.session.gang import Gang
from scheduler.core.session.job_queue import sort_gangs
from scheduler.core.session.pool import PoolState


def sort_fairly(pool_state: PoolState, gangs: Iterable[Gang]) -> list[Gang]:
    """Return pending gangs of one pool in fair order by the current ledger."""
    tree = pool_state.tree
    by_leaf: dict[ProjectId, list[Gang]] = {}
    for gang in gangs:
        by_leaf.setdefault(gang.leaf_project, []).append(gang)
    below: dict[ProjectId | None, set[ProjectId]] = {}
    for leaf in by_leaf:
        for level in tree.path[leaf]:
            below.setdefault(tree.parent[level], set()).add(level)
    return list(_sort_children(None, pool_state, by_leaf, below))


def _sort_children(
    parent: ProjectId | None,
    pool_state: PoolState,
    by_leaf: Mapping[ProjectId, list[Gang]],
    below: Mapping[ProjectId | None, set[ProjectId]],
) -> Sequence[Gang]:
    """Merge the queues below one project.

    This is not a closure, because a recursive closure is a reference cycle that would keep the pool state
    alive.
    """
    parts = {
        project: _sort_leaf(pool_state, by_leaf[project])
        if project in by_leaf
        else _sort_children(project, pool_state, by_leaf, below)
        for project in below.get(parent, ())
    }
    return _merge(pool_state, parts)


def _sort_leaf(pool_state: PoolState, gangs: list[Gang]) -> list[Gang]:
    """Sort by priority, then past usage of the user, then ``gang_sort_key``."""
    sort_gangs(gangs)
    if len(users := {gang.user for gang in gangs}) > 1:
        by_usage = pool_state.users_of(gangs[0].leaf_project)
        rank = {user: by_usage.rank_key(user) for user in users}
        gangs.sort(key=lambda gang: rank[gang.user])
    if len({gang.priority for gang in gangs}) > 1:
        gangs.sort(key=lambda gang: -gang.priority)
    return gangs


def _merge(pool_state: PoolState, parts: dict[ProjectId, Sequence[Gang]]) -> Sequence[Gang]:
    """Merge the queues of siblings: the queue whose next gang has the smallest key goes next."""
    queues = list(parts.values())
    if len(queues) == 1:
        return queues[0]
    turns = _key_ranks(pool_state, parts)
    heap = [(mine[0], queue, 0) for queue, mine in enumerate(turns)]  # key rank, queue, position in it
    heapify(heap)
    merged: list[Gang] = []
    while heap:
        turn, queue, at = heap[0]
        mine, end = turns[queue], at + 1
        while end < len(mine) and mine[end] == turn:  # ranks are equal: the queue stays first
            end += 1
        merged += queues[queue][at:end]
        if end == len(mine):
            heappop(heap)
        else:
            heapreplace(heap, (mine[end], queue, end))
    return merged


def _key_ranks(pool_state: PoolState, parts: dict[ProjectId, Sequence[Gang]]) -> list[list[int]]:
    """Return the rank of each gang's sibling key among all keys, since integers compare faster than keys."""
    asked = {project: [gang.next_demand for gang in queue] for project, queue in parts.items()}
    keys = {(p, each): pool_state.sibling_key(p, each) for p, mine in asked.items() for each in set(mine)}
    place = {pair: n for n, pair in enumerate(sorted(keys, key=keys.__getitem__))}
    found = []
    for project, mine in asked.items():
        turn = {each: place[project, each] for each in set(mine)}
        found.append([turn[each] for each in mine])
    return found
