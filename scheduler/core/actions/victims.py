"""Eviction candidates: gangs that hold slots, by project, in order of eviction.

Within a project, jobs of the lowest priority are evicted first; of equal priority, those that lose the least work.
Priorities of different projects are not comparable. The *level* of a candidate is therefore the rank of its
priority among the candidates of its project: 0 is the lowest.

``NodeEvictionCosts`` gives the victims on a node without which one more task of a shape fits, and their cost: the
highest level among them, then the work lost at that level, then all of it. It is at least that of the first
candidate on the node, so nodes are visited by that bound and few costs are computed per search.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from heapq import heapify, heappop, heappush
from itertools import chain, combinations, groupby
from operator import attrgetter
from typing import NamedTuple

from scheduler.core.capacity.node_capacity import SlotBatch
from scheduler.core.capacity.placement import NodePlacer
from scheduler.core.model.plan import EvictionReason
from scheduler.core.model.policy import Policy
from scheduler.core.model.snapshot import (
    WHOLE_MILLI,
    HeldSlots,
    JobId,
    ProjectId,
    RunningRow,
    TaskShape,
)
from scheduler.core.session.gang import Gang, GangTask, total_demand
from scheduler.core.session.pool import PoolState
from scheduler.core.shares.reclaim_rules import reclaim_min_runtime_s

MAX_COMPARED = 6
"""Candidates of one level on a node up to which all sets of them are compared."""


def ends_soon(row: RunningRow, now_s: float, policy: Policy) -> bool:
    """Return True if the predicted end is so near that the job is not evicted."""
    return (
        row.predicted_end_s is not None and 0.0 <= row.predicted_end_s - now_s < policy.near_end_protection_s
    )


class VictimCandidates:
    """The preemptible gangs of one pool, and the quota classes without victims, until ``invalidate``."""

    def __init__(self, pool_state: PoolState, now_s: float, evict_at_s: float | None = None) -> None:
        """Treat gangs protected until ``evict_at_s`` as evictable; None is now."""
        self._pool_state = pool_state
        self._policy = pool_state.policy
        self._now_s = now_s
        self._evict_at_s = now_s if evict_at_s is None else evict_at_s
        self._lists: dict[tuple[ProjectId, str, int | None], list[Gang]] = {}
        self._in_order: dict[ProjectId, list[Gang]] = {}
        self._min_priority: dict[ProjectId, float] = {}  # lower bound of the priorities in a leaf project
        self._by_project: dict[ProjectId, list[Gang]] | None = None
        self._lost: dict[Gang, tuple[list[GangTask], float]] = {}  # valid while the same tasks are evictable
        self.infeasible: dict[EvictionReason, set[int]] = {reason: set() for reason in EvictionReason}
        """Quota classes without victims since the last ``invalidate``."""
        self.has_surplus = False
        """Some gang runs more tasks than its minimum."""

    def invalidate(self) -> None:
        """Discard candidates and infeasible classes after the pool state was changed by another action."""
        self._lists.clear()
        self._in_order.clear()
        self._min_priority.clear()
        self._by_project = None
        for questions in self.infeasible.values():
            questions.clear()

    def in_project(self, leaf: ProjectId, kind: str, below: int | None = None) -> list[Gang]:
        """Return the gangs of a leaf project that may be evicted, in order of eviction.

        ``kind`` selects the protections: "preempt", "reclaim", or "guaranteed" (reclaim within the preemptor's
        guarantee). With ``below``, only gangs of lower priority.
        """
        found = self._lists.get((leaf, kind, below))
        if found is None:
            found = self._lists[leaf, kind, below] = self.in_project_now(leaf, kind, below)
        return found

    def in_project_now(self, leaf: ProjectId, kind: str, below: int | None = None) -> list[Gang]:
        """Return ``in_project`` in the present state, such as that within a search, which may be undone."""
        return [
            gang
            for gang in self._all_in_project(leaf)
            if gang.evictable_tasks
            and (below is None or gang.priority < below)
            and not self.is_protected(gang, kind)
        ]

    def _all_in_project(self, leaf: ProjectId) -> list[Gang]:
        """Return the gangs of a leaf project that any kind of eviction may take, in order of eviction."""
        found = self._in_order.get(leaf)
        if found is None:
            found = self._in_order[leaf] = list(self.by_project().get(leaf, ()))
            found.sort(key=lambda gang: gang.job, reverse=self._policy.victim_order == "youngest")
            found.sort(key=lambda gang: self.eviction_order(gang, gang.size_level))
        return found

    def min_priority(self, leaf: ProjectId) -> float:
        """Return a lower bound of the priorities of the candidates in a leaf project."""
        least = self._min_priority.get(leaf)
        if least is None:
            mine = self.by_project().get(leaf, ())
            least = self._min_priority[leaf] = min((gang.priority for gang in mine), default=math.inf)
        return least

    def any_below_priority(self, leaf: ProjectId, priority: int) -> bool:
        """Return True if a gang of lower priority in the leaf project may be preempted."""
        return self.min_priority(leaf) < priority and bool(self.in_project(leaf, "preempt", priority))

    def by_project(self) -> dict[ProjectId, list[Gang]]:
        if self._by_project is None:
            self._by_project = {}
            self.has_surplus = False
            for gang in self._pool_state.gangs.values():
                if gang.preemptible and not gang.pinned and gang.evictable_tasks:
                    self._by_project.setdefault(gang.leaf_project, []).append(gang)
                    self.has_surplus = self.has_surplus or gang.size_level > 1
        return self._by_project

    def eviction_order(self, gang: Gang, size_level: int) -> tuple[float, ...]:
        """Return the sort key of a gang if its size level were as given; smaller is evicted first."""
        if self._policy.victim_order == "youngest":
            return (gang.priority, -size_level, -gang.submitted_s)
        return (
            gang.priority,
            size_level < 2,  # an elastic job that only shrinks keeps running
            gang.started_s is not None,
            self.lost_gpu_seconds(gang),
            -(gang.started_s or self._now_s),
            -gang.submitted_s,
        )

    def eviction_cost(self, gang: Gang) -> float:
        """Return what the eviction of a gang costs among those of its priority, as ``victim_order`` says."""
        if self._policy.victim_order == "youngest":
            return max(0.0, self._now_s - gang.submitted_s)
        return self.lost_gpu_seconds(gang)

    def lost_gpu_seconds(self, gang: Gang) -> float:
        """Return the GPU-seconds since the last checkpoint, else since the start; 0 if it has not started."""
        if (row := gang.running_row) is None:
            return 0.0
        known = self._lost.get(gang)
        if known is None or known[0] is not gang.evictable_tasks:
            since_s = max(row.started_s, row.checkpoint_s or row.started_s)
            # ranks that join in this plan count as they will in the next decision
            milli = total_demand(gang.evictable_tasks).gpu_milli
            lost = max(0.0, self._now_s - since_s) * milli / WHOLE_MILLI
            known = self._lost[gang] = (gang.evictable_tasks, lost)
        return known[1]

    def movable_in_project(self, leaf: ProjectId, kind: str, below: int | None = None) -> list[Gang]:
        """Return the gangs of ``in_project`` that lose no more work than a move may cost."""
        most = self._policy.max_migration_loss_gpu_s
        return [gang for gang in self.in_project(leaf, kind, below) if self.lost_gpu_seconds(gang) <= most]

    def is_protected(self, gang: Gang, kind: str) -> bool:
        """Return True if ``in_project`` of this kind leaves out the gang."""
        until_s = self.protected_until_s(gang, kind)
        return until_s is not None and self._evict_at_s < until_s

    def protected_until_s(self, gang: Gang, kind: str) -> float | None:
        """Return until when a job is protected, or None: for its minimum, and then to a predicted end that is near.

        The near end does not protect it from projects that reclaim within their guarantee.
        """
        if gang.started_s is None:
            return None
        least_s = self._policy.preempt_min_runtime_s
        if kind in ("reclaim", "guaranteed"):
            path = self._pool_state.tree.path[gang.leaf_project]
            least_s = reclaim_min_runtime_s(path, self._pool_state.quotas, least_s)
        until_s = gang.started_s + least_s if self._now_s - gang.started_s < least_s else None
        if kind != "guaranteed" and gang.running_row:
            from_s = self._now_s if until_s is None else until_s
            if ends_soon(gang.running_row, from_s, self._policy):
                return gang.running_row.predicted_end_s
        return until_s

    def protection_ends_s(self) -> list[float]:
        """Return the future times at which protections end, ascending."""
        found = {
            until_s
            for mine in self.by_project().values()
            for gang in mine
            for kind in ("reclaim", "guaranteed", "preempt")
            if (until_s := self.protected_until_s(gang, kind)) is not None and until_s > self._now_s
        }
        return sorted(found)

    def remove(self, gone: Iterable[GangTask]) -> None:
        """Remove gangs without evictable tasks from the lists."""
        for gang in {task.gang.job: task.gang for task in gone}.values():
            if not gang.evictable_tasks:
                for key, mine in self._lists.items():
                    if key[0] == gang.leaf_project and gang in mine:
                        mine.remove(gang)
                if self._by_project is not None and gang in self._by_project.get(gang.leaf_project, ()):
                    self._by_project[gang.leaf_project].remove(gang)


class EvictionCost(NamedTuple):
    """The cost of a set of victims; smaller is better."""

    level: int
    """The highest level among them."""
    at_level: float
    """What the victims of that level cost together."""
    total: float


class NodeVictims:
    """A set of eviction candidates: those on each node, and the free capacity with all of them gone."""

    def __init__(
        self,
        pool_state: PoolState,
        candidates: Mapping[ProjectId, Sequence[Gang]],
        eviction_order: Callable[[Gang, int], tuple[float, ...]],
        eviction_cost: Callable[[Gang], float],
    ) -> None:
        """``candidates`` are by project, each in order of eviction."""
        self.level: dict[JobId, int] = {}
        for mine in candidates.values():
            for level, (_, alike) in enumerate(groupby(mine, key=attrgetter("priority"))):
                self.level.update((gang.job, level) for gang in alike)
        gangs = [gang for leaf in sorted(candidates) for gang in candidates[leaf]]
        gangs.sort(key=lambda gang: (self.level[gang.job], *eviction_order(gang, gang.size_level)[1:]))
        self.cost = {gang.job: eviction_cost(gang) for gang in gangs}
        held = [gang.evictable_slots for gang in gangs]
        self.by_node: dict[int, list[Gang]] = {}
        for gang, places in zip(gangs, held, strict=True):
            for node in {place.node for place in places}:
                self.by_node.setdefault(node, []).append(gang)
        self.capacity_without = pool_state.idle_and_releasing.copy()
        self.capacity_without.release_batch(SlotBatch(held), len(held))

    def cost_of(self, gang: Gang) -> EvictionCost:
        """Return the cost of evicting one gang alone."""
        cost = self.cost[gang.job]
        return EvictionCost(self.level[gang.job], cost, cost)

    def min_cost(self, node: int) -> EvictionCost | None:
        """Return the cost of the first candidate left on the node; None if there is none."""
        return next((self.cost_of(gang) for gang in self.by_node[node] if gang.evictable_tasks), None)


class NodeEvictionCosts:
    """Victims on the nodes of a pool and their costs, for one shape and one set of candidates."""

    def __init__(self, pool_state: PoolState, shape: TaskShape, victims: NodeVictims) -> None:
        self._pool_state = pool_state
        self._shape = shape
        self._victims = victims
        holds = victims.capacity_without.capacity(shape)
        self.max_tasks = int(holds.sum())
        """Upper bound of the tasks that fit with all candidates gone."""
        self._min_costs = [
            (victims.cost_of(there[0]), node) for node, there in victims.by_node.items() if holds[node]
        ]
        heapify(self._min_costs)
        self.rejected: set[int] = set()
        """Nodes excluded from the current search."""

    def cheapest_nodes(self, victim_projects: Collection[ProjectId]) -> Iterator[tuple[int, list[Gang]]]:
        """Yield nodes, and the jobs of ``victim_projects`` to evict there for one more task, cheapest first.

        A node comes again while it can free more.
        """
        self.rejected = set()
        looked: list[tuple[EvictionCost, int]] = []  # entries to restore to ``_min_costs``
        priced: list[tuple[EvictionCost, int]] = []
        victims: dict[int, list[Gang]] = {}

        def add(node: int) -> None:
            if victims_here := self._victims_on(node, victim_projects):
                victims[node] = victims_here
                heappush(priced, (self._cost(victims_here), node))

        try:
            while True:
                while self._min_costs and (not priced or self._min_costs[0][0] < priced[0][0]):
                    least, node = heappop(self._min_costs)
                    now = self._victims.min_cost(node)
                    if now is None:
                        continue
                    if now > least:
                        heappush(self._min_costs, (now, node))
                        continue
                    looked.append((least, node))
                    add(node)
                if not priced:
                    return
                _, node = heappop(priced)
                if all(gang.evictable_tasks for gang in victims[node]):
                    yield node, victims[node]
                if node not in self.rejected:  # gangs on several nodes may have left from another one
                    add(node)
        finally:
            for entry in looked:
                heappush(self._min_costs, entry)

    def _cost(self, gangs: Sequence[Gang]) -> EvictionCost:
        costs = [self._victims.cost_of(gang) for gang in gangs]
        level = max(cost.level for cost in costs)
        return EvictionCost(
            level, sum(c.total for c in costs if c.level == level), sum(cost.total for cost in costs)
        )

    def _victims_on(self, node: int, victim_projects: Collection[ProjectId]) -> list[Gang]:
        """Return the gangs to evict on a node so that one more task fits; empty if that is not possible."""
        later = self._pool_state.idle_and_releasing
        before = later.capacity_on(self._shape, node)
        released: list[_NodeCandidate] = []
        enough_at: int | None = None
        for gang in self._victims.by_node[node]:
            level = self._victims.level[gang.job]
            if enough_at is not None and (len(released) == 1 or level > enough_at):
                break
            if gang.leaf_project not in victim_projects:
                continue
            places = [place for place in gang.evictable_slots if place.node == node]
            if not places:
                continue
            candidate = _NodeCandidate(gang, level, self._victims.cost[gang.job], places)
            candidate.adjust(later, +1)
            released.append(candidate)
            if enough_at is None and later.capacity_on(self._shape, node) > before:
                enough_at = level
        chosen = [] if enough_at is None else self._least_costly(node, before, released)
        for candidate in released:
            if enough_at is None or candidate in chosen:
                candidate.adjust(later, -1)
        return [candidate.gang for candidate in chosen]

    def _least_costly(
        self, node: int, before: int, released: Sequence[_NodeCandidate]
    ) -> list[_NodeCandidate]:
        """Return which of the released candidates to evict; the others hold their slots again.

        Of each level, from the highest down, the least costly set is taken that suffices without all below it.
        """
        if len(released) == 1:
            return list(released)
        later, shape = self._pool_state.idle_and_releasing, self._shape
        needed_milli = 0 if shape.request.share_mib else (before + 1) * shape.request.total_milli
        chosen: list[_NodeCandidate] = []
        for _, group in groupby(reversed(released), key=attrgetter("level")):
            alike = list(group)[::-1]
            spare_milli = int(later.free_milli[node].sum()) - needed_milli
            chosen += [candidate for candidate in alike if candidate.milli > spare_milli]
            others = [candidate for candidate in alike if candidate.milli <= spare_milli]
            for candidate in others:
                candidate.adjust(later, -1)
            for victims in _sets_by_cost(others):
                for candidate in victims:
                    candidate.adjust(later, +1)
                if later.capacity_on(shape, node) > before:
                    chosen += victims
                    break
                for candidate in victims:
                    candidate.adjust(later, -1)
        return chosen


class _NodeCandidate(NamedTuple):
    """A candidate on one node, and what it holds there."""

    gang: Gang
    level: int
    cost: float
    places: list[HeldSlots]

    @property
    def milli(self) -> int:
        return sum(place.milli * len(place.slots) for place in self.places)

    def adjust(self, placer: NodePlacer, sign: int) -> None:
        for place in self.places:
            placer.adjust(place, sign)


def _sets_by_cost(alike: Sequence[_NodeCandidate]) -> Iterable[Sequence[_NodeCandidate]]:
    """Return sets of candidates to try, the least costly first, the set of all last.

    Of many candidates, only those sets are tried that leave out the most costly ones.
    """
    if len(alike) > MAX_COMPARED:
        by_cost = sorted(alike, key=attrgetter("cost"))
        return (by_cost[:count] for count in range(len(by_cost) + 1))
    every = chain.from_iterable(combinations(alike, count) for count in range(len(alike) + 1))
    return sorted(every, key=lambda each: (sum(candidate.cost for candidate in each), len(each)))
