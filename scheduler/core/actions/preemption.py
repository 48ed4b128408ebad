"""Making room: which running jobs leave for a waiting one, tried on paper and undone when it does not help.

*Consolidate* moves others so that the job fits; everyone who moves has a new place in the same plan.
*Reclaim* takes from other projects, within the rules of ``entitlement``. *Preempt* takes from the same project,
at strictly lower priority, and does not carry the project further beyond its share.

Those who may leave are handed out by ``LeavingQueue``, one step after the other, until the job fits; then each
of them is called back if it is not needed, last first, or given a place elsewhere if there is one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set

from scheduler.core.actions.victim_search import EvictionSet, SearchRequest, VictimSearch
from scheduler.core.actions.victims import VictimCandidates
from scheduler.core.capacity.topology_domains import TopologyDomains
from scheduler.core.model.plan import EvictionReason
from scheduler.core.model.policy import Policy
from scheduler.core.model.resources import ResourceVector
from scheduler.core.model.snapshot import JobId, ProjectId
from scheduler.core.session.gang import Gang, GangTask, total_demand
from scheduler.core.session.pool import PoolState
from scheduler.core.shares.ledger import AssumeReleased
from scheduler.core.shares.reclaim_rules import ReclaimCheck, ReclaimScope, is_within_guarantee, may_reclaim


class PreemptionPlanner:
    """The three ways to make room in one pool, and the rules of each."""

    def __init__(
        self,
        pool_state: PoolState,
        domains: TopologyDomains,
        policy: Policy,
        now_s: float,
        *,
        simulate_at_s: float | None = None,
    ) -> None:
        """``on_paper_at_s``: nothing is changed, and jobs protected until then may be asked; see ``opening_s``."""
        self._pool_state = pool_state
        self._domains = domains
        self._policy = policy
        self._now_s = now_s
        self._dry_run = simulate_at_s is not None
        self._reclaim_scope = ReclaimScope(policy.involved_only, policy.every_level)
        self._candidates = VictimCandidates(pool_state, policy, now_s, simulate_at_s)
        self._search = VictimSearch(pool_state, domains, policy, self._candidates)
        self._future_free: tuple[int, int] | None = None
        self._reclaim_allowed: dict[
            tuple[ProjectId, ResourceVector, bool], bool
        ] = {}  # who may, as the pool_state stood at
        self._reclaim_allowed_version = -1
        self._dry_run_steps = 0
        self._dry_run_planners: dict[
            float, PreemptionPlanner
        ] = {}  # by moment, while nothing changes any more

    @property
    def steps_used(self) -> int:
        """Victim sets tried."""
        return self._search.steps_used + self._dry_run_steps

    @property
    def truncated(self) -> bool:
        """True when a search ended because the budget did."""
        return self._search.truncated

    def invalidate(self) -> None:
        """The pool_state changed otherwise: candidates and what was hopeless are looked at anew."""
        self._candidates.invalidate()
        self._search.invalidate()
        self._dry_run_planners.clear()

    def infeasible(self, reason: EvictionReason) -> Set[int]:
        """The questions of jobs that found no room since the pool_state changed for the better; kept up to date."""
        return self._candidates.infeasible(reason)

    def mark_infeasible(self, gang: Gang, reason: EvictionReason) -> None:
        """Nobody alike needs to ask until ``forget``."""
        self._candidates.mark_infeasible(gang, reason)

    def lost_gpu_seconds(self, gang: Gang) -> float:
        """What a gang would lose if it left, in GPU-seconds."""
        return self._candidates.lost_gpu_seconds(gang)

    def preempt(self, gang: Gang, budget_steps: int) -> EvictionSet | None:
        """Room inside the project."""
        lower = self._candidates.in_project(gang.leaf_project, "preempt", gang.priority)
        asked = gang.next_demand
        if not gang.preemptible and self._pool_state.ledger.exceeded_guarantee(
            gang.leaf_project, asked, assume_released=AssumeReleased.ALL
        ):
            return None
        most = self._max_held(gang, asked) if self._policy.bounded_preemption else None

        def allowed(gone: Sequence[GangTask]) -> bool:
            held, path = self._pool_state.ledger.held, self._pool_state.tree.path[gang.leaf_project]
            return most is None or all(held[level].fits_in(most[level]) for level in path)

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
        """What each project above ``gang`` may hold afterwards: its share, or what it holds already.

        Otherwise others could reclaim what it gained, and its own lower jobs what they lost, for ever.
        """
        ledger = self._pool_state.ledger
        return {
            level: ResourceVector(*map(max, ledger.entitlements[level].fair_share, ledger.held[level]))
            for level in self._pool_state.tree.path[gang.leaf_project]
        }

    def reclaim(self, gang: Gang, budget_steps: int) -> EvictionSet | None:
        """Room from other projects."""
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
        """The moments at which somebody who may be asked to leave ceases to be protected, ascending."""
        return self._candidates.protection_ends_s()

    def earliest_eviction_s(self, gang: Gang, moments: Sequence[float], budget_steps: int) -> float | None:
        """The first of ``moments`` from which others could be asked to make room for ``gang``; None if there is none.

        Found by asking again as if it were then, half of the moments left out each time.
        """
        low, high = 0, len(moments)
        found: float | None = None
        while low < high and self.steps_used < budget_steps:
            # the last moment first: is it that at all?
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
        before, actions = then.steps_used, self._policy.actions
        room = then.reclaim(gang, before + budget_steps) if "reclaim" in actions else None
        if room is None and "preempt" in actions:
            room = then.preempt(gang, before + budget_steps)
        self._dry_run_steps += 1 + then.steps_used - before
        return room is not None

    def any_may_evict(
        self,
        leaf: ProjectId,
        priority: int,
        preemptible: bool,
        min_demand: ResourceVector,
        reason: EvictionReason,
    ) -> bool:
        """False when ``may_ask`` is for no gang of this project and priority that asks at least so much."""
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
        """A quick look whether the rules let a gang ask anybody at all."""
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
        """True when only leaving jobs of the same person would help: others' cannot bring it within its quota."""
        ledger = self._pool_state.ledger
        return bool(
            ledger.exceeded_user_limit(
                gang.leaf_project, gang.user, gang.next_demand, assume_released=AssumeReleased.EVICTED
            )
        )

    def future_free_milli(self) -> int:
        """Thousandths of GPUs that nobody holds or keeps once everybody leaving has left."""
        if self._future_free is None or self._future_free[0] != self._pool_state.version:
            self._future_free = (
                self._pool_state.version,
                int(self._pool_state.idle_and_releasing.free_milli.clip(min=0).sum()),
            )
        return self._future_free[1]

    def may_reclaim(self, gang: Gang) -> bool:
        """True when the job's project may ask others at all: with it, it stays within its share."""
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
            self._reclaim_scope,
        )

    def consolidate(self, gang: Gang, budget_steps: int) -> EvictionSet | None:
        """Room by moving others; everybody who moves has a place."""
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
    """Tasks by their gang, in the order in which they left."""
    found: dict[JobId, tuple[Gang, list[GangTask]]] = {}
    for task in tasks:
        found.setdefault(task.gang.job, (task.gang, []))[1].append(task)
    return list(found.values())


def _pieces(gang: Gang, tasks: Sequence[GangTask]) -> list[ResourceVector]:
    """What leaves of one gang as it counts for the rules: each task beyond the minimum, then the rest at once."""
    beyond = max(0, len(tasks) - gang.root.required_members) if not gang.root.children else 0
    pieces = [task.amounts for task in tasks[:beyond]]
    rest = tasks[beyond:]
    return [*pieces, total_demand(rest)] if rest else pieces
