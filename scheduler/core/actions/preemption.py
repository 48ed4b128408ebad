"""The eviction actions: which running jobs are evicted for a pending one, and which victims are reprieved.

*Consolidate* migrates jobs so that another fits; every migrated job has a new placement in the same plan.
*Reclaim* evicts jobs of other projects within the rules of ``shares.reclaim_rules``. *Preempt* evicts jobs of
strictly lower priority in the same project and takes the project no further beyond its fair share.

``VictimQueue`` gives the candidates one step at a time until the job fits. Then each victim, last first, is
restored if it is not needed, or migrated if another placement exists.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from scheduler.core.actions.reclaim_right import ReclaimRight, group_by_gang
from scheduler.core.actions.scheduling_session import (
    OrderedEviction,
    SchedulingSession,
    preemption_allowed_from_s,
)
from scheduler.core.actions.victim_search import EvictionSet, SearchRequest, VictimSearch
from scheduler.core.actions.victims import VictimCandidates
from scheduler.core.model.plan import EvictionReason
from scheduler.core.model.policy import Policy
from scheduler.core.model.resources import ResourceVector
from scheduler.core.model.snapshot import JobId, PoolId, ProjectId, TaskShape
from scheduler.core.session.gang import Gang, GangTask, GangTaskState, first_placeable, total_demand
from scheduler.core.session.gang_placement import GangPlacer, Statement
from scheduler.core.session.job_queue import JobQueue
from scheduler.core.session.pool import PoolState
from scheduler.core.shares.quota_ledger import AssumeReleased
from scheduler.core.shares.reclaim_rules import may_reclaim

EVICTION_REASONS = {
    "consolidate": EvictionReason.MIGRATED,
    "reclaim": EvictionReason.RECLAIMED,
    "preempt": EvictionReason.PREEMPTED,
}
"""The reason that each action gives its evictions, least disruptive first."""

MAX_STEPS_AGAIN = 1_000
"""Steps of a search for the jobs that a victim could evict in turn."""


class PreemptionPlanner:
    """Plans the evictions of one pool."""

    def __init__(
        self,
        pool_state: PoolState,
        now_s: float,
        evictions: Mapping[GangTask, OrderedEviction],
        *,
        simulate_at_s: float | None = None,
    ) -> None:
        """``evictions`` are those that this plan has ordered so far.

        With ``simulate_at_s`` change nothing, and treat jobs protected until that time as evictable.
        """
        self._pool_state = pool_state
        self._evictions = evictions
        self._now_s = now_s
        self._dry_run = simulate_at_s is not None
        self.candidates = VictimCandidates(pool_state, now_s, simulate_at_s)
        self._search = VictimSearch(pool_state, self.candidates)
        self._future_free: tuple[int, int] | None = None
        self._reclaim_allowed: dict[tuple[ProjectId, ResourceVector, bool], bool] = {}
        """Valid for one version of the pool state."""
        self._reclaim_allowed_version = -1
        self._protection_ends_s: list[float] | None = None  # valid until the pool state changes
        self._dry_run_steps = 0
        self._dry_run_planners: dict[float, PreemptionPlanner] = {}
        """By simulated time, valid until the pool state changes."""

    @property
    def steps_used(self) -> int:
        """Number of victim sets tried."""
        return self._search.steps_used + self._dry_run_steps

    @property
    def truncated(self) -> bool:
        """True if a search ended because its budget was used up."""
        return self._search.truncated

    def invalidate(self) -> None:
        """Discard candidates and infeasible classes after the pool state was changed by another action."""
        self.candidates.invalidate()
        self._search.invalidate()
        self._protection_ends_s = None
        self._dry_run_planners.clear()

    def preempt(self, gang: Gang, budget_steps: int, wanted: Sequence[GangTask] = ()) -> EvictionSet | None:
        """Find victims of lower priority in the gang's project for ``wanted``, by default its next tasks."""
        lower = self.candidates.in_project(gang.leaf_project, "preempt", gang.priority)
        asked = total_demand(wanted or gang.next_tasks)
        if not gang.preemptible and self._pool_state.ledger.exceeded_guarantee(
            gang.leaf_project, asked, AssumeReleased.ALL
        ):
            return None
        within_share = self._keeps_to_share(gang)

        def allowed(gone: Sequence[GangTask], moved: Sequence[GangTask]) -> bool:
            return within_share() and self._may_take_places(gang, asked, self._victims_of(gone))

        return self._find(
            SearchRequest(
                gang,
                {gang.leaf_project: lower},
                EvictionReason.PREEMPTED,
                allowed,
                budget_steps,
                self._dry_run,
                wanted=wanted,
            )
        )

    def _find(self, request: SearchRequest) -> EvictionSet | None:
        """Find victims that could evict nobody in turn, else any: ``EvictAction.settle_victims`` goes on then."""
        refused = False

        def allowed(gone: Sequence[GangTask], moved: Sequence[GangTask]) -> bool:
            nonlocal refused
            if not request.allowed(gone, moved):
                return False
            settled = self.evicts_nobody_again(gone)
            refused = refused or not settled
            return settled

        found = self._search.find(replace(request, allowed=allowed))
        if found is None and refused:
            self.candidates.infeasible[request.reason].discard(request.gang.quota_class_id)
            found = self._search.find(request)
        return found

    def _keeps_to_share(self, gang: Gang) -> Callable[[], bool]:
        """Return a function that tells whether a project holds no more than now, or than its share."""
        ledger, most = self._pool_state.ledger, self._max_held(gang)
        return lambda: all(ledger.held[level].fits_in(most[level]) for level in most)

    def evicts_nobody_again(self, gone: Sequence[GangTask]) -> bool:
        """Return False if a victim, which is pending then, could evict another job in turn."""
        if self._pool_state.policy.semantics.reschedules_victims:
            return True
        gone_tasks = set(gone)
        return not any(
            self._could_evict(victim, victim.root.next_to_place(gone_tasks.__contains__))
            for victim, tasks in group_by_gang(gone)
            if tasks[0].state is GangTaskState.RELEASING
        )

    def _could_evict(self, gang: Gang, wanted: Sequence[GangTask]) -> bool:
        """Return True if the rules let a gang evict others for ``wanted``; change nothing."""
        leaf, actions = gang.leaf_project, self._pool_state.policy.semantics.actions
        if not wanted:
            return False
        if "preempt" in actions and self.may_evict_for(gang, wanted, EvictionReason.PREEMPTED):
            within_share = self._keeps_to_share(gang)
            lower = self.candidates.in_project_now(leaf, "preempt", gang.priority)
            if lower and self._could_fit(
                gang, wanted, EvictionReason.PREEMPTED, {leaf: lower}, lambda gone, moved: within_share()
            ):
                return True
        if "reclaim" not in actions or not self.may_evict_for(gang, wanted, EvictionReason.RECLAIMED):
            return False
        right = ReclaimRight(self._pool_state, gang, total_demand(wanted))
        others = {
            each: mine
            for each in sorted(self.candidates.by_project())
            if right.may_have_reclaimable(each) and (mine := self.candidates.in_project_now(each, right.kind))
        }
        return self._could_fit(
            gang,
            wanted,
            EvictionReason.RECLAIMED,
            others,
            lambda gone, moved: right.covers([*gone, *self._disturbed(moved)]),
        )

    def _victims_of(self, gone: Sequence[GangTask]) -> list[GangTask]:
        """Return the running tasks that this plan evicts for the jobs whose nominated tasks are in ``gone``."""
        displaced = {task.gang.job for task in gone if not task.held}
        return [
            task
            for task, ordered in (self._evictions.items() if displaced else ())
            if ordered.for_job in displaced and task.held and task.state is not GangTaskState.RUNNING
        ]

    def _may_preempt_all(self, gang: Gang, tasks: Sequence[GangTask]) -> bool:
        """Return True if all these tasks are of jobs in the gang's project that it may preempt."""
        return all(
            task.gang.leaf_project == gang.leaf_project
            and task.gang.priority < gang.priority
            and not self.candidates.is_protected(task.gang, "preempt")
            for task in tasks
        )

    def _may_take_places(self, gang: Gang, asked: ResourceVector, victims: Sequence[GangTask]) -> bool:
        """Return True if ``gang``, now placed, may evict the ``victims`` of the jobs that it displaces."""
        if all(task.gang.leaf_project == gang.leaf_project for task in victims):
            return self._may_preempt_all(gang, victims)
        right = ReclaimRight(self._pool_state, gang, asked, is_placed=True)
        return right.exists and self._may_reclaim_all(gang, right, (), (), victims)

    def _may_reclaim_all(
        self,
        gang: Gang,
        right: ReclaimRight,
        gone: Sequence[GangTask],
        moved: Sequence[GangTask],
        victims: Sequence[GangTask],
    ) -> bool:
        """Return True if ``gang`` may evict or move these tasks, and evict ``victims`` as in ``_may_take_places``."""
        others = [task for task in victims if task.gang.leaf_project != gang.leaf_project]
        if not self._may_preempt_all(gang, [task for task in victims if task not in others]):
            return False
        if any(self.candidates.is_protected(task.gang, right.kind) for task in others):
            return False
        stays = [task for task in others if task.state is GangTaskState.NOMINATED]
        released = [task for task in others if task.state is GangTaskState.RELEASING]
        return right.covers([*gone, *self._disturbed([*moved, *stays])], released)

    def _disturbed(self, moved: Sequence[GangTask]) -> list[GangTask]:
        """Return what a reclaim may move only if it may evict it: all, or protected tasks if any job is movable."""
        running = [task for task in moved if task.held]
        if self._pool_state.policy.movable_jobs == "any":
            return [task for task in running if self.candidates.is_protected(task.gang, "reclaim")]
        return running

    def may_evict_for(self, gang: Gang, wanted: Sequence[GangTask], reason: EvictionReason) -> bool:
        """Return False if the rules certainly forbid these evictions for evicted tasks of a gang."""
        if reason is EvictionReason.PREEMPTED:
            return self.candidates.min_priority(gang.leaf_project) < gang.priority
        return self._may_reclaim(gang.leaf_project, total_demand(wanted), gang.preemptible)

    def _could_fit(
        self,
        gang: Gang,
        wanted: Sequence[GangTask],
        reason: EvictionReason,
        candidates: dict[ProjectId, list[Gang]],
        allowed: Callable[[Sequence[GangTask], Sequence[GangTask]], bool],
    ) -> bool:
        search = VictimSearch(self._pool_state, self.candidates)
        request = SearchRequest(gang, candidates, reason, allowed, MAX_STEPS_AGAIN, True, wanted=wanted)
        eviction_set = search.find(request)
        self._dry_run_steps += search.steps_used
        return eviction_set is not None

    def _max_held(self, gang: Gang) -> dict[ProjectId, ResourceVector]:
        """Return the most each project on the gang's path may hold afterwards: fair share, or current use.

        Otherwise other projects could reclaim the gain, and the evicted jobs preempt again, endlessly.
        """
        ledger = self._pool_state.ledger
        return {
            level: ResourceVector(*map(max, ledger.entitlements[level].fair_share, ledger.held[level]))
            for level in self._pool_state.tree.path[gang.leaf_project]
        }

    def reclaim(self, gang: Gang, budget_steps: int, wanted: Sequence[GangTask] = ()) -> EvictionSet | None:
        """Find victims in other projects for ``wanted``, by default its next tasks."""
        asked = total_demand(wanted or gang.next_tasks)
        if not self._may_reclaim(gang.leaf_project, asked, gang.preemptible):
            return None
        right = ReclaimRight(self._pool_state, gang, asked)
        victims_by_project = {
            each: mine
            for each in sorted(self.candidates.by_project())
            if right.may_have_reclaimable(each) and (mine := self.candidates.in_project(each, right.kind))
        }

        def allowed(gone: Sequence[GangTask], moved: Sequence[GangTask]) -> bool:
            return self._may_reclaim_all(gang, right, gone, moved, self._victims_of(gone))

        return self._find(
            SearchRequest(
                gang,
                victims_by_project,
                EvictionReason.RECLAIMED,
                allowed,
                budget_steps,
                self._dry_run,
                right.kind,
                wanted,
            )
        )

    def earliest_eviction_s(self, gang: Gang, budget_steps: int) -> float | None:
        """Return the first end of a protection from which evictions could place ``gang``, or None.

        A binary search simulates the evictions at each probed time.
        """
        if self._protection_ends_s is None:
            self._protection_ends_s = self.candidates.protection_ends_s()
        moments = self._protection_ends_s
        low, high = 0, len(moments)
        found: float | None = None
        while low < high and self.steps_used < budget_steps:
            # probe the last moment first: if that fails, all fail
            middle = high - 1 if found is None else (low + high) // 2
            if self._finds_victims_at(moments[middle], gang, budget_steps):
                found, high = moments[middle], middle
            elif found is None:
                return None
            else:
                low = middle + 1
        return found

    def _finds_victims_at(self, at_s: float, gang: Gang, budget_steps: int) -> bool:
        then = self._dry_run_planners.get(at_s)
        if then is None:
            then = self._dry_run_planners[at_s] = PreemptionPlanner(
                self._pool_state, self._now_s, self._evictions, simulate_at_s=at_s
            )
        before, actions = then.steps_used, self._pool_state.policy.semantics.actions
        eviction_set = then.consolidate(gang, before + budget_steps) if "consolidate" in actions else None
        if eviction_set is None and "reclaim" in actions:
            eviction_set = then.reclaim(gang, before + budget_steps)
        if eviction_set is None and "preempt" in actions:
            eviction_set = then.preempt(gang, before + budget_steps)
        self._dry_run_steps += 1 + then.steps_used - before
        return eviction_set is not None

    def any_may_evict(
        self,
        leaf: ProjectId,
        priority: int,
        preemptible: bool,
        min_demand: ResourceVector,
        reason: EvictionReason,
    ) -> bool:
        """Return False if ``may_evict`` is False for all gangs of this class with at least this demand."""
        if reason is EvictionReason.RECLAIMED:
            return self._may_reclaim(leaf, min_demand, preemptible)
        if reason is EvictionReason.PREEMPTED:
            return self.candidates.any_below_priority(leaf, priority)
        return preemptible and min_demand.gpu_milli <= self.future_free_milli()

    def may_evict(self, gang: Gang, reason: EvictionReason) -> bool:
        """Return False if the rules certainly forbid all evictions for ``gang``."""
        lower: Sequence[Gang] = ()
        if reason is EvictionReason.RECLAIMED:
            may = self._may_reclaim(gang.leaf_project, gang.next_demand, gang.preemptible)
        elif reason is EvictionReason.PREEMPTED:
            lower = self.candidates.in_project(gang.leaf_project, "preempt", gang.priority)
            may = bool(lower)
        else:
            may = gang.preemptible and 0 < gang.next_demand.gpu_milli <= self.future_free_milli()
        return may and (
            not self._pool_state.ledger.user_holdings
            or not self._exceeds_user_limit(gang)
            or any(each.user == gang.user for each in lower)
        )

    def _exceeds_user_limit(self, gang: Gang) -> bool:
        """Return True if the gang exceeds a user limit, so that only evicting the same user's jobs helps."""
        ledger = self._pool_state.ledger
        return bool(
            ledger.exceeded_user_limit(gang.leaf_project, gang.user, gang.next_demand, AssumeReleased.EVICTED)
        )

    def future_free_milli(self) -> int:
        """Return the milli that are neither held nor nominated once all releasing jobs are gone."""
        if self._future_free is None or self._future_free[0] != self._pool_state.version:
            self._future_free = (
                self._pool_state.version,
                int(self._pool_state.idle_and_releasing.free_milli.clip(min=0).sum()),
            )
        return self._future_free[1]

    def cannot_help(self, reason: EvictionReason, gang: Gang) -> bool:
        """Return True if eviction cannot help a gang, nor any other gang of its quota class."""
        if gang.quota_class_id in self.candidates.infeasible[reason]:
            return True
        if self.may_evict(gang, reason):
            return False
        if reason is not EvictionReason.RECLAIMED:
            self.candidates.infeasible[reason].add(gang.quota_class_id)
        return True

    def _may_reclaim(self, leaf: ProjectId, demand: ResourceVector, preemptible: bool) -> bool:
        """Return True if a project may reclaim: with ``demand`` it stays within its fair share."""
        if self._reclaim_allowed_version != self._pool_state.version:
            self._reclaim_allowed_version = self._pool_state.version
            self._reclaim_allowed.clear()
        known = self._reclaim_allowed.get((leaf, demand, preemptible))
        if known is None:
            ledger = self._pool_state.ledger
            known = self._reclaim_allowed[leaf, demand, preemptible] = may_reclaim(
                ledger.entitlements[leaf],
                ledger.held[leaf],
                ledger.held_non_preemptible[leaf],
                demand,
                preemptible,
            )
        return known

    def consolidate(self, gang: Gang, budget_steps: int) -> EvictionSet | None:
        """Find jobs to migrate so that ``gang`` fits; every one of them has a new placement.

        They are jobs that ``gang`` may evict, too, unless ``movable_jobs`` allows any; protections always hold.
        """
        if not self.may_evict(gang, EvictionReason.MIGRATED):
            return None
        leaf, any_job = gang.leaf_project, self._pool_state.policy.movable_jobs == "any"
        right = (
            ReclaimRight(self._pool_state, gang, gang.next_demand)
            if self._may_reclaim(leaf, gang.next_demand, gang.preemptible)
            else None
        )
        movers: dict[ProjectId, list[Gang]] = {}
        near_end: set[Gang] = set()
        """Jobs near their end, which may be moved only by a job that may evict them."""
        for each in sorted(self.candidates.by_project()):
            if each == leaf:
                mine = self.candidates.movable_in_project(each, "preempt", None if any_job else gang.priority)
            elif any_job:
                mine = self.candidates.movable_in_project(each, "reclaim")
                if right is not None and right.may_have_reclaimable(each):
                    # a near end does not protect those that it could evict
                    more = self.candidates.movable_in_project(each, right.kind)
                    near_end.update(other for other in more if other not in mine)
                    mine = [
                        other
                        for other in more
                        if other not in near_end or right.covers(other.evictable_tasks)
                    ]
            elif right is not None and right.may_have_reclaimable(each):
                mine = self.candidates.movable_in_project(each, right.kind)
            else:
                continue
            movers[each] = [other for other in mine if other is not gang]

        def allowed(gone: Sequence[GangTask], moved: Sequence[GangTask]) -> bool:
            if gone:
                return False
            others = [task for task in moved if task.gang.leaf_project != leaf]
            if any_job:
                others = [task for task in others if task.gang in near_end]
            return not others or (right is not None and right.covers(others))

        return self._search.find(
            SearchRequest(gang, movers, EvictionReason.MIGRATED, allowed, budget_steps, self._dry_run)
        )


class EvictAction:
    """The actions *consolidate*, *reclaim* and *preempt*, and the eviction of stale gangs."""

    def __init__(self, session: SchedulingSession) -> None:
        self._session = session
        self._planners = {
            pool: PreemptionPlanner(pool_state, session.snapshot.now_s, session.evictions)
            for pool, pool_state in session.pool_states.items()
        }

    @property
    def truncated(self) -> bool:
        """True if a search ended because its budget was used up."""
        return any(planner.truncated for planner in self._planners.values())

    def invalidate(self, pools: Iterable[PoolId]) -> None:
        """Discard what was derived from the state of ``pools`` after another action changed it."""
        for pool in pools:
            self._planners[pool].invalidate()

    def earliest_eviction_s(self, pool: PoolId, gang: Gang, budget_steps: int) -> tuple[float | None, int]:
        """Return when the end of a protection lets evictions place ``gang``, or None; and the steps used."""
        planner = self._planners[pool]
        before = planner.steps_used
        return planner.earliest_eviction_s(gang, budget_steps), planner.steps_used - before

    def run(self, action: str) -> bool:
        """Evict running jobs for entitled pending jobs; return True if any job was placed."""
        changed = False
        self._session.index_ready()
        for pool, pool_state in self._session.pool_states.items():
            planner, reason = self._planners[pool], EVICTION_REASONS[action]
            cannot_help, infeasible = (
                partial(planner.cannot_help, reason),
                planner.candidates.infeasible[reason],
            )
            mine: list[Gang] = []
            for owner, claims in self._session.ready_classes[pool].items():
                if not planner.any_may_evict(*owner, claims.min_demand, reason):
                    continue
                for group in claims.groups:
                    if group[0].quota_class_id in infeasible:
                        continue
                    first = first_placeable(group)
                    if first is not None and not cannot_help(first):
                        mine += [
                            gang
                            for gang in group
                            if gang.next_tasks
                            and not self._session.is_elsewhere(gang, pool)
                            and self._may_preempt(gang)
                        ]
            queue = JobQueue(pool_state, mine, cannot_help)
            while (gang := queue.pop()) is not None:
                milli = gang.next_demand.gpu_milli
                eviction_set = self._find_victims(planner, action, gang)
                if eviction_set is None:
                    continue
                changed = True
                self._order(eviction_set, gang, reason)
                self._session.nominated_jobs.add(gang.job)
                self._session.placed(gang, pool)
                queue.started(gang, milli)
                for leaf in {task.gang.leaf_project for task in eviction_set.evicted}:
                    queue.update_project(leaf)
        return changed

    def _order(self, eviction_set: EvictionSet, preemptor: Gang, reason: EvictionReason) -> None:
        """Record the evictions of tasks that run; those for a job that lost its nomination are for its successor."""
        displaced = {task.gang.job for task in eviction_set.evicted if not task.held}
        for task, ordered in list(self._session.evictions.items()) if displaced else ():
            if ordered.for_job in displaced and not self._session.gangs[ordered.for_job].is_placed:
                self._session.evictions[task] = replace(ordered, for_job=preemptor.job)
        for task in (*eviction_set.evicted, *eviction_set.migrated):
            if task.held:
                right = EvictionReason.MIGRATED if task.state is GangTaskState.NOMINATED else reason
                self._session.evictions[task] = OrderedEviction(task, right, preemptor.job)

    def settle_victims(self) -> bool:
        """Place evicted jobs again where the next decision would; return True if any was placed.

        They take what is left, or the places of jobs that they may evict themselves.
        """
        settled = False
        for pool_state in self._session.pool_states.values():
            if pool_state.policy.semantics.reschedules_victims:
                continue
            full: set[TaskShape] = set()
            victims = group_by_gang(self._releasing_tasks(pool_state))
            for victim, tasks in sorted(victims, key=lambda each: (-each[0].priority, each[0].job)):
                if self._session.steps_used >= self._session.policy.max_steps_per_cycle:
                    break
                wanted = victim.root.next_to_place(set(tasks).__contains__)
                if wanted and self._settle(pool_state, victim, wanted, full):
                    settled = True
                    full.clear()
        return settled

    def _settle(
        self, pool_state: PoolState, victim: Gang, wanted: Sequence[GangTask], full: set[TaskShape]
    ) -> bool:
        """Nominate slots for evicted tasks; ``full`` are shapes that do not fit."""
        planner, session = self._planners[pool_state.pool.id], self._session
        shape = wanted[0].shape
        if shape not in full and pool_state.idle_and_releasing.fit_count(shape) == 0:
            full.add(shape)
        if (
            shape not in full
            and not pool_state.is_quota_blocked(victim, total_demand(wanted), AssumeReleased.EVICTED)
            and GangPlacer(Statement(pool_state), nominate=True).place(victim, wanted)
        ):
            session.steps_used += 1
            planner.invalidate()
            return True
        first = session.evictions[wanted[0]]
        for action, search in (("reclaim", planner.reclaim), ("preempt", planner.preempt)):
            if action not in pool_state.policy.semantics.actions or not planner.may_evict_for(
                victim, wanted, EVICTION_REASONS[action]
            ):
                continue
            before = planner.steps_used
            left = session.policy.max_steps_per_cycle - session.steps_used
            eviction_set = search(victim, before + left, wanted)
            session.steps_used += planner.steps_used - before
            if eviction_set is not None:
                self._order(eviction_set, session.gangs[first.for_job], EVICTION_REASONS[action])
                planner.invalidate()
                return True
        return False

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
            if self._planners[pool_state.pool.id].future_free_milli() < total_demand(gone).gpu_milli:
                continue  # everything the victim holds is nominated already
            statement = Statement(pool_state)
            for task in kept:
                statement.evict(task)
            for task in gone:
                statement.restore(task)
            planner, reason = self._planners[pool_state.pool.id], ordered.reason
            if self._fits_beside_victim(pool_state, statement, preemptor, kept, gone, reason):
                planner.invalidate()
                if planner.evicts_nobody_again(self._releasing_tasks(pool_state)):
                    for task in gone:
                        del self._session.evictions[task]
                    spared = True
                    continue
                planner.invalidate()
            statement.rollback()
        return spared

    def _releasing_tasks(self, pool_state: PoolState) -> list[GangTask]:
        """Return the tasks of a pool that this plan evicts for good."""
        return [
            task
            for task in self._session.evictions
            if task.state is GangTaskState.RELEASING and pool_state.gangs.get(task.gang.job) is task.gang
        ]

    def _most_lost_first(self, eviction: OrderedEviction) -> tuple[float, JobId]:
        gang = eviction.task.gang
        pool_state = self._session.pool_states[self._session.pool_of[eviction.for_job]]
        return (-self._planners[pool_state.pool.id].candidates.lost_gpu_seconds(gang), gang.job)

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
        if pool_state.is_quota_blocked(preemptor, total_demand(nominated), AssumeReleased.EVICTED):
            return False
        placed = GangPlacer(statement, nominate=True).place(preemptor, nominated)
        return placed and not pool_state.is_over_limit(preemptor, victim)

    def _may_preempt(self, gang: Gang) -> bool:
        """Return False during the job's preemption delay, or if only a backfill reservation blocks it."""
        pool_state = self._session.pool_states[gang.feasible_pools[0]]
        reserving = self._session.backfill_reservations.get(pool_state.pool.id)
        if reserving and gang.pending_row and reserving.first_blocking(gang):
            return not pool_state.gang_fits_now(gang)
        return self._session.snapshot.now_s >= preemption_allowed_from_s(gang, pool_state.policy)

    def _find_victims(self, planner: PreemptionPlanner, action: str, gang: Gang) -> EvictionSet | None:
        """Return the victims of ``action`` for ``gang``, found within the remaining step budget."""
        before = planner.steps_used
        budget = before + self._session.policy.max_steps_per_cycle - self._session.steps_used
        searches = {
            "consolidate": planner.consolidate,
            "reclaim": planner.reclaim,
            "preempt": planner.preempt,
        }
        eviction_set = searches[action](gang, budget)
        self._session.steps_used += planner.steps_used - before
        return eviction_set

    def evict_stale_gangs(self) -> None:
        """Evict gangs that have had too few live tasks for too long; they return to the queue."""
        for pool_state in self._session.pool_states.values():
            statement = Statement(pool_state)
            for job, gang in sorted(pool_state.gangs.items()):
                if not _is_stale(gang, self._session.snapshot.now_s, self._session.policy):
                    continue
                for task in gang.tasks:
                    if task.state is GangTaskState.RUNNING:
                        statement.evict(task)
                        eviction = OrderedEviction(task, EvictionReason.GANG_INCOMPLETE, job)
                        self._session.evictions[task] = eviction


def _is_stale(gang: Gang, now_s: float, policy: Policy) -> bool:
    """Return True for a gang to evict whole; the tasks that this plan starts may complete it again."""
    row = gang.running_row
    if row is None or row.stale_since_s is None or row.stopping or gang.root.is_satisfied:
        return False
    grace_s = policy.stale_gang_grace_s if row.stale_gang_grace_s is None else row.stale_gang_grace_s
    return 0 <= grace_s <= now_s - row.stale_since_s
