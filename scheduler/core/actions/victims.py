"""Who may be asked to leave: gangs that hold places, by project, first to leave first."""

from __future__ import annotations

import math
from collections.abc import Iterable, Set

from scheduler.core.model.plan import EvictionReason
from scheduler.core.model.policy import Policy
from scheduler.core.model.snapshot import WHOLE_MILLI, ProjectId
from scheduler.core.session.ageing import ends_soon
from scheduler.core.session.gang import Gang, GangTask, GangTaskState
from scheduler.core.session.pool import PoolState


class VictimCandidates:
    """The preemptible gangs of one pool, and for whom nobody was found; known until the pool_state changes otherwise."""

    def __init__(
        self, pool_state: PoolState, policy: Policy, now_s: float, evict_at_s: float | None = None
    ) -> None:
        """``ask_at_s``: whoever is protected until then counts as one that may be asked; None is now."""
        self._pool_state = pool_state
        self._policy = policy
        self._now_s = now_s
        self._evict_at_s = now_s if evict_at_s is None else evict_at_s
        self._lists: dict[tuple[ProjectId, str, int | None], list[Gang]] = {}
        self._in_order: dict[ProjectId, list[Gang]] = {}
        self._min_priority: dict[ProjectId, float] = {}  # no priority of a leaf project is below that
        self._by_project: dict[ProjectId, list[Gang]] | None = None
        self._lost: dict[Gang, tuple[list[GangTask], float]] = {}  # while the same tasks stand
        self._infeasible: dict[EvictionReason, set[int]] = {reason: set() for reason in EvictionReason}
        self.has_surplus = False
        """Somebody holds more than it needs."""

    def invalidate(self) -> None:
        """The pool_state changed otherwise: candidates and what was hopeless are looked at anew."""
        self._lists.clear()
        self._in_order.clear()
        self._min_priority.clear()
        self._by_project = None
        for questions in self._infeasible.values():
            questions.clear()

    def infeasible(self, reason: EvictionReason) -> Set[int]:
        """The questions of jobs that found no room since the pool_state changed for the better; kept up to date."""
        return self._infeasible[reason]

    def mark_infeasible(self, gang: Gang, reason: EvictionReason) -> None:
        """Nobody alike needs to ask until ``forget``."""
        self._infeasible[reason].add(gang.quota_class_id)

    def in_project(self, leaf: ProjectId, kind: str, below: int | None = None) -> list[Gang]:
        """The gangs of a leaf project that may be asked to leave, first to leave first.

        ``kind`` is by which right: "preempt", "reclaim", "guaranteed" (reclaim within the taker's guarantee), or "move".
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
        """Whoever of a leaf project may be asked to leave by any right, first to leave first."""
        found = self._in_order.get(leaf)
        if found is None:
            found = self._in_order[leaf] = list(self.by_project().get(leaf, ()))
            found.sort(key=lambda gang: gang.job, reverse=self._policy.victim_order == "youngest")
            found.sort(key=lambda gang: self.eviction_order(gang, gang.size_level))
        return found

    def any_below_priority(self, leaf: ProjectId, priority: int) -> bool:
        """True when ``of`` finds somebody of a lower priority to preempt in a leaf project."""
        least = self._min_priority.get(leaf)
        if least is None:
            mine = self.by_project().get(leaf, ())
            least = self._min_priority[leaf] = min((gang.priority for gang in mine), default=math.inf)
        return least < priority and bool(self.in_project(leaf, "preempt", priority))

    def by_project(self) -> dict[ProjectId, list[Gang]]:
        """By leaf project, everybody who holds places and may be asked to leave."""
        if self._by_project is None:
            self._by_project = {}
            self.has_surplus = False
            for gang in self._pool_state.gangs.values():
                if gang.preemptible and not gang.pinned and gang.evictable_tasks:
                    self._by_project.setdefault(gang.leaf_project, []).append(gang)
                    self.has_surplus = self.has_surplus or gang.size_level > 1
        return self._by_project

    def eviction_order(self, gang: Gang, size_level: int) -> tuple[float, ...]:
        """Where a gang stands among those that may leave, were its growth as given; smaller leaves first."""
        if self._policy.victim_order == "youngest":
            return (gang.priority, -size_level, -gang.submitted_s)
        return (
            gang.started_s is not None,
            size_level < 2,  # a job that only shrinks works on
            self.lost_gpu_seconds(gang),
            -(gang.started_s or self._now_s),
            -gang.submitted_s,
        )

    def lost_gpu_seconds(self, gang: Gang) -> float:
        """GPU-seconds since the last checkpoint, else since the start; nothing of a job that only starts."""
        if gang.started_s is None:
            return 0.0
        known = self._lost.get(gang)
        if known is None or known[0] is not gang.evictable_tasks:
            since_s = max(gang.started_s, gang.checkpoint_s or gang.started_s)
            milli = sum(
                task.amounts.gpu_milli for task in gang.evictable_tasks if task.state is GangTaskState.RUNNING
            )
            lost = max(0.0, self._now_s - since_s) * milli / WHOLE_MILLI
            known = self._lost[gang] = (gang.evictable_tasks, lost)
        return known[1]

    def _is_protected(self, gang: Gang, kind: str) -> bool:
        """True while a job is not asked to leave yet; who would lose much is not moved."""
        if kind == "move":
            return self.lost_gpu_seconds(gang) > self._policy.max_migration_loss_gpu_s
        until_s = self.protected_until_s(gang, kind)
        return until_s is not None and self._evict_at_s < until_s

    def protected_until_s(self, gang: Gang, kind: str) -> float | None:
        """Until when a job runs undisturbed: to its predicted end if that is near, else for its minimum; or None.

        A near end is a courtesy, which nobody has to pay for with its guarantee.
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
            for level in self._pool_state.tree.path[gang.leaf_project]:
                own_s = self._pool_state.quotas[level].reclaim_min_runtime_s
                if own_s is not None:
                    least_s = own_s
                    break
        return gang.started_s + least_s if self._now_s - gang.started_s < least_s else None

    def protection_ends_s(self) -> list[float]:
        """The moments at which somebody ceases to be protected, ascending."""
        found = {
            until_s
            for mine in self.by_project().values()
            for gang in mine
            for kind in ("reclaim", "guaranteed", "preempt")
            if (until_s := self.protected_until_s(gang, kind)) is not None and until_s > self._now_s
        }
        return sorted(found)

    def remove(self, gone: Iterable[GangTask]) -> None:
        """Gangs of which nothing stands any more leave the lists."""
        for gang in {task.gang.job: task.gang for task in gone}.values():
            if not gang.evictable_tasks:
                for key, mine in self._lists.items():
                    if key[0] == gang.leaf_project and gang in mine:
                        mine.remove(gang)
                if self._by_project is not None and gang in self._by_project.get(gang.leaf_project, ()):
                    self._by_project[gang.leaf_project].remove(gang)
