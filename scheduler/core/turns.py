"""Whose turn it is, and who leaves first: gangs of one pool in the order of the project tree.

Between siblings the order is that of ``order_rules``. Within a project: priority; then the person who used
least (where people take turns); then who is below its minimum before who is just whole before who grows; then
age. The order is made anew after each placement. Those who may leave come in the reverse order of the tree,
and within a project by the policy's order of victims.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from heapq import heapify, heappop, heapreplace

from scheduler.core.cluster import ProjectId, UserId
from scheduler.core.gang import Gang, Task, total
from scheduler.core.order_rules import SiblingKey, sibling_key
from scheduler.core.resources import NOTHING, Amounts
from scheduler.core.scene import PoolScene
from scheduler.core.usage import PeopleOfProject

TurnKey = tuple[int, float, str]


def turn_key(gang: Gang) -> TurnKey:
    """Where a gang stands among those of its person and priority; smaller goes first."""
    if gang.touched or gang.turn is None:
        gang.turn = (gang.growth, gang.ordered_s, gang.job)
    return gang.turn


def sort_by_turn(gangs: list[Gang], *, last_first: bool = False) -> None:
    """Put gangs of one person and priority in the order of their turns."""
    gangs.sort(key=turn_key, reverse=last_first)


class _Level:
    """The gangs of one priority in one project: people as a heap by past use, each one's next gang last.

    Use only grows while a plan is made, so an entry that grew is put back where it belongs when it surfaces.
    """

    def __init__(self, people: PeopleOfProject | None) -> None:
        self._people = people
        self.waiting: dict[UserId, list[Gang]] = {}
        self._order: list[tuple[float, UserId]] | None = None  # None: nothing is in order yet

    def who(self, gang: Gang) -> UserId:
        return gang.user if self._people else UserId("")

    def put(self, gang: Gang) -> None:
        mine = self.waiting.setdefault(self.who(gang), [])
        mine.append(gang)
        if self._order is not None:
            sort_by_turn(mine, last_first=True)
            self._rank_all()

    def fill(self, gangs: list[Gang]) -> None:
        if self._people is None:
            self.waiting[UserId("")] = gangs
            return
        for gang in gangs:
            self.waiting.setdefault(gang.user, []).append(gang)

    def _rank(self, user: UserId) -> tuple[float, UserId]:
        return self._people.rank_key(user) if self._people else (0.0, user)

    def _rank_all(self) -> list[tuple[float, UserId]]:
        self._order = [self._rank(user) for user in self.waiting]
        heapify(self._order)
        return self._order

    def head(self, skip: Callable[[Gang], bool] | None) -> Gang | None:
        order = self._order
        if order is None:
            for each in self.waiting.values():
                sort_by_turn(each, last_first=True)
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


class _Leaf:
    """The gangs of one leaf project."""

    def __init__(self, people: PeopleOfProject | None, skip: Callable[[Gang], bool] | None) -> None:
        self.people = people
        self._skip = skip
        self._levels: dict[int, _Level] = {}
        self._order: list[int] = []
        self._head: Gang | None = None

    def fill(self, gangs: list[Gang]) -> None:
        by_priority: dict[int, list[Gang]] = {}
        for gang in gangs:
            by_priority.setdefault(gang.priority, []).append(gang)
        for priority, mine in by_priority.items():
            self._levels[priority] = _Level(self.people)
            self._levels[priority].fill(mine)
        self._order = sorted(self._levels)

    def put(self, gang: Gang) -> None:
        if gang.priority not in self._levels:
            self._levels[gang.priority] = _Level(self.people)
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
        level.waiting[level.who(head)].pop()
        self._head = None
        return head

    def charge(self, gang: Gang, milli: float) -> None:
        if self.people is not None:
            self.people.charge_start(gang.user, int(milli))
        self._head = None


class _Tree:
    """The first leaf of the project tree by the keys of its siblings, each made anew when it may have changed."""

    def __init__(self, scene: PoolScene, *, last: bool = False) -> None:
        self._tree = scene.tree
        self._pick = max if last else min
        self._keys: dict[ProjectId | None, dict[ProjectId, SiblingKey[ProjectId]]] = {}
        self.first: dict[ProjectId | None, ProjectId] = {}

    def leaf(self) -> ProjectId | None:
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


class TurnQueue:
    """All waiting gangs of one pool, handed out one by one in fair order.

    ``skip`` may turn true for a gang while it waits (an equal one found no place): it is then passed over.
    """

    def __init__(
        self, scene: PoolScene, gangs: Iterable[Gang], skip: Callable[[Gang], bool] | None = None
    ) -> None:
        self._scene = scene
        self._skip = skip
        self._leaves: dict[ProjectId, _Leaf] = {}
        self._asks: dict[ProjectId, Amounts] = {}  # what the first gang of each project asks
        self._seen: dict[ProjectId, int] = {}  # the scene's changes when a leaf was settled
        self._order = _Tree(scene)
        by_leaf: dict[ProjectId, list[Gang]] = {}
        for gang in gangs:
            by_leaf.setdefault(gang.leaf, []).append(gang)
        for leaf in sorted(by_leaf):
            self._leaf(leaf).fill(by_leaf[leaf])
            self._settle(leaf)

    def _leaf(self, leaf: ProjectId) -> _Leaf:
        if leaf not in self._leaves:
            people = self._scene.people_of(leaf) if self._scene.policy.people_in_turn else None
            self._leaves[leaf] = _Leaf(people, self._skip)
        return self._leaves[leaf]

    def pop(self) -> Gang | None:
        """The next gang in fair order, taken out; None when nobody waits."""
        leaf = self._order.leaf()
        if leaf is None:
            return None
        gang = self._leaves[leaf].pop()
        head = self._leaves[leaf].head()
        unchanged = self._seen.get(leaf) == self._scene.changes
        if not unchanged or head is None or head.asked != self._asks[leaf]:
            self._settle(leaf)
        return gang

    def started(self, gang: Gang, milli: float) -> None:
        """Make the order anew after a start of ``gang`` was counted in the ledger."""
        self._leaves[gang.leaf].charge(gang, milli)
        self._settle(gang.leaf)

    def put_back(self, gang: Gang) -> None:
        """``gang`` has more to place."""
        self._leaf(gang.leaf).put(gang)
        self._settle(gang.leaf)

    def changed(self, leaf: ProjectId) -> None:
        """What ``leaf`` holds changed without a start of its own."""
        if leaf in self._leaves:
            self._settle(leaf)

    def _settle(self, leaf: ProjectId) -> None:
        """Make the keys from ``leaf`` up to the root anew."""
        scene = self._scene
        self._seen[leaf] = scene.changes
        head = self._leaves[leaf].head()
        asked = None if head is None else head.asked
        for project in scene.tree.path[leaf]:
            if project != leaf:
                first = self._order.first.get(project)
                asked = None if first is None else self._asks.get(first)
            if asked is None:
                self._asks.pop(project, None)
                self._order.set(project, None)
                continue
            self._asks[project] = asked
            self._order.set(project, scene.sibling_key(project, asked))


class LeavingQueue:
    """Gangs that may be asked to leave, one step after the other: a task beyond the minimum, or all of a gang.

    Nothing is evicted here; what was handed out counts as gone for the order of the rest.
    """

    def __init__(
        self,
        scene: PoolScene,
        candidates: dict[ProjectId, list[Gang]],
        order: Callable[[Gang, int], tuple[float, ...]],
    ) -> None:
        """``candidates`` by leaf project, who leaves first standing first; ``order`` of a gang and its growth."""
        self._scene = scene
        self._candidates = {leaf: list(mine) for leaf, mine in candidates.items()}
        self._place_in_order = order
        self._at = dict.fromkeys(candidates, 0)
        self._next: dict[ProjectId, list[Task]] = {}
        self._popped: dict[ProjectId, Amounts] = {}
        self._gone: set[Task] = set()
        self._order = _Tree(scene, last=True)
        self._held = dict(scene.ledger.held)
        for leaf in sorted(candidates):
            self._settle(leaf)

    def pop(self) -> list[Task]:
        """The tasks that leave next, together; none when nobody is left."""
        leaf = self._order.leaf()
        if leaf is None:
            return []
        tasks = self._next[leaf]
        self._gone.update(tasks)
        amounts = total(tasks)
        for level in self._scene.tree.path[leaf]:
            self._popped[level] = self._popped.get(level, NOTHING).plus(amounts)
        self._settle(leaf)
        return tasks

    def _back_in_line(self, mine: list[Gang], at: int, tasks: list[Task]) -> list[Task]:
        """The next tasks, once a gang that gave part of itself stands where it now belongs."""
        gang = mine[at]
        if self._gone.isdisjoint(gang.tasks):
            return tasks
        key = self._place_in_order(gang, gang.growth_without(self._gone))
        while at + 1 < len(mine) and self._place_in_order(mine[at + 1], mine[at + 1].growth) < key:
            mine[at], mine[at + 1] = mine[at + 1], mine[at]
            at += 1
        return mine[self._at[gang.leaf]].root.to_evict(self._gone)

    def _settle(self, leaf: ProjectId) -> None:
        tasks: list[Task] = []
        mine = self._candidates[leaf]
        while self._at[leaf] < len(mine):
            tasks = mine[self._at[leaf]].root.to_evict(self._gone)
            if tasks:
                tasks = self._back_in_line(mine, self._at[leaf], tasks)
                break
            self._at[leaf] += 1
        scene = self._scene
        if tasks:
            self._next[leaf] = tasks
        else:
            self._next.pop(leaf, None)
        for project in scene.tree.path[leaf]:
            if project != leaf:
                first: ProjectId | None = project
                while first in self._order.first:
                    first = self._order.first[first]
                tasks = self._next.get(first, []) if first is not None and first != project else []
            if not tasks:
                self._order.set(project, None)
                continue
            leaving = self._popped.get(project, NOTHING).plus(total(tasks))
            ledger = scene.ledger
            self._order.set(
                project,
                sibling_key(
                    project,
                    ledger.owed[project],
                    self._held[project],
                    NOTHING,
                    scene.capacity,
                    leaving,
                    involved_only=False,
                ),
            )
