"""The decision: one snapshot in, one plan out. Start reading here.

A plan is made in steps: check the snapshot; set aside what cannot start whatever is free; divide each
pool among the projects that hold or ask for GPUs; honour the places that earlier plans keep; then the actions,
least disruptive first: hand out free places in fair order, move others together, take back from other projects,
preempt in the own one, end gangs that lost too many tasks; then say of every job that did not start why, with
numbers. No clock, no random, no database: the same snapshot gives the same plan, whatever order its rows
came in, and work is bounded by counted steps.
"""

from __future__ import annotations

from dataclasses import replace
from operator import attrgetter

from portal.domain.reasons import VerdictCode
from scheduler.core.actions.allocate import AllocateAction
from scheduler.core.actions.evict import EVICTION_REASONS, EvictAction
from scheduler.core.actions.session import OrderedEviction, SchedulingSession
from scheduler.core.model.plan import Eviction, JobPlacement, Plan, RequestPreview
from scheduler.core.model.policy import Policy
from scheduler.core.model.snapshot import JobId, PendingRow, PoolId, Snapshot
from scheduler.core.session.cache import DecisionCache
from scheduler.core.session.gang import GangTaskState
from scheduler.core.session.pool import PoolState
from scheduler.core.verdicts.explain import Explainer
from scheduler.core.verdicts.report import VerdictReport

MAX_ROUNDS = 100
"""A round seats somebody by asking others to leave; more than a few are rare, and none is lost by waiting."""


def decide(
    snapshot: Snapshot, policy: Policy, cache: DecisionCache | None = None, *, explain: bool = True
) -> Plan:
    """The plan for ``snapshot``: each pending job stands in its starts or in its verdicts, once.

    ``memory``, the same from decision to decision, spares work where rows are the same objects as before; the plan
    does not depend on it. Without ``tells`` it says nothing of those that wait, and is the same otherwise. Raises
    ``SnapshotError`` naming the field when the snapshot cannot be true.
    """
    return _Decision(snapshot, policy, cache).plan(explain=explain)


def decide_deferring_verdicts(
    snapshot: Snapshot, policy: Policy, cache: DecisionCache
) -> tuple[Plan, VerdictReport]:
    """The plan without verdicts, and who can say why jobs wait until ``memory`` serves another decision."""
    decision = _Decision(snapshot, policy, cache)
    plan = decision.plan(explain=False)
    return plan, decision.report(plan.evictions)


def preview_request(snapshot: Snapshot, policy: Policy, request: PendingRow) -> RequestPreview:
    """What would happen to ``request`` if it joined the queue of ``snapshot`` now."""
    others = tuple(row for row in snapshot.pending if row.job != request.job)
    decision = _Decision(replace(snapshot, pending=(*others, request)), policy)
    plan = decision.plan()
    start = next((start for start in plan.starts if start.job == request.job), None)
    verdict = next((verdict for verdict in plan.verdicts if verdict.job == request.job), None)
    waits_for_others = verdict is not None and verdict.code is VerdictCode.DEPENDENCY
    alternatives = (
        ()
        if start or waits_for_others
        else decision.explainer.alternative_search.alternatives(decision.row(request.job))
    )
    evictions = tuple(eviction for eviction in plan.evictions if eviction.for_job == request.job)
    return RequestPreview(start is not None, start, verdict, alternatives, evictions)


class _Decision:
    """One decision: the order in which its steps are taken."""

    def __init__(self, snapshot: Snapshot, policy: Policy, cache: DecisionCache | None = None) -> None:
        self._session = SchedulingSession(snapshot, policy, DecisionCache() if cache is None else cache)
        self._allocate_action = AllocateAction(self._session)
        self._evict_action = EvictAction(self._session)

    @property
    def pool_states(self) -> dict[PoolId, PoolState]:
        """The pools as the decision left them."""
        return self._session.pool_states

    def row(self, job: JobId) -> PendingRow:
        """A waiting job as the decision sees it: it avoids what is reserved for others."""
        return next(row for row in self._session.pending if row.job == job)

    @property
    def explainer(self) -> Explainer:
        """Who can be asked for alternatives."""
        return self._session.explainer

    def plan(self, *, explain: bool = True) -> Plan:
        """Go through the steps; the last, telling, only if asked for."""
        self._session.classify_jobs()
        self._session.compute_shares()
        receipts = tuple(
            receipt
            for pool_state in self._session.pool_states.values()
            for receipt in pool_state.share_breakdowns()
        )
        self._allocate_action.restore_nominations()
        self._run_actions()
        if "stale_gangs" in self._session.policy.actions:
            self._evict_action.evict_stale_gangs()
        evictions = self._evictions()
        verdicts = self.report(evictions).all() if explain else []
        return Plan(
            starts=self._placements(GangTaskState.ALLOCATED),
            evictions=evictions,
            verdicts=tuple(sorted(verdicts, key=attrgetter("job"))),
            share_breakdowns=receipts,
            steps_used=self._session.steps_used + self._session.explainer.alternative_search.steps_used,
            truncated=bool(self._session.unprocessed)
            or any(room.truncated for room in self._session.planners.values()),
            explained=explain,
            nominations=self._placements(GangTaskState.NOMINATED),
        )

    def report(self, evictions: tuple[Eviction, ...]) -> VerdictReport:
        """Who can say why jobs wait, once the actions are done."""
        return VerdictReport(self._session, evictions)

    def _run_actions(self) -> None:
        """Allocate, then make room in three ways; again as long as somebody is seated by it."""
        allocate = "allocate" in self._session.policy.actions
        if self._session.policy.settles:
            self._allocate_action.start_nominated()
        if allocate:
            self._allocate_action.reserve()
            self._allocate_action.allocate()
        actions = [action for action in EVICTION_REASONS if action in self._session.policy.actions]
        left = actions
        for _ in range(MAX_ROUNDS):
            seated = [action for action in left if self._evict_action.run(action)]
            spared = self._session.policy.settles and self._evict_action.reprieve_victims()
            if not self._session.policy.settles or not (seated or spared or left != actions):
                break
            # one that seats somebody opens holes for the same again: the others look when it is done
            left = seated if seated and not spared else actions
            if seated or spared:
                self._allocate_action.start_nominated()
                if allocate:
                    self._allocate_action.allocate()

    def _placements(self, state: GangTaskState) -> tuple[JobPlacement, ...]:
        """The gangs with tasks in ``state``, and the places of these."""
        found = []
        for pool, pool_state in self._session.pool_states.items():
            for job, gang in pool_state.gangs.items():
                if not gang.dirty:
                    continue
                tasks = sorted((t for t in gang.tasks if t.state is state), key=lambda t: t.rank)
                if tasks:
                    version = gang.pending_row.version if gang.pending_row else 0
                    places = ((t.rank, t.nominated or t.held[0]) for t in tasks)
                    placed = tuple(
                        pool_state.available.to_task_placement(rank, place) for rank, place in places
                    )
                    found.append(JobPlacement(job, pool, version, placed))
        return tuple(sorted(found, key=lambda start: start.job))

    def _evictions(self) -> tuple[Eviction, ...]:
        """Who leaves, by job; a job of which only some tasks leave names them."""
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
            found.append(Eviction(job, worst.reason, worst.for_job, ranks))
        return tuple(found)
