"""The rules of each eviction action: which running jobs may be evicted for a pending one.

*Consolidate* migrates jobs so that another fits; every migrated job has a new placement in the same plan.
*Reclaim* evicts jobs of other projects within the rules of ``shares.reclaim_rules``. *Preempt* evicts jobs of
strictly lower priority in the same project and takes the project no further beyond its fair share.

``VictimQueue`` gives the candidates one step at a time until the job fits. Then each victim, last first, is
restored if it is not needed, or migrated if another placement exists.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass

from scheduler.core.actions.victim_search import EvictionSet, SearchRequest, VictimSearch
from scheduler.core.actions.victims import VictimCandidates
from scheduler.core.model.plan import EvictionReason
from scheduler.core.model.policy import Policy
from scheduler.core.model.resources import ResourceVector
from scheduler.core.model.snapshot import JobId, ProjectId
from scheduler.core.session.gang import Gang, GangTask, total_demand
from scheduler.core.session.pool import PoolState
from scheduler.core.session.topology_domains import TopologyDomains
from scheduler.core.shares.ledger import AssumeReleased
from scheduler.core.shares.reclaim_rules import ReclaimCheck, is_within_guarantee, may_reclaim


@dataclass(frozen=True, slots=True)
class OrderedEviction:
    """The eviction of one task, its reason, and the job it frees resources for."""

    task: GangTask
    reason: EvictionReason
    for_job: JobId


def preemption_allowed_from_s(gang: Gang, policy: Policy) -> float:
    """Return the earliest time at which ``gang`` may evict others: after its own delay, else the pool's."""
    own_s = gang.pending_row.preemption_delay_s if gang.pending_row else None
    return gang.submitted_s + (policy.preemption_delay_s if own_s is None else own_s)


class PreemptionPlanner:
    """Plans the evictions of one pool."""

    def __init__(
        self,
        pool_state: PoolState,
        domains: TopologyDomains,
        policy: Policy,
        now_s: float,
        *,
        simulate_at_s: float | None = None,
    ) -> None:
        """With ``simulate_at_s`` change nothing, and treat jobs protected until that time as evictable."""
        self._pool_state = pool_state
        self._domains = domains
        self._policy = policy
        self._now_s = now_s
        self._dry_run = simulate_at_s is not None
        self._candidates = VictimCandidates(pool_state, policy, now_s, simulate_at_s)
        self._search = VictimSearch(pool_state, domains, policy, self._candidates)
        self._future_free: tuple[int, int] | None = None
        self._reclaim_allowed: dict[
            tuple[ProjectId, ResourceVector, bool], bool
        ] = {}  # valid for one version of the pool state
        self._reclaim_allowed_version = -1
        self._dry_run_steps = 0
        self._dry_run_planners: dict[
            float, PreemptionPlanner
        ] = {}  # by simulated time, valid until the pool state changes

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
        self._candidates.invalidate()
        self._search.invalidate()
        self._dry_run_planners.clear()

    def infeasible(self, reason: EvictionReason) -> Set[int]:
        """Return the live set of quota classes without victims since the last ``invalidate``."""
        return self._candidates.infeasible(reason)

    def mark_infeasible(self, gang: Gang, reason: EvictionReason) -> None:
        """Skip gangs of this quota class until the next ``invalidate``."""
        self._candidates.mark_infeasible(gang, reason)

    def lost_gpu_seconds(self, gang: Gang) -> float:
        """Return the GPU-seconds of work that evicting ``gang`` would lose."""
        return self._candidates.lost_gpu_seconds(gang)

    def preempt(self, gang: Gang, budget_steps: int) -> EvictionSet | None:
        """Find victims of lower priority in the gang's project."""
        lower = self._candidates.in_project(gang.leaf_project, "preempt", gang.priority)
        asked = gang.next_demand
        if not gang.preemptible and self._pool_state.ledger.exceeded_guarantee(
            gang.leaf_project, asked, assume_released=AssumeReleased.ALL
        ):
            return None
        most = self._max_held(gang, asked)

        def allowed(gone: Sequence[GangTask]) -> bool:
            held, path = self._pool_state.ledger.held, self._pool_state.tree.path[gang.leaf_project]
            return all(held[level].fits_in(most[level]) for level in path)

        return self._search.find(
            SearchRequest(
                gang,
                {gang.leaf_project: lower},
                EvictionReason.PREEMPTED,
                allowed,
                budget_steps,
                self._dry_run,
            )
        )

    def _max_held(self, gang: Gang, asked: ResourceVector) -> dict[ProjectId, ResourceVector]:
        """Return the most each project on the gang's path may hold afterwards: fair share, or current use.

        Otherwise other projects could reclaim the gain, and the evicted jobs preempt again, endlessly.
        """
        ledger = self._pool_state.ledger
        return {
            level: ResourceVector(*map(max, ledger.entitlements[level].fair_share, ledger.held[level]))
            for level in self._pool_state.tree.path[gang.leaf_project]
        }

    def reclaim(self, gang: Gang, budget_steps: int) -> EvictionSet | None:
        """Find victims in other projects."""
        ledger, leaf = self._pool_state.ledger, gang.leaf_project
        asked = gang.next_demand
        reclaim_check = self._reclaim_check(gang, asked)
        if not self.may_reclaim(gang):
            return None
        kind = (
            "guaranteed"
            if is_within_guarantee(ledger.entitlements[leaf], ledger.held[leaf], asked)
            else "reclaim"
        )
        victims_by_project = {
            each: mine
            for each in sorted(self._candidates.by_project())
            if each != leaf
            and reclaim_check.may_have_reclaimable(each)
            and (mine := self._candidates.in_project(each, kind))
        }
        before_held, before_firm = dict(ledger.held), dict(ledger.held_non_preemptible)

        def allowed(gone: Sequence[GangTask]) -> bool:
            reclaim_check = self._reclaim_check(gang, asked, before_held, before_firm)
            for victim, tasks in _by_gang(gone):
                for amounts in _pieces(victim, tasks):
                    if not reclaim_check.allows(victim.leaf_project):
                        return False
                    reclaim_check.add_victim(victim.leaf_project, amounts)
            return reclaim_check.is_balanced()

        return self._search.find(
            SearchRequest(
                gang, victims_by_project, EvictionReason.RECLAIMED, allowed, budget_steps, self._dry_run, kind
            )
        )

    def protection_ends_s(self) -> list[float]:
        """Return the times at which protections of candidates end, ascending."""
        return self._candidates.protection_ends_s()

    def earliest_eviction_s(self, gang: Gang, moments: Sequence[float], budget_steps: int) -> float | None:
        """Return the first of ``moments`` from which evictions could place ``gang``, or None.

        ``moments`` is ascending; a binary search simulates the evictions at each probed time.
        """
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
                self._pool_state, self._domains, self._policy, self._now_s, simulate_at_s=at_s
            )
        before, actions = then.steps_used, self._policy.semantics.actions
        eviction_set = then.reclaim(gang, before + budget_steps) if "reclaim" in actions else None
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
            ledger = self._pool_state.ledger
            return may_reclaim(
                ledger.entitlements[leaf],
                ledger.held[leaf],
                ledger.held_non_preemptible[leaf],
                min_demand,
                preemptible,
            )
        if reason is EvictionReason.PREEMPTED:
            return self._candidates.any_below_priority(leaf, priority)
        return preemptible and min_demand.gpu_milli <= self.future_free_milli()

    def may_evict(self, gang: Gang, reason: EvictionReason) -> bool:
        """Return False if the rules certainly forbid all evictions for ``gang``."""
        lower: Sequence[Gang] = ()
        if reason is EvictionReason.RECLAIMED:
            may = self.may_reclaim(gang)
        elif reason is EvictionReason.PREEMPTED:
            lower = self._candidates.in_project(gang.leaf_project, "preempt", gang.priority)
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
            ledger.exceeded_user_limit(
                gang.leaf_project, gang.user, gang.next_demand, assume_released=AssumeReleased.EVICTED
            )
        )

    def future_free_milli(self) -> int:
        """Return the milli that are neither held nor nominated once all releasing jobs are gone."""
        if self._future_free is None or self._future_free[0] != self._pool_state.version:
            self._future_free = (
                self._pool_state.version,
                int(self._pool_state.idle_and_releasing.free_milli.clip(min=0).sum()),
            )
        return self._future_free[1]

    def may_reclaim(self, gang: Gang) -> bool:
        """Return True if the gang's project may reclaim: with the gang it stays within its fair share."""
        if self._reclaim_allowed_version != self._pool_state.version:
            self._reclaim_allowed_version = self._pool_state.version
            self._reclaim_allowed.clear()
        leaf, asked = gang.leaf_project, gang.next_demand
        known = self._reclaim_allowed.get((leaf, asked, gang.preemptible))
        if known is None:
            ledger = self._pool_state.ledger
            known = self._reclaim_allowed[leaf, asked, gang.preemptible] = may_reclaim(
                ledger.entitlements[leaf],
                ledger.held[leaf],
                ledger.held_non_preemptible[leaf],
                asked,
                gang.preemptible,
            )
        return known

    def _reclaim_check(
        self,
        gang: Gang,
        asked: ResourceVector,
        held: dict[ProjectId, ResourceVector] | None = None,
        held_non_preemptible: dict[ProjectId, ResourceVector] | None = None,
    ) -> ReclaimCheck[ProjectId]:
        ledger = self._pool_state.ledger
        return ReclaimCheck(
            self._pool_state.tree.path,
            ledger.entitlements,
            held or ledger.held,
            held_non_preemptible or ledger.held_non_preemptible,
            gang.leaf_project,
            asked,
            gang.preemptible,
        )

    def consolidate(self, gang: Gang, budget_steps: int) -> EvictionSet | None:
        """Find jobs to migrate so that ``gang`` fits; every one of them has a new placement."""
        if not self.may_evict(gang, EvictionReason.MIGRATED):
            return None
        movers = {
            leaf: [each for each in self._candidates.in_project(leaf, "move") if each is not gang]
            for leaf in sorted(self._candidates.by_project())
        }

        def allowed(gone: Sequence[GangTask]) -> bool:
            return not gone

        return self._search.find(SearchRequest(gang, movers, EvictionReason.MIGRATED, allowed, budget_steps))


def _by_gang(tasks: Iterable[GangTask]) -> list[tuple[Gang, list[GangTask]]]:
    """Group tasks by gang, in order of eviction."""
    found: dict[JobId, tuple[Gang, list[GangTask]]] = {}
    for task in tasks:
        found.setdefault(task.gang.job, (task.gang, []))[1].append(task)
    return list(found.values())


def _pieces(gang: Gang, tasks: Sequence[GangTask]) -> list[ResourceVector]:
    """Return the demands that the reclaim rules check: each task beyond the minimum, then the rest as one."""
    beyond = max(0, len(tasks) - gang.root.required_members) if not gang.root.children else 0
    pieces = [task.amounts for task in tasks[:beyond]]
    rest = tasks[beyond:]
    return [*pieces, total_demand(rest)] if rest else pieces
