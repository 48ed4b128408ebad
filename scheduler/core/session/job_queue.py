"""Whose turn it is, and who leaves first: gangs of one pool in the order of the project tree.

Between siblings the order is that of ``order_rules``. Within a project: priority; then the person who used
least (where people take turns); then who is below its minimum before who is just whole before who grows; then
age. The order is made anew after each placement. Those who may leave come in the reverse order of the tree,
and within a project by the policy's order of victims.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from heapq import heapify, heappop, heapreplace

from scheduler.core.model.resources import ZERO, ResourceVector
from scheduler.core.model.snapshot import ProjectId, UserId
from scheduler.core.session.gang import Gang, GangTask, total_demand
from scheduler.core.session.pool import PoolState
from scheduler.core.shares.sibling_order import SiblingKey, sibling_key
from scheduler.core.shares.usage import ProjectUsers

GangSortKey = tuple[int, float, str]


def gang_sort_key(gang: Gang) -> GangSortKey:
    """Where a gang stands among those of its person and priority; smaller goes first."""
    if gang.dirty or gang.sort_key is None:
        gang.sort_key = (gang.size_level, gang.effective_submit_s, gang.job)
    return gang.sort_key


def sort_gangs(gangs: list[Gang], *, last_first: bool = False) -> None:
    """Put gangs of one person and priority in the order of their turns."""
    gangs.sort(key=gang_sort_key, reverse=last_first)


class _PriorityLevel:
    """The gangs of one priority in one project: people as a heap by past use, each one's next gang last.

    Use only grows while a plan is made, so an entry that grew is put back where it belongs when it surfaces.
    """

    def __init__(self, people: ProjectUsers | None) -> None:
        self._users = people
        self.waiting: dict[UserId, list[Gang]] = {}
        self._order: list[tuple[float, UserId]] | None = None  # None: nothing is in order yet

    def user_key(self, gang: Gang) -> UserId:
        return gang.user if self._users else UserId("")

    def put(self, gang: Gang) -> None:
        mine = self.waiting.setdefault(self.user_key(gang), [])
        mine.append(gang)
        if self._order is not None:
            sort_gangs(mine, last_first=True)
            self._rank_all()

    def fill(self, gangs: list[Gang]) -> None:
        if self._users is None:
            self.waiting[UserId("")] = gangs
            return
        for gang in gangs:
            self.waiting.setdefault(gang.user, []).append(gang)

    def _rank(self, user: UserId) -> tuple[float, UserId]:
        return self._users.rank_key(user) if self._users else (0.0, user)

    def _rank_all(self) -> list[tuple[float, UserId]]:
        self._order = [self._rank(user) for user in self.waiting]
        heapify(self._order)
        return self._order

    def head(self, skip: Callable[[Gang], bool] | None) -> Gang | None:
        order = self._order
        if order is None:
            for each in self.waiting.values():
                sort_gangs(each, last_first=True)
            order = self._rank_all()
        while order:
            key = order[0]
            mine = self.waiting[key[1]]
            while skip is not None and mine and skip(mine[-1]):
                mine.pop()
            now = self._rank(key[1])
            if not mine:
                heappop(order)
            elif now != key:
                heapreplace(order, now)
            else:
                return mine[-1]
        return None


class _LeafQueue:
    """The gangs of one leaf project."""

    def __init__(self, people: ProjectUsers | None, skip: Callable[[Gang], bool] | None) -> None:
        self.users = people
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
        level.waiting[level.user_key(head)].pop()
        self._head = None
        return head

    def charge(self, gang: Gang, milli: float) -> None:
        if self.users is not None:
            self.users.charge_start(gang.user, int(milli))
        self._head = None


class _SiblingOrder:
    """The first leaf of the project tree by the keys of its siblings, each made anew when it may have changed."""

    def __init__(self, pool_state: PoolState, *, last: bool = False) -> None:
        self._tree = pool_state.tree
        self._pick = max if last else min
        self._keys: dict[ProjectId | None, dict[ProjectId, SiblingKey[ProjectId]]] = {}
        self.first: dict[ProjectId | None, ProjectId] = {}

    def first_leaf(self) -> ProjectId | None:
        """The leaf whose turn it is."""
        project: ProjectId | None = None
        while project in self.first:
            project = self.first[project]
        return project

    def set(self, project: ProjectId, key: SiblingKey[ProjectId] | None) -> None:
        """Note the key of a project among its siblings; None takes it out."""
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
    """All waiting gangs of one pool, handed out one by one in fair order.

    ``skip`` may turn true for a gang while it waits (an equal one found no place): it is then passed over.
    """

    def __init__(
        self, pool_state: PoolState, gangs: Iterable[Gang], skip: Callable[[Gang], bool] | None = None
    ) -> None:
        self._pool_state = pool_state
        self._skip = skip
        self._leaves: dict[ProjectId, _LeafQueue] = {}
        self._head_demand: dict[ProjectId, ResourceVector] = {}  # what the first gang of each project asks
        self._settled_version: dict[ProjectId, int] = {}  # the pool_state's changes when a leaf was settled
        self._order = _SiblingOrder(pool_state)
        by_leaf: dict[ProjectId, list[Gang]] = {}
        for gang in gangs:
            by_leaf.setdefault(gang.leaf_project, []).append(gang)
        for leaf in sorted(by_leaf):
            self._leaf(leaf).fill(by_leaf[leaf])
            self._update_keys(leaf)

    def _leaf(self, leaf: ProjectId) -> _LeafQueue:
        if leaf not in self._leaves:
            people = self._pool_state.users_of(leaf) if self._pool_state.policy.people_in_turn else None
            self._leaves[leaf] = _LeafQueue(people, self._skip)
        return self._leaves[leaf]

    def pop(self) -> Gang | None:
        """The next gang in fair order, taken out; None when nobody waits."""
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
        """Make the order anew after a start of ``gang`` was counted in the ledger."""
        self._leaves[gang.leaf_project].charge(gang, milli)
        self._update_keys(gang.leaf_project)

    def requeue(self, gang: Gang) -> None:
        """``gang`` has more to place."""
        self._leaf(gang.leaf_project).put(gang)
        self._update_keys(gang.leaf_project)

    def update_project(self, leaf: ProjectId) -> None:
        """What ``leaf`` holds changed without a start of its own."""
        if leaf in self._leaves:
            self._update_keys(leaf)

    def _update_keys(self, leaf: ProjectId) -> None:
        """Make the keys from ``leaf`` up to the root anew."""
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
    """Gangs that may be asked to leave, one step after the other: a task beyond the minimum, or all of a gang.

    Nothing is evicted here; what was handed out counts as gone for the order of the rest.
    """

    def __init__(
        self,
        pool_state: PoolState,
        candidates: dict[ProjectId, list[Gang]],
        order: Callable[[Gang, int], tuple[float, ...]],
    ) -> None:
        """``candidates`` by leaf project, who leaves first standing first; ``order`` of a gang and its growth."""
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
        """The tasks that leave next, together; none when nobody is left."""
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
        """The next tasks, once a gang that gave part of itself stands where it now belongs."""
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
                    involved_only=False,
                ),
            )
