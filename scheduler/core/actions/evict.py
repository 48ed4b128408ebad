"""The eviction actions: evict running jobs for entitled pending jobs, and reprieve unneeded victims."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from scheduler.core.actions.preemption import OrderedEviction, PreemptionPlanner, preemption_allowed_from_s
from scheduler.core.actions.victim_search import EvictionSet
from scheduler.core.model.plan import EvictionReason
from scheduler.core.model.policy import Policy
from scheduler.core.model.snapshot import JobId
from scheduler.core.session.gang import Gang, GangTask, GangTaskState, first_placeable, total_demand
from scheduler.core.session.gang_placement import GangPlacer
from scheduler.core.session.job_queue import JobQueue
from scheduler.core.session.pool import PoolState
from scheduler.core.session.statement import Statement
from scheduler.core.shares.ledger import AssumeReleased

if TYPE_CHECKING:
    from scheduler.core.actions.scheduling_session import SchedulingSession

EVICTION_REASONS = {
    "consolidate": EvictionReason.MIGRATED,
    "reclaim": EvictionReason.RECLAIMED,
    "preempt": EvictionReason.PREEMPTED,
}
"""The reason that each action gives its evictions, least disruptive first."""


class EvictAction:
    """The actions *consolidate*, *reclaim* and *preempt*, and the eviction of stale gangs."""

    def __init__(self, session: SchedulingSession) -> None:
        self._session = session

    def run(self, action: str) -> bool:
        """Evict running jobs for entitled pending jobs; return True if any job was placed."""
        changed = False
        for pool, pool_state in self._session.pool_states.items():
            planner, reason = self._session.planners[pool], EVICTION_REASONS[action]
            cannot_help, infeasible = self._cannot_help(planner, action), planner.infeasible(reason)
            mine: list[Gang] = []
            for owner, claims in self._session.ready_classes[pool].items():
                if not planner.any_may_evict(*owner, claims.min_demand, reason):
                    continue
                for group in claims.groups:
                    if group[0].quota_class_id in infeasible:
                        continue
                    first = first_placeable(group)
                    if first is not None and not cannot_help(first):
                        mine += [gang for gang in group if gang.next_to_place() and self._may_preempt(gang)]
            queue = JobQueue(pool_state, mine, cannot_help)
            while (gang := queue.pop()) is not None:
                milli = gang.next_demand.gpu_milli
                eviction_set = self._find_victims(planner, action, gang)
                if eviction_set is None:
                    continue
                changed = True
                for task in (*eviction_set.evicted, *eviction_set.migrated):
                    if task.held:
                        right = EvictionReason.MIGRATED if task.state is GangTaskState.NOMINATED else reason
                        self._session.evictions[task] = OrderedEviction(task, right, gang.job)
                self._session.unprocessed.discard(gang.job)
                self._session.nominated_jobs.add(gang.job)
                pool_state.gangs[gang.job] = gang
                self._session.pool_of[gang.job] = pool
                queue.started(gang, milli)
                for leaf in {task.gang.leaf_project for task in eviction_set.evicted}:
                    queue.update_project(leaf)
        return changed

    def reprieve_victims(self) -> bool:
        """Cancel evictions that later evictions made unnecessary; return True if there were any."""
        spared = False
        victims = {
            each.task.gang.job: each
            for each in self._session.evictions.values()
            if each.task.state is GangTaskState.RELEASING
        }
        for ordered in sorted(victims.values(), key=self._most_lost_first):
            if self._session.steps_used >= self._session.policy.max_steps_per_cycle:
                break
            self._session.steps_used += 1
            victim, preemptor = ordered.task.gang, self._session.gangs[ordered.for_job]
            pool_state = self._session.pool_states[self._session.pool_of[preemptor.job]]
            kept = [task for task in preemptor.tasks if task.state is GangTaskState.NOMINATED]
            gone = [
                task
                for task in victim.tasks
                if task.state is GangTaskState.RELEASING and task in self._session.evictions
            ]
            if not kept or not gone or ordered.reason is EvictionReason.GANG_INCOMPLETE:
                continue  # the preemptor starts on free GPUs; the victim is evicted for its project's share
            if self._session.planners[pool_state.pool.id].future_free_milli() < total_demand(gone).gpu_milli:
                continue  # everything the victim holds is nominated already
            statement = Statement(pool_state)
            for task in kept:
                statement.evict(task)
            for task in gone:
                statement.restore(task)
            if self._fits_beside_victim(pool_state, statement, preemptor, kept, gone, ordered.reason):
                for task in gone:
                    del self._session.evictions[task]
                self._session.planners[pool_state.pool.id].invalidate()
                spared = True
            else:
                statement.rollback()
        return spared

    def _most_lost_first(self, eviction: OrderedEviction) -> tuple[float, JobId]:
        gang = eviction.task.gang
        pool_state = self._session.pool_states[self._session.pool_of[eviction.for_job]]
        return (-self._session.planners[pool_state.pool.id].lost_gpu_seconds(gang), gang.job)

    def _fits_beside_victim(
        self,
        pool_state: PoolState,
        statement: Statement,
        preemptor: Gang,
        nominated: list[GangTask],
        evicted: list[GangTask],
        reason: EvictionReason,
    ) -> bool:
        """Place ``preemptor`` again while ``evicted`` stay; return False if that is not possible."""
        victim = evicted[0].gang
        if pool_state.idle_and_releasing.is_overcommitted(place for task in evicted for place in task.held):
            return False
        if reason is EvictionReason.PREEMPTED and not pool_state.is_within_share(
            victim.leaf_project, total_demand(nominated)
        ):
            return False
        if pool_state.ledger.is_blocked(
            preemptor.leaf_project,
            preemptor.user,
            total_demand(nominated),
            preemptor.preemptible,
            assume_released=AssumeReleased.EVICTED,
        ):
            return False
        if not GangPlacer(statement, self._session.domains[pool_state.pool.id], nominate=True).place(
            preemptor, nominated
        ):
            return False
        levels = {*pool_state.tree.path[victim.leaf_project], *pool_state.tree.path[preemptor.leaf_project]}
        if pool_state.is_user_over_limit(preemptor) or pool_state.is_user_over_limit(victim):
            return False
        return not any(pool_state.ledger.is_over_limit(level) for level in levels)

    def _may_preempt(self, gang: Gang) -> bool:
        """Return False during the job's preemption delay, or if only a backfill reservation blocks it."""
        pool_state = self._session.pool_states[gang.feasible_pools[0]]
        reserving = self._session.backfill_reservations.get(pool_state.pool.id)
        if reserving and gang.pending_row and reserving.first_blocking(gang):
            return not pool_state.gang_fits_now(gang)
        return self._session.snapshot.now_s >= preemption_allowed_from_s(gang, pool_state.policy)

    def _cannot_help(self, planner: PreemptionPlanner, action: str) -> Callable[[Gang], bool]:
        """Return a predicate: True if eviction cannot help a gang, nor any other gang of its quota class."""
        reason = EVICTION_REASONS[action]
        infeasible = planner.infeasible(reason)

        def cannot_help(gang: Gang) -> bool:
            if gang.quota_class_id in infeasible:
                return True
            if not planner.may_evict(gang, reason):
                if reason is not EvictionReason.RECLAIMED:
                    planner.mark_infeasible(gang, reason)
                return True
            return False

        return cannot_help

    def _find_victims(self, planner: PreemptionPlanner, action: str, gang: Gang) -> EvictionSet | None:
        """Return the victims of ``action`` for ``gang``, found within the remaining step budget."""
        before = planner.steps_used
        budget = before + self._session.policy.max_steps_per_cycle - self._session.steps_used
        if action == "consolidate":
            eviction_set = planner.consolidate(gang, budget)
        elif action == "reclaim":
            eviction_set = planner.reclaim(gang, budget)
        else:
            eviction_set = planner.preempt(gang, budget)
        self._session.steps_used += planner.steps_used - before
        return eviction_set

    def evict_stale_gangs(self) -> None:
        """Evict gangs that have had too few live tasks for too long; they return to the queue."""
        for pool_state in self._session.pool_states.values():
            statement = Statement(pool_state)
            for gang in stale_gangs(pool_state, self._session.snapshot.now_s, self._session.policy):
                for task in gang.tasks:
                    if task.state is GangTaskState.RUNNING:
                        statement.evict(task)
                        self._session.evictions[task] = OrderedEviction(
                            task, EvictionReason.GANG_INCOMPLETE, gang.job
                        )


def stale_gangs(pool_state: PoolState, now_s: float, policy: Policy) -> list[Gang]:
    """Return the gangs to evict whole, ordered by job."""
    found = []
    for job in sorted(pool_state.gangs):
        gang = pool_state.gangs[job]
        row = gang.running_row
        if row is None or row.stale_since_s is None or row.stopping:
            continue
        if gang.root.is_satisfied:  # the tasks that this plan starts complete it again
            continue
        grace_s = policy.stale_gang_grace_s if row.stale_gang_grace_s is None else row.stale_gang_grace_s
        if grace_s < 0 or now_s - row.stale_since_s < grace_s:
            continue
        if any(task.state is GangTaskState.RUNNING for task in gang.tasks):
            found.append(gang)
    return found
