"""Whose turn it is: the order between siblings and, within a project, between people and their jobs.

Between siblings: below the guarantee first; higher priority; lower dominant share counting the job; lower
without it; smaller share; older. Within a project: priority, then the least served person, then age.
The order is made anew after each placement.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from heapq import heapify, heappop, heapreplace
from typing import NamedTuple

from scheduler.core.cluster import PendingRow, ProjectId, UserId
from scheduler.core.ledger import PoolLedger
from scheduler.core.tree import Tree
from scheduler.core.usage import PeopleOfProject

NO_SHARE_FACTOR = 1_000.0
"""A project with no fair share counts what it holds this many times over (as KAI-Scheduler does)."""


class SiblingKey(NamedTuple):
    """Smaller goes first; the fields stand in the order in which they decide."""

    at_guarantee: bool
    priority_down: int
    share_with_job: float
    share_without_job: float
    fair_share_milli: float
    created_s: float
    project: ProjectId


def sibling_key(
    project: ProjectId,
    job_milli: int,
    *,
    held_milli: int,
    guaranteed_milli: int,
    priority: int,
    fair_share_milli: float,
    capacity_milli: int,
    created_s: float,
) -> SiblingKey:
    """Where ``project`` stands among its siblings when its next job asks for ``job_milli``."""

    def dominant(milli: int) -> float:
        if fair_share_milli > 0:
            return milli / fair_share_milli
        return NO_SHARE_FACTOR * milli / max(1, capacity_milli)

    return SiblingKey(
        held_milli >= guaranteed_milli,
        -priority,
        dominant(held_milli + job_milli),
        dominant(held_milli),
        fair_share_milli,
        created_s,
        project,
    )


class ProjectQueue:
    """The waiting jobs of one leaf project in one pool; those of which ``skip`` is true are passed over."""

    def __init__(self, people: PeopleOfProject, skip: Callable[[PendingRow], bool]) -> None:
        self.people = people
        self._skip = skip
        self._levels: list[_Level] = []
        self._head: PendingRow | None = None

    def fill(self, jobs: Iterable[PendingRow]) -> None:
        """Put jobs into an empty queue, the youngest first."""
        by_priority: dict[int, dict[UserId, list[PendingRow]]] = {}
        for job in jobs:
            by_priority.setdefault(job.priority, {}).setdefault(job.user, []).append(job)
        self._levels = [_Level(by_priority[p], self.people) for p in sorted(by_priority)]

    def head(self) -> PendingRow | None:
        """The job whose turn it is in this project."""
        while self._head is None and self._levels:
            self._head = self._levels[-1].head(self._skip)
            if self._head is None:
                self._levels.pop()
        return self._head

    def pop(self) -> PendingRow:
        """Take the head out."""
        head = self.head()
        if head is None:
            raise IndexError("the queue is empty")
        self._levels[-1].waiting[head.user].pop()
        self._head = None
        return head

    def charge(self, user: UserId, milli: int) -> None:
        """A start of ``user`` counts at once; somebody else may be the next head."""
        self.people.charge_start(user, milli)
        self._head = None


class _Level:
    """The jobs of one priority: each person's from young to old, and the people as a heap by past use.

    Use only grows while a plan is made, so an entry that grew is put back where it belongs when it surfaces.
    """

    def __init__(self, waiting: dict[UserId, list[PendingRow]], people: PeopleOfProject) -> None:
        self.waiting = waiting
        self._people = people
        self._order = [people.rank_key(user) for user in waiting]
        heapify(self._order)

    def head(self, skip: Callable[[PendingRow], bool]) -> PendingRow | None:
        """The oldest job of the least served person that is not to be skipped."""
        while self._order:
            key = self._order[0]
            jobs = self.waiting[key[1]]
            while jobs and skip(jobs[-1]):
                jobs.pop()
            now = self._people.rank_key(key[1])
            if not jobs:
                heappop(self._order)
            elif now != key:
                heapreplace(self._order, now)
            else:
                return jobs[-1]
        return None


class PoolQueue:
    """All waiting jobs of one pool, handed out one by one in fair order.

    ``skip`` may turn true for a job while it waits (an equal one found no place): it is then passed over.
    """

    def __init__(
        self,
        tree: Tree,
        ledger: PoolLedger,
        fair_share_milli: Mapping[ProjectId, float],
        capacity_milli: int,
        people_of: Callable[[ProjectId], PeopleOfProject],
        skip: Callable[[PendingRow], bool] = lambda job: False,
    ) -> None:
        self._tree = tree
        self._ledger = ledger
        self._fair_share_milli = fair_share_milli
        self._capacity_milli = capacity_milli
        self._people_of = people_of
        self._skip = skip
        self._queues: dict[ProjectId, ProjectQueue] = {}
        self._first: dict[ProjectId | None, ProjectId] = {}
        self._heads: dict[ProjectId, PendingRow] = {}
        self._keys: dict[ProjectId | None, dict[ProjectId, SiblingKey]] = {}

    def fill(self, jobs: Iterable[PendingRow]) -> None:
        """Put jobs into an empty queue, the youngest first."""
        by_leaf: dict[ProjectId, list[PendingRow]] = {}
        for job in jobs:
            by_leaf.setdefault(self._tree.leaf_of[job.project], []).append(job)
        for leaf in sorted(by_leaf):
            queue = self._queues.setdefault(leaf, ProjectQueue(self._people_of(leaf), self._skip))
            queue.fill(by_leaf[leaf])
            self._settle(leaf)

    def pop(self) -> PendingRow | None:
        """The next job in fair order, taken out; None when nobody waits."""
        project: ProjectId | None = None
        while project in self._first:
            project = self._first[project]
        if project is None:
            return None
        job = self._queues[project].pop()
        self._settle(project)
        return job

    def started(self, job: PendingRow) -> None:
        """Make the order anew after ``job`` was placed and counted in the ledger."""
        leaf = self._tree.leaf_of[job.project]
        self._queues[leaf].charge(job.user, job.total_milli)
        self._settle(leaf)

    def _settle(self, leaf: ProjectId) -> None:
        """Make the keys from ``leaf`` up to the root anew."""
        head = self._queues[leaf].head()
        for project in self._tree.path[leaf]:
            parent = self._tree.parent[project]
            keys = self._keys.setdefault(parent, {})
            if project != leaf:
                head = self._heads.get(self._first[project]) if project in self._first else None
            if head is None:
                self._heads.pop(project, None)
                keys.pop(project, None)
            else:
                self._heads[project] = head
                quota = self._ledger.quotas[project]
                keys[project] = sibling_key(
                    project,
                    head.total_milli,
                    held_milli=self._ledger.held_milli[project],
                    guaranteed_milli=quota.guaranteed_milli,
                    priority=quota.priority,
                    fair_share_milli=self._fair_share_milli.get(project, 0.0),
                    capacity_milli=self._capacity_milli,
                    created_s=self._tree.created_s[project],
                )
            if keys:
                self._first[parent] = min(keys, key=keys.__getitem__)
            else:
                self._first.pop(parent, None)
