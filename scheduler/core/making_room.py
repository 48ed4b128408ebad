"""Making room: asking running jobs to leave for those who are entitled, and calling back whom nobody needs gone."""

from __future__ import annotations

from collections.abc import Callable

from scheduler.core.cluster import JobId
from scheduler.core.gang import Gang, GangTaskState, GangTask, first_placeable, total_demand
from scheduler.core.ledger import AssumeReleased
from scheduler.core.plan import EvictionReason
from scheduler.core.policy import Policy
from scheduler.core.preemption import PreemptionPlanner
from scheduler.core.scene import PoolState
from scheduler.core.search import EvictionSet
from scheduler.core.seats import GangPlacer
from scheduler.core.stale import stale_gangs
from scheduler.core.table import OrderedEviction, SchedulingSession
from scheduler.core.trial import Statement
from scheduler.core.turns import JobQueue


def preemption_allowed_from_s(gang: Gang, policy: Policy) -> float:
    """From when on others may be asked to leave for a gang: after its own delay, else that of the pool."""
    own_s = gang.pending_row.preemption_delay_s if gang.pending_row else None
    return gang.submitted_s + (policy.preempt_after_s if own_s is None else own_s)


EVICTION_REASONS = {
    "consolidate": EvictionReason.MIGRATED,
    "reclaim": EvictionReason.RECLAIMED,
    "preempt": EvictionReason.PREEMPTED,
}
"""What each of these actions is told as, least disruptive first."""


class EvictAction:
    """The actions *consolidate*, *reclaim*, *preempt* and the end of stale gangs."""

    def __init__(self, table: SchedulingSession) -> None:
        self._table = table

    def run(self, action: str) -> bool:
        """Ask running jobs to leave for those who are entitled; True when anybody was seated."""
        changed = False
        for pool, scene in self._table.pool_states.items():
            rooms, reason = self._table.planners[pool], EVICTION_REASONS[action]
            useless, hopeless = self._cannot_help(rooms, action), rooms.infeasible(reason)
            mine: list[Gang] = []
            for whose, claims in self._table.ready_classes[pool].items():
                if not rooms.any_may_evict(*whose, claims.min_demand, reason):
                    continue
                for group in claims.groups:
                    if group[0].quota_class_id in hopeless:
                        continue
                    first = first_placeable(group)
                    if first is not None and not useless(first):
                        mine += [gang for gang in group if gang.next_to_place() and self._may_preempt(gang)]
            queue = JobQueue(scene, mine, useless)
            while (turn := queue.pop()) is not None:
                milli = turn.next_demand.gpu_milli
                room = self._find_victims(rooms, action, turn)
                if room is None:
                    continue
                changed = True
                for task in (*room.evicted, *room.migrated):
                    if task.held:
                        right = EvictionReason.MIGRATED if task.state is GangTaskState.NOMINATED else reason
                        self._table.evictions[task] = OrderedEviction(task, right, turn.job)
                self._table.unprocessed.discard(turn.job)
                self._table.nominated_jobs.add(turn.job)
                scene.gangs[turn.job] = turn
                self._table.pool_of[turn.job] = pool
                queue.started(turn, milli)
                for leaf in {task.gang.leaf_project for task in room.evicted}:
                    queue.update_project(leaf)
        return changed

    def reprieve_victims(self) -> bool:
        """Call back victims that are not needed any more, since others left later; true when any is."""
        spared = False
        victims = {
            each.task.gang.job: each
            for each in self._table.evictions.values()
            if each.task.state is GangTaskState.RELEASING
        }
        for ordered in sorted(victims.values(), key=self._most_lost_first):
            if self._table.steps_used >= self._table.policy.cycle_budget_steps:
                break
            self._table.steps_used += 1
            victim, winner = ordered.task.gang, self._table.gangs[ordered.for_job]
            scene = self._table.pool_states[self._table.pool_of[winner.job]]
            kept = [task for task in winner.tasks if task.state is GangTaskState.NOMINATED]
            gone = [
                task for task in victim.tasks if task.state is GangTaskState.RELEASING and task in self._table.evictions
            ]
            if not kept or not gone or ordered.reason is EvictionReason.GANG_INCOMPLETE:
                continue  # it starts where places are free; the victim leaves for its project's share
            if self._table.planners[scene.pool.id].future_free_milli() < total_demand(gone).gpu_milli:
                continue  # what the victim holds is taken, all of it
            trial = Statement(scene)
            for task in kept:
                trial.evict(task)
            for task in gone:
                trial.restore(task)
            if self._fits_beside_victim(scene, trial, winner, kept, gone, ordered.reason):
                for task in gone:
                    del self._table.evictions[task]
                self._table.planners[scene.pool.id].invalidate()
                spared = True
            else:
                trial.rollback()
        return spared

    def _most_lost_first(self, eviction: OrderedEviction) -> tuple[float, JobId]:
        gang = eviction.task.gang
        scene = self._table.pool_states[self._table.pool_of[eviction.for_job]]
        return (-self._table.planners[scene.pool.id].lost_gpu_seconds(gang), gang.job)

    def _fits_beside_victim(
        self,
        scene: PoolState,
        statement: Statement,
        preemptor: Gang,
        nominated: list[GangTask],
        evicted: list[GangTask],
        reason: EvictionReason,
    ) -> bool:
        """Seat ``winner`` again while ``gone`` stay; False when a place or a bound needs them gone."""
        victim = evicted[0].gang
        if scene.idle_and_releasing.is_overcommitted(place for task in evicted for place in task.held):
            return False
        if reason is EvictionReason.PREEMPTED and not scene.is_within_share(victim.leaf_project, total_demand(nominated)):
            return False
        if scene.ledger.is_blocked(preemptor.leaf_project, preemptor.user, total_demand(nominated), preemptor.preemptible, assume_released=AssumeReleased.EVICTED):
            return False
        if not GangPlacer(statement, self._table.domains[scene.pool.id], nominate=True).place(preemptor, nominated):
            return False
        levels = {*scene.tree.path[victim.leaf_project], *scene.tree.path[preemptor.leaf_project]}
        if scene.is_user_over_limit(preemptor) or scene.is_user_over_limit(victim):
            return False
        return not any(scene.ledger.is_over_limit(level) for level in levels)

    def _may_preempt(self, gang: Gang) -> bool:
        """False for a job that waits quietly for a while first, or that only a reservation holds back."""
        scene = self._table.pool_states[gang.feasible_pools[0]]
        reserving = self._table.backfill_reservations.get(scene.pool.id)
        if reserving and gang.pending_row and reserving.first_blocking(gang):
            return not scene.gang_fits_now(gang)
        return self._table.snapshot.now_s >= preemption_allowed_from_s(gang, scene.policy)

    def _cannot_help(self, rooms: PreemptionPlanner, action: str) -> Callable[[Gang], bool]:
        """Tells whether asking for room for a gang is in vain; what holds for one holds for all alike."""
        reason = EVICTION_REASONS[action]
        hopeless = rooms.infeasible(reason)

        def useless(gang: Gang) -> bool:
            if gang.quota_class_id in hopeless:
                return True
            if not rooms.may_evict(gang, reason):
                if reason is not EvictionReason.RECLAIMED:
                    rooms.mark_infeasible(gang, reason)
                return True
            return False

        return useless

    def _find_victims(self, rooms: PreemptionPlanner, action: str, gang: Gang) -> EvictionSet | None:
        """Room for ``gang``, made within what is left of the budget."""
        before = rooms.steps_used
        budget = before + self._table.policy.cycle_budget_steps - self._table.steps_used
        if action == "consolidate":
            room = rooms.consolidate(gang, budget)
        elif action == "reclaim":
            room = rooms.reclaim(gang, budget)
        else:
            room = rooms.preempt(gang, budget)
        self._table.steps_used += rooms.steps_used - before
        return room

    def evict_stale_gangs(self) -> None:
        """Gangs of which too few tasks live end whole and queue again."""
        for scene in self._table.pool_states.values():
            trial = Statement(scene)
            for gang in stale_gangs(scene, self._table.snapshot.now_s, self._table.policy):
                for task in gang.tasks:
                    if task.state is GangTaskState.RUNNING:
                        trial.evict(task)
                        self._table.evictions[task] = OrderedEviction(task, EvictionReason.GANG_INCOMPLETE, gang.job)
