"""Eviction candidates: gangs that hold slots, by project, in order of eviction.

``NodeEvictionCosts`` gives the eviction cost of a node, which is the work that its candidates lose together,
evicted in order until one more task of a shape fits. It is at least what the first of them loses, so nodes are
visited by that bound and few costs are computed per search.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator
from heapq import heapify, heappop, heappush

from scheduler.core.capacity.node_capacity import SlotBatch
from scheduler.core.model.plan import EvictionReason
from scheduler.core.model.policy import Policy
from scheduler.core.model.snapshot import WHOLE_MILLI, ProjectId, RunningRow, TaskShape
from scheduler.core.session.gang import Gang, GangTask, total_demand
from scheduler.core.session.pool import PoolState
from scheduler.core.shares.reclaim_rules import reclaim_min_runtime_s


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

        ``kind`` selects the rules: "preempt", "reclaim", "guaranteed" (reclaim within the preemptor's
        guarantee) or "move" (migrate). With ``below``, only gangs of lower priority.
        """
        found = self._lists.get((leaf, kind, below))
        if found is None:
            found = self._lists[leaf, kind, below] = [
                gang
                for gang in self._all_in_project(leaf)
                if gang.evictable_tasks
                and (below is None or gang.priority < below)
                and not self._is_protected(gang, kind)
            ]
        return found

    def _all_in_project(self, leaf: ProjectId) -> list[Gang]:
        """Return the gangs of a leaf project that any kind of eviction may take, in order of eviction."""
        found = self._in_order.get(leaf)
        if found is None:
            found = self._in_order[leaf] = list(self.by_project().get(leaf, ()))
            found.sort(key=lambda gang: gang.job, reverse=self._policy.victim_order == "youngest")
            found.sort(key=lambda gang: self.eviction_order(gang, gang.size_level))
        return found

    def any_below_priority(self, leaf: ProjectId, priority: int) -> bool:
        """Return True if a gang of lower priority in the leaf project may be preempted."""
        least = self._min_priority.get(leaf)
        if least is None:
            mine = self.by_project().get(leaf, ())
            least = self._min_priority[leaf] = min((gang.priority for gang in mine), default=math.inf)
        return least < priority and bool(self.in_project(leaf, "preempt", priority))

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
            size_level < 2,  # an elastic job that only shrinks keeps running
            gang.started_s is not None,
            self.lost_gpu_seconds(gang),
            -(gang.started_s or self._now_s),
            -gang.submitted_s,
        )

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

    def _is_protected(self, gang: Gang, kind: str) -> bool:
        """Return True while a gang must not be evicted, or if migrating it would lose too much work."""
        if kind == "move":
            return self.lost_gpu_seconds(gang) > self._policy.max_migration_loss_gpu_s
        until_s = self.protected_until_s(gang, kind)
        return until_s is not None and self._evict_at_s < until_s

    def protected_until_s(self, gang: Gang, kind: str) -> float | None:
        """Return until when a job is protected: to a near predicted end, else for its minimum; or None.

        The near end does not protect it from projects that reclaim within their guarantee.
        """
        if gang.started_s is None:
            return None
        if (
            kind != "guaranteed"
            and gang.running_row
            and ends_soon(gang.running_row, self._now_s, self._policy)
        ):
            return gang.running_row.predicted_end_s
        least_s = self._policy.preempt_min_runtime_s
        if kind in ("reclaim", "guaranteed"):
            path = self._pool_state.tree.path[gang.leaf_project]
            least_s = reclaim_min_runtime_s(path, self._pool_state.quotas, least_s)
        return gang.started_s + least_s if self._now_s - gang.started_s < least_s else None

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


class NodeVictims:
    """A set of eviction candidates: those on each node, and the free capacity with all of them gone."""

    def __init__(
        self, pool_state: PoolState, gangs: Iterable[Gang], lost_gpu_seconds: Callable[[Gang], float]
    ) -> None:
        """``gangs`` are in order of eviction."""
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
        """Return what the first candidate left on the node would lose."""
        for gang in self.by_node[node]:
            if gang.evictable_tasks:
                return self.lost_gpu_seconds[gang.job]
        return math.inf


class NodeEvictionCosts:
    """Eviction costs of the nodes of a pool for one shape and one set of candidates."""

    def __init__(self, pool_state: PoolState, shape: TaskShape, victims: NodeVictims) -> None:
        self._pool_state = pool_state
        self._shape = shape
        self.victims = victims
        holds = victims.capacity_without.capacity(shape)
        self.max_tasks = int(holds.sum())
        """Upper bound of the tasks that fit with all candidates gone."""
        lost = victims.lost_gpu_seconds
        self._min_costs = [
            (lost[there[0].job], node) for node, there in victims.by_node.items() if holds[node]
        ]
        heapify(self._min_costs)
        self.rejected: set[int] = set()
        """Nodes excluded from the current search."""

    def cheapest_nodes(self, victim_projects: Collection[ProjectId]) -> Iterator[int]:
        """Yield nodes by cost of evicting ``victim_projects``, each again while it can free more."""
        self.rejected = set()
        looked: list[tuple[float, int]] = []  # entries to restore to ``_min_costs``
        priced: list[tuple[float, int]] = []
        try:
            while True:
                while self._min_costs and (not priced or self._min_costs[0][0] < priced[0][0]):
                    least, node = heappop(self._min_costs)
                    now = self.victims.min_cost(node)
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
                if node not in self.rejected and not math.isinf(price := self._cost(node, victim_projects)):
                    heappush(priced, (price, node))
        finally:
            for entry in looked:
                heappush(self._min_costs, entry)

    def _cost(self, node: int, victim_projects: Collection[ProjectId]) -> float:
        later, lost = self._pool_state.idle_and_releasing, 0.0
        before = later.capacity_on(self._shape, node)
        taken = []
        price = math.inf
        for gang in self.victims.by_node[node]:
            if gang.leaf_project not in victim_projects:
                continue
            places = [place for task in gang.evictable_tasks for place in task.held if place.node == node]
            if not places:
                continue
            lost += self.victims.lost_gpu_seconds[gang.job]
            for place in places:
                later.adjust(place, +1)
                taken.append(place)
            if later.capacity_on(self._shape, node) > before:
                price = lost
                break
        for place in taken:
            later.adjust(place, -1)
        return price
