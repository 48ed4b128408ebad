"""Decide one scheduling cycle: a pure function from a snapshot to a plan. Start reading here.

Steps:

1. Validate the snapshot and exclude jobs that cannot start whatever is free.
2. Divide each pool among the projects that hold or request GPUs (fair share).
3. Restore the nominations of earlier plans.
4. Run the actions, least disruptive first: allocate free GPUs in fair order, consolidate (move jobs), reclaim
   from other projects, preempt within the project, evict stale gangs.
5. Explain with numbers why each other job did not start.

There is no clock, no randomness and no database: equal snapshots give equal plans in any order of rows, and
the work is bounded by counted steps.
"""

from __future__ import annotations

from dataclasses import replace
from operator import attrgetter

from portal.domain.jobs.reasons import VerdictCode
from scheduler.core.actions.allocate import AllocateAction
from scheduler.core.actions.preemption import EVICTION_REASONS, EvictAction
from scheduler.core.actions.scheduling_session import OrderedEviction, SchedulingSession
from scheduler.core.model.plan import (
    Alternative,
    AlternativeKind,
    Eviction,
    EvictionReason,
    JobPlacement,
    Plan,
    RequestPreview,
    TaskPlacement,
    Verdict,
)
from scheduler.core.model.policy import Policy
from scheduler.core.model.snapshot import GpuShare, HeldSlots, JobId, PendingRow, Snapshot
from scheduler.core.session.cache import DecisionCache
from scheduler.core.session.gang import GangTaskState
from scheduler.core.session.pool import PoolState
from scheduler.core.verdicts.explain import Explainer
from scheduler.core.verdicts.report import VerdictReport

MAX_ROUNDS = 100
"""Bound on rounds of eviction. More than a few are rare; a job that misses one waits for the next cycle."""


def decide(
    snapshot: Snapshot, policy: Policy, cache: DecisionCache | None = None, *, explain: bool = True
) -> Plan:
    """Return the plan for ``snapshot``: each pending job is in its starts or in its verdicts, exactly once.

    ``cache``, reused from decision to decision, saves work for rows that are the same objects as before; it
    does not affect the plan. With ``explain=False`` the plan has no verdicts and is the same otherwise. Raise
    ``SnapshotError`` with the name of the field if the snapshot is inconsistent.
    """
    return _Decision(snapshot, policy, cache).plan(explain=explain)


def decide_deferring_verdicts(
    snapshot: Snapshot, policy: Policy, cache: DecisionCache
) -> tuple[Plan, VerdictReport]:
    """Return the plan without verdicts, and a report that is valid until the next use of ``cache``."""
    decision = _Decision(snapshot, policy, cache)
    plan = decision.plan(explain=False)
    return plan, decision.report(plan.evictions)


def preview_request(
    snapshot: Snapshot, policy: Policy, request: PendingRow, cache: DecisionCache | None = None
) -> RequestPreview:
    """Return what would happen to ``request`` if it joined the queue of ``snapshot`` now."""
    others = tuple(row for row in snapshot.pending if row.job != request.job)
    decision = _Decision(replace(snapshot, pending=(*others, request)), policy, cache)
    plan = decision.plan()
    start = next((start for start in plan.starts if start.job == request.job), None)
    verdict = next((verdict for verdict in plan.verdicts if verdict.job == request.job), None)
    waits_anyway = verdict is not None and verdict.code in (VerdictCode.DEPENDENCY, VerdictCode.BEGIN_TIME)
    alternatives = (
        ()
        if start or waits_anyway
        else decision.explainer.alternative_search.alternatives(decision.row(request.job))
    )
    if verdict is not None and verdict.code is VerdictCode.RESERVED_FOR_OTHER_JOB:
        alternatives = _alternatives_of_reserved(verdict, alternatives)
    evictions = tuple(eviction for eviction in plan.evictions if eviction.for_job == request.job)
    return RequestPreview(start is not None, start, verdict, alternatives, evictions, plan)


def _alternatives_of_reserved(
    verdict: Verdict, alternatives: tuple[Alternative, ...]
) -> tuple[Alternative, ...]:
    """Return the shorter limit first."""
    change = verdict.suggestion
    is_limit = change is not None and change.kind is AlternativeKind.SHORTER_LIMIT
    return (change, *alternatives) if change is not None and is_limit else alternatives


class _Decision:
    """One decision: the order of its steps."""

    def __init__(self, snapshot: Snapshot, policy: Policy, cache: DecisionCache | None = None) -> None:
        self._session = session = SchedulingSession(
            snapshot, policy, DecisionCache() if cache is None else cache
        )
        self.explainer = Explainer(
            session.snapshot,
            policy,
            session.pool_states,
            session.backfill_reservations,
            session.cache.variants,
        )
        self._allocate_action = AllocateAction(self._session)
        self._evict_action = EvictAction(self._session)

    def row(self, job: JobId) -> PendingRow:
        """Return the row of a pending job, restricted by admin reservations."""
        return next(row for row in self._session.pending if row.job == job)

    def plan(self, *, explain: bool = True) -> Plan:
        """Run the steps and return the plan, with verdicts if ``explain`` is set."""
        self._session.classify_jobs(self.explainer.feasible_pools)
        self._session.compute_shares()
        self._allocate_action.restore_nominations()
        self._run_actions()
        if "stale_gangs" in self._session.policy.semantics.actions:
            self._evict_action.evict_stale_gangs()
        evictions = self._evictions()
        # as of after the plan, as verdicts are: both say what a project holds
        breakdowns = tuple(
            breakdown
            for pool_state in self._session.pool_states.values()
            for breakdown in pool_state.share_breakdowns()
        )
        verdicts = self.report(evictions).all() if explain else []
        return Plan(
            starts=self._placements(GangTaskState.ALLOCATED),
            evictions=evictions,
            verdicts=tuple(sorted(verdicts, key=attrgetter("job"))),
            share_breakdowns=breakdowns,
            steps_used=self._session.steps_used + self.explainer.alternative_search.steps_used,
            truncated=bool(self._session.unprocessed) or self._evict_action.truncated,
            explained=explain,
            nominations=self._placements(GangTaskState.NOMINATED),
        )

    def report(self, evictions: tuple[Eviction, ...]) -> VerdictReport:
        """Return the report that explains pending jobs; call it after the actions have run."""
        return VerdictReport(self._session, self.explainer, evictions, self._evict_action.earliest_eviction_s)

    def _run_actions(self) -> None:
        """Allocate, then run the eviction actions; repeat while they place jobs."""
        allocate = "allocate" in self._session.policy.semantics.actions
        self._allocate_action.start_nominated()
        if allocate:
            self._allocate_action.reserve()
            self._evict_action.invalidate(self._allocate_action.allocate())
        actions = [action for action in EVICTION_REASONS if action in self._session.policy.semantics.actions]
        left = actions
        for _ in range(MAX_ROUNDS):
            successful = [action for action in left if self._evict_action.run(action)]
            spared = self._evict_action.reprieve_victims()
            if not (successful or spared or left != actions):
                if not self._evict_action.settle_victims():
                    break
                spared = True
            # an action that places a job opens GPUs for more of its kind: repeat it before the others
            left = successful if successful and not spared else actions
            if successful or spared:
                self._allocate_action.start_nominated()
                if allocate:
                    self._evict_action.invalidate(self._allocate_action.allocate())

    def _placements(self, state: GangTaskState) -> tuple[JobPlacement, ...]:
        """Return the gangs with tasks in ``state``, and the placements of these tasks."""
        found = []
        for pool, pool_state in self._session.pool_states.items():
            for job, gang in pool_state.gangs.items():
                if not gang.dirty:
                    continue
                tasks = sorted((t for t in gang.tasks if t.state is state), key=lambda t: t.rank)
                if tasks:
                    version = gang.pending_row.version if gang.pending_row else 0
                    places = ((t.rank, t.nominated or t.held[0]) for t in tasks)
                    placed = tuple(_task_placement(pool_state, rank, place) for rank, place in places)
                    found.append(JobPlacement(job, pool, version, placed))
        return tuple(sorted(found, key=lambda start: start.job))

    def _evictions(self) -> tuple[Eviction, ...]:
        """Return the evictions by job; a job that loses only some of its tasks lists their ranks."""
        by_job: dict[JobId, list[OrderedEviction]] = {}
        for each in self._session.evictions.values():
            if each.task.state in (GangTaskState.RELEASING, GangTaskState.NOMINATED):
                by_job.setdefault(each.task.gang.job, []).append(each)
        found = []
        for job in sorted(by_job):
            mine = sorted(by_job[job], key=lambda each: each.task.rank)
            stays = any(
                task.state in (GangTaskState.RUNNING, GangTaskState.ALLOCATED)
                for task in mine[0].task.gang.tasks
            )
            ranks = tuple(each.task.rank for each in mine) if stays else ()
            worst = next((e for e in mine if e.task.state is GangTaskState.RELEASING), mine[0])
            found.append(Eviction(job, self._reason(worst), worst.for_job, ranks))
        return tuple(found)

    def _reason(self, ordered: OrderedEviction) -> EvictionReason:
        """Return why a job is evicted in the end: victims may have been placed again since."""
        victim, preemptor = ordered.task.gang, self._session.gangs.get(ordered.for_job)
        if ordered.reason is EvictionReason.GANG_INCOMPLETE or preemptor is None:
            return ordered.reason
        if ordered.task.state is GangTaskState.NOMINATED:
            return EvictionReason.MIGRATED
        same = victim.leaf_project == preemptor.leaf_project
        return EvictionReason.PREEMPTED if same else EvictionReason.RECLAIMED


def _task_placement(pool_state: PoolState, rank: int, held: HeldSlots) -> TaskPlacement:
    gpus = pool_state.available.gpus[held.node]
    return TaskPlacement(
        rank,
        pool_state.available.nodes[held.node].id,
        tuple(GpuShare(gpus[slot].uuid, held.milli) for slot in held.slots),
    )
