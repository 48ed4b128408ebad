"""Queues in fair order: pending gangs of one pool, and eviction candidates in reverse order.

Siblings are ordered by ``sibling_order``. Within a project: priority; then the user with the least past usage;
then gangs below their minimum before those at it before those that grow; then the order that the user gave to
their own jobs (``queue_rank``); then age. The order is updated after each start. Candidates come in reverse order
of the project tree, and within a project in the policy's victim order.

The age of a job is ``submitted + A x GPUs + P x predicted duration``, with A = ``size_penalty_s_per_gpu``
(seconds per GPU) and P = ``predicted_duration_weight``. The shift is constant, so a job is passed only by jobs
submitted within its shift, and none starves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from heapq import heapify, heappop, heapreplace

from scheduler.core.model.policy import Policy
from scheduler.core.model.resources import ZERO, ResourceVector
from scheduler.core.model.snapshot import WHOLE_MILLI, PendingRow, ProjectId, UserId
from scheduler.core.session.gang import Gang, GangTask, total_demand
from scheduler.core.session.pool import PoolState
from scheduler.core.shares.fairshare import ProjectUsers
from scheduler.core.shares.sibling_order import SiblingKey, sibling_key


def effective_submit_s(row: PendingRow, policy: Policy) -> float:
    """Return the time that orders ``row`` in the queue, in seconds since the epoch; smaller goes first."""
    shift_s = policy.size_penalty_s_per_gpu * row.total_milli / WHOLE_MILLI
    if row.predicted_duration_s is not None:
        shift_s += policy.predicted_duration_weight * row.predicted_duration_s
    return row.submitted_s + shift_s


def queue_ages_s(rows: Sequence[PendingRow], policy: Policy) -> list[float]:
    """Return ``effective_submit_s`` of the rows, exchanged among the jobs of a user as ``queue_rank`` orders them."""
    ages_s = [effective_submit_s(row, policy) for row in rows]
    if not any(row.queue_rank for row in rows):
        return ages_s
    groups: dict[tuple[ProjectId, UserId, int], list[int]] = {}
    for at, row in enumerate(rows):
        groups.setdefault((row.project, row.user, row.priority), []).append(at)
    for group in groups.values():
        ordered = sorted(group, key=lambda at: (rows[at].queue_rank, ages_s[at], rows[at].job))
        for at, age_s in zip(ordered, sorted(ages_s[at] for at in group), strict=True):
            ages_s[at] = age_s
    return ages_s


def gang_sort_key(gang: Gang) -> tuple[int, int, float, str]:
    """Return the sort key of a gang among those of its user and priority; smaller goes first."""
    if gang.dirty or gang.sort_key is None:
        gang.sort_key = (gang.size_level, gang.queue_rank, gang.effective_submit_s, gang.job)
    return gang.sort_key


class _PriorityLevel:
    """The gangs of one priority in one project: a heap of users by past usage, each user's next gang last.

    Usage only grows during a decision, so a heap entry that is out of date is moved when it reaches the top.
    """

    def __init__(self, users: ProjectUsers) -> None:
        self._users = users
        self.waiting: dict[UserId, list[Gang]] = {}
        self._order: list[tuple[float, UserId]] | None = None  # None: not sorted yet

    def put(self, gang: Gang) -> None:
        mine = self.waiting.setdefault(gang.user, [])
        mine.append(gang)
        if self._order is not None:
            mine.sort(key=gang_sort_key, reverse=True)
            self._rank_all()

    def fill(self, gangs: list[Gang]) -> None:
        for gang in gangs:
            self.waiting.setdefault(gang.user, []).append(gang)

    def _rank_all(self) -> list[tuple[float, UserId]]:
        self._order = [self._users.rank_key(user) for user in self.waiting]
        heapify(self._order)
        return self._order

    def head(self, skip: Callable[[Gang], bool] | None) -> Gang | None:
        order = self._order
        if order is None:
            for each in self.waiting.values():
                each.sort(key=gang_sort_key, reverse=True)
            order = self._rank_all()
        while order:
            key = order[0]
            mine = self.waiting[key[1]]
            while skip is not None and mine and skip(mine[-1]):
                mine.pop()
            now = self._users.rank_key(key[1])
            if not mine:
                heappop(order)
            elif now != key:
                heapreplace(order, now)
            else:
                return mine[-1]
        return None


class _LeafQueue:
    def __init__(self, users: ProjectUsers, skip: Callable[[Gang], bool] | None) -> None:
        self.users = users
        self._skip = skip
        self._levels: dict[int, _PriorityLevel] = {}
        self._order: list[int] = []
        self._head: Gang | None = None

    def fill(self, gangs: list[Gang]) -> None:
        by_priority: dict[int, list[Gang]] = {}
        for gang in gangs:
            by_priority.setdefault(gang.priority, []).append(gang)
        for priority, mine in by_priority.items():
            self._levels[priority] = _PriorityLevel(self.users)
            self._levels[priority].fill(mine)
        self._order = sorted(self._levels)

    def put(self, gang: Gang) -> None:
        if gang.priority not in self._levels:
            self._levels[gang.priority] = _PriorityLevel(self.users)
        self._levels[gang.priority].put(gang)
        self._order = sorted(self._levels)
        self._head = None

    def head(self) -> Gang | None:
        while self._head is None and self._order:
            self._head = self._levels[self._order[-1]].head(self._skip)
            if self._head is None:
                self._order.pop()
        return self._head

    def pop(self) -> Gang:
        head = self.head()
        if head is None:
            raise IndexError("nobody waits")
        level = self._levels[head.priority]
        level.waiting[head.user].pop()
        self._head = None
        return head

    def charge(self, gang: Gang, milli: float) -> None:
        self.users.charge_start(gang.user, int(milli))
        self._head = None


class _SiblingOrder:
    """The first leaf of the project tree by sibling keys; a key is recomputed when it may have changed."""

    def __init__(self, pool_state: PoolState, *, last: bool = False) -> None:
        self._tree = pool_state.tree
        self._pick = max if last else min
        self._keys: dict[ProjectId | None, dict[ProjectId, SiblingKey[ProjectId]]] = {}
        self.first: dict[ProjectId | None, ProjectId] = {}

    def first_leaf(self) -> ProjectId | None:
        project: ProjectId | None = None
        while project in self.first:
            project = self.first[project]
        return project

    def set(self, project: ProjectId, key: SiblingKey[ProjectId] | None) -> None:
        """Set the key of a project among its siblings; None removes it."""
        parent = self._tree.parent[project]
        keys = self._keys.setdefault(parent, {})
        if key is None:
            keys.pop(project, None)
        else:
            keys[project] = key
        if keys:
            self.first[parent] = self._pick(keys, key=keys.__getitem__)
        else:
            self.first.pop(parent, None)


class JobQueue:
    """All pending gangs of one pool, popped one by one in fair order.

    ``skip`` may become true for a gang in the queue (such as when an equal gang did not fit); it is then
    dropped.
    """

    def __init__(
        self, pool_state: PoolState, gangs: Iterable[Gang], skip: Callable[[Gang], bool] | None = None
    ) -> None:
        self._pool_state = pool_state
        self._skip = skip
        self._leaves: dict[ProjectId, _LeafQueue] = {}
        self._head_demand: dict[ProjectId, ResourceVector] = {}  # of the first gang of each project
        self._settled_version: dict[ProjectId, int] = {}  # version of the pool state for the keys
        self._order = _SiblingOrder(pool_state)
        by_leaf: dict[ProjectId, list[Gang]] = {}
        for gang in gangs:
            by_leaf.setdefault(gang.leaf_project, []).append(gang)
        for leaf in sorted(by_leaf):
            self._leaf(leaf).fill(by_leaf[leaf])
            self._update_keys(leaf)

    def _leaf(self, leaf: ProjectId) -> _LeafQueue:
        if leaf not in self._leaves:
            self._leaves[leaf] = _LeafQueue(self._pool_state.users_of(leaf), self._skip)
        return self._leaves[leaf]

    def pop(self) -> Gang | None:
        """Remove and return the next gang in fair order; None when the queue is empty."""
        leaf = self._order.first_leaf()
        if leaf is None:
            return None
        gang = self._leaves[leaf].pop()
        head = self._leaves[leaf].head()
        unchanged = self._settled_version.get(leaf) == self._pool_state.version
        if not unchanged or head is None or head.next_demand != self._head_demand[leaf]:
            self._update_keys(leaf)
        return gang

    def started(self, gang: Gang, milli: float) -> None:
        """Update the order after the start of ``gang`` was added to the ledger."""
        self._leaves[gang.leaf_project].charge(gang, milli)
        self._update_keys(gang.leaf_project)

    def requeue(self, gang: Gang) -> None:
        """Put ``gang`` back, because it has more tasks to place."""
        self._leaf(gang.leaf_project).put(gang)
        self._update_keys(gang.leaf_project)

    def update_project(self, leaf: ProjectId) -> None:
        """Update the order after the held resources of ``leaf`` changed without a start."""
        if leaf in self._leaves:
            self._update_keys(leaf)

    def _update_keys(self, leaf: ProjectId) -> None:
        """Recompute the keys from ``leaf`` up to the root."""
        pool_state = self._pool_state
        self._settled_version[leaf] = pool_state.version
        head = self._leaves[leaf].head()
        asked = None if head is None else head.next_demand
        for project in pool_state.tree.path[leaf]:
            if project != leaf:
                first = self._order.first.get(project)
                asked = None if first is None else self._head_demand.get(first)
            if asked is None:
                self._head_demand.pop(project, None)
                self._order.set(project, None)
                continue
            self._head_demand[project] = asked
            self._order.set(project, pool_state.sibling_key(project, asked))


class VictimQueue:
    """Eviction candidates, one step at a time: a task beyond the minimum, or a whole gang.

    It evicts nothing; popped tasks count as gone for the order of the rest.
    """

    def __init__(
        self,
        pool_state: PoolState,
        candidates: dict[ProjectId, list[Gang]],
        order: Callable[[Gang, int], tuple[float, ...]],
    ) -> None:
        """``candidates`` are in order of eviction; ``order`` maps a gang and a size level to a sort key."""
        self._pool_state = pool_state
        self._candidates = {leaf: list(mine) for leaf, mine in candidates.items()}
        self._eviction_order = order
        self._at = dict.fromkeys(candidates, 0)
        self._next: dict[ProjectId, list[GangTask]] = {}
        self._popped: dict[ProjectId, ResourceVector] = {}
        self._popped_tasks: set[GangTask] = set()
        self._order = _SiblingOrder(pool_state, last=True)
        self._held = dict(pool_state.ledger.held)
        for leaf in sorted(candidates):
            self._update_keys(leaf)

    def pop(self) -> list[GangTask]:
        """Return the tasks to evict together next; empty when no candidates are left."""
        leaf = self._order.first_leaf()
        if leaf is None:
            return []
        tasks = self._next[leaf]
        self._popped_tasks.update(tasks)
        amounts = total_demand(tasks)
        for level in self._pool_state.tree.path[leaf]:
            self._popped[level] = self._popped.get(level, ZERO).add(amounts)
        self._update_keys(leaf)
        return tasks

    def _reorder(self, mine: list[Gang], at: int, tasks: list[GangTask]) -> list[GangTask]:
        """Move a gang that lost tasks to its new position and return the next tasks."""
        gang = mine[at]
        if self._popped_tasks.isdisjoint(gang.tasks):
            return tasks
        key = self._eviction_order(gang, gang.size_level_without(self._popped_tasks))
        while at + 1 < len(mine) and self._eviction_order(mine[at + 1], mine[at + 1].size_level) < key:
            mine[at], mine[at + 1] = mine[at + 1], mine[at]
            at += 1
        return mine[self._at[gang.leaf_project]].root.next_to_evict(self._popped_tasks)

    def _update_keys(self, leaf: ProjectId) -> None:
        tasks: list[GangTask] = []
        mine = self._candidates[leaf]
        while self._at[leaf] < len(mine):
            tasks = mine[self._at[leaf]].root.next_to_evict(self._popped_tasks)
            if tasks:
                tasks = self._reorder(mine, self._at[leaf], tasks)
                break
            self._at[leaf] += 1
        pool_state = self._pool_state
        if tasks:
            self._next[leaf] = tasks
        else:
            self._next.pop(leaf, None)
        for project in pool_state.tree.path[leaf]:
            if project != leaf:
                first: ProjectId | None = project
                while first in self._order.first:
                    first = self._order.first[first]
                tasks = self._next.get(first, []) if first is not None and first != project else []
            if not tasks:
                self._order.set(project, None)
                continue
            leaving = self._popped.get(project, ZERO).add(total_demand(tasks))
            ledger = pool_state.ledger
            self._order.set(
                project,
                sibling_key(
                    project,
                    ledger.entitlements[project],
                    self._held[project],
                    ZERO,
                    pool_state.capacity,
                    leaving,
                    over_share_in_any=False,
                ),
            )


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
    gangs.sort(key=gang_sort_key)
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
