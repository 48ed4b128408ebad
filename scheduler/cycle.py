"""One scheduling cycle: take a snapshot, decide, commit the plan."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

from django.db import DataError, InterfaceError, OperationalError, transaction
from django.db import Error as DatabaseError
from django.utils import timezone

from portal.domain.jobs.reasons import VerdictCode
from portal.failpoints import failpoint
from portal.live_events import publish_on_commit
from portal.models import ClusterSettings, Cycle
from scheduler import leases
from scheduler.commit.plan_writer import CommitRefusal, commit_evictions, commit_starts
from scheduler.commit.verdict_store import MAX_REFRESHED, VerdictStore
from scheduler.core.model.plan import JobPlacement, Plan, Verdict
from scheduler.core.model.policy import Policy
from scheduler.core.model.snapshot import Snapshot
from scheduler.core.model.validation import Fault
from scheduler.counters import count_cycle
from scheduler.failed_cycles import save_failed_cycle
from scheduler.forecast.duration_estimates import DurationEstimator
from scheduler.forecast.forecast_store import save_intervals
from scheduler.incremental import EXPLAIN_INTERVAL_S, IncrementalDecider
from scheduler.leases import HeldLease
from scheduler.nominations import save_nominations
from scheduler.python_gc import gc_paused
from scheduler.snapshot.decision_input import DecisionInput, SnapshotCache, take_snapshot
from scheduler.snapshot.invalid_rows import report_faults, use_valid_rows
from scheduler.snapshot.row_cache import INVALID_DATA, database_identity

log = logging.getLogger(__name__)

Decide = Callable[[Snapshot, Policy], Plan]


class CycleState:
    """State of one series of cycles; not thread-safe. Losing it only makes the next cycle slow."""

    def __init__(self) -> None:
        self._database_identity: tuple[object, ...] = ()
        self.cycle_count = 0
        """Cycles of this process that used the state."""
        self.reset()

    def reset(self) -> None:
        """Make the next cycle read and decide everything again."""
        self.snapshot_cache = SnapshotCache()
        self.verdict_store = VerdictStore()
        self.duration_estimator = DurationEstimator()
        self.decider = IncrementalDecider()
        self.reported_faults: tuple[Fault, ...] | None = None
        """Faults of the last snapshot as reported; None when nothing has been reported yet."""
        self.verdicts_written_s = -math.inf
        """Monotonic time of the last batch of deferred verdicts."""

    def reset_if_database_changed(self) -> None:
        """Reset when the connection leads to another server or database than before."""
        identity = database_identity()
        if identity != self._database_identity:
            self.reset()
            self._database_identity = identity


@dataclass(frozen=True)
class CycleResult:
    """What a cycle did. ``rerun``: start the next at once. ``explained``: all pending jobs have verdicts."""

    started: int
    refused: tuple[CommitRefusal, ...]
    rerun: bool
    explained: bool = True


def run_cycle(
    trigger: str,
    holder: str,
    state: CycleState | None = None,
    *,
    decide: Decide | None = None,
    next_cycle_requested: Callable[[], bool] = bool,
) -> CycleResult | None:
    """Run one cycle as leader; return None when another scheduler leads. Raise LeaseLostError when the lease
    is lost.

    ``state`` carries caches from the last cycle; ``decide`` replaces the decision function. When many jobs
    are pending, their verdicts are written after the commit until ``next_cycle_requested`` returns True, but
    at least one batch every ``EXPLAIN_INTERVAL_S``.
    """
    leader = leases.acquire(leases.LEADER, holder, leases.LEADER_TTL_S)
    if leader is None:
        return None
    state = state or CycleState()
    state.cycle_count += 1
    with gc_paused(state.cycle_count):
        return _run(leader, trigger, state, decide, next_cycle_requested)


def _run(
    leader: HeldLease,
    trigger: str,
    state: CycleState,
    decide: Decide | None,
    next_cycle_requested: Callable[[], bool],
) -> CycleResult:
    started_at, begin_s = timezone.now(), time.monotonic()
    settings = ClusterSettings.objects.get_or_create(id=1)[0]
    inputs: DecisionInput | None = None
    try:
        state.reset_if_database_changed()
        inputs = take_snapshot(settings, state.snapshot_cache)
        inputs = replace(inputs, snapshot=_with_duration_estimates(inputs, state))
        snapshot_taken_s = time.monotonic()
        failpoint("cycle.snapshot_taken")
        policy, before = inputs.policy, inputs.snapshot
        plan, inputs = use_valid_rows(
            inputs,
            lambda snapshot: (decide or state.decider.decide)(snapshot, policy),
            had_faults=bool(state.reported_faults),
        )
        decided_s = time.monotonic()
    except (OperationalError, InterfaceError):
        raise  # the database is unreachable, which says nothing about its content
    except Exception as error:  # invalid input or a bug in the core: decide nothing rather than guess
        state.reset()
        message = save_failed_cycle(leader, settings, inputs, error, trigger)
        _set_alert(leader, settings, message)
        return CycleResult(0, (), rerun=False)
    _set_alert(leader, settings, "")
    if inputs.faults != state.reported_faults:
        report_faults(leader, before, inputs.faults)
        state.reported_faults = inputs.faults
    failpoint("cycle.decided")
    leases.renew([leader.name], leader.holder, leases.LEADER_TTL_S)
    refused = _commit(leader, inputs, plan, state)
    failpoint("cycle.committed")
    row = Cycle(
        started_at=started_at,
        epoch=leader.epoch,
        trigger=trigger[:40],
        snapshot_ms=(snapshot_taken_s - begin_s) * 1000,
        decide_ms=(decided_s - snapshot_taken_s) * 1000,
        commit_ms=(time.monotonic() - decided_s) * 1000,
        pending=len(inputs.pending_row_ids),
        started_jobs=0 if inputs.recovery_mode else len(plan.starts) - len(refused),
        evicted_jobs=0 if inputs.recovery_mode else len(plan.evictions),
        refused_commits=len(refused),
        steps=plan.steps_used,
        truncated=plan.truncated,
        fair_share_breakdown=[asdict(breakdown) for breakdown in plan.share_breakdowns],
    )
    with transaction.atomic():
        leases.check(leader)
        row.save()
        count_cycle(row, plan, committed=not inputs.recovery_mode)
        publish_on_commit("cluster", {"kind": "cycle", "pending": row.pending, "started": row.started_jobs})
    rerun = bool(refused) and row.started_jobs > 0
    explained = plan.explained
    if not explained:
        try:
            explained = _write_deferred_verdicts(leader, inputs, state, next_cycle_requested)
        except (DatabaseError, leases.LeaseLostError):
            raise
        except Exception as error:  # the plan is already committed
            state.reset()
            _set_alert(leader, settings, save_failed_cycle(leader, settings, inputs, error, trigger))
    return CycleResult(row.started_jobs, tuple(refused), rerun=rerun, explained=explained)


def _with_duration_estimates(inputs: DecisionInput, state: CycleState) -> Snapshot:
    """Return the snapshot with duration estimates, or unchanged when the rows of ended jobs are invalid."""
    try:
        return state.duration_estimator.fill(inputs.snapshot, inputs.policy)
    except (DataError, *INVALID_DATA):
        log.exception("no predictions in this cycle: an ended job cannot be read")
        state.duration_estimator = DurationEstimator()
        return inputs.snapshot


def _write_deferred_verdicts(
    leader: HeldLease, inputs: DecisionInput, state: CycleState, next_cycle_requested: Callable[[], bool]
) -> bool:
    """Write deferred verdicts in batches; return False when interrupted before the last."""
    if next_cycle_requested() and time.monotonic() - state.verdicts_written_s < EXPLAIN_INTERVAL_S:
        return False
    continued = False
    while verdicts := state.decider.explain_next():
        max_refreshed = MAX_REFRESHED * len(verdicts) // max(1, len(inputs.pending_row_ids))
        state.verdict_store.write(
            leader, inputs.pending_row_ids, verdicts, max_refreshed, continued=continued
        )
        continued, state.verdicts_written_s = True, time.monotonic()
        if state.decider.has_unexplained and next_cycle_requested():
            return False
        leases.renew([leader.name], leader.holder, leases.LEADER_TTL_S)
    return True


def _commit(leader: HeldLease, inputs: DecisionInput, plan: Plan, state: CycleState) -> list[CommitRefusal]:
    """Commit evictions, then starts, then verdicts."""
    refused: list[CommitRefusal] = []
    verdicts = plan.verdicts
    if inputs.recovery_mode:
        verdicts = (*map(_recovery_verdict, plan.starts), *verdicts)
    else:
        for refusal in commit_evictions(leader, plan.evictions):
            log.info("eviction of %s refused: %s", refusal.job, refusal.message)
        refused = commit_starts(leader, plan.starts)
        for refusal in refused:
            log.info("start of %s refused: %s", refusal.job, refusal.message)
    if not inputs.recovery_mode:
        save_nominations(leader, inputs.nominations, plan)
    if plan.explained or inputs.recovery_mode:
        state.verdict_store.write(leader, inputs.pending_row_ids, (*verdicts, *inputs.excluded))
    elif inputs.excluded:
        state.verdict_store.write(leader, inputs.pending_row_ids, inputs.excluded)
    save_intervals({each.job: each.interval for each in verdicts if each.interval}, leader)
    return refused


def _recovery_verdict(start: JobPlacement) -> Verdict:
    return Verdict(
        start.job,
        VerdictCode.BEGIN_TIME,
        "The database was restored from a backup; no job starts until every node has been reconciled with it.",
    )


def _set_alert(leader: HeldLease, settings: ClusterSettings, message: str) -> None:
    """Set or clear the scheduler alert that administrators see, if it changed."""
    if settings.scheduler_alert == message[:1000]:
        return
    log.error("%s", message) if message else log.info("the scheduler has recovered")
    with transaction.atomic():
        leases.check(leader)
        ClusterSettings.objects.filter(id=1).update(
            scheduler_alert=message[:1000], scheduler_alert_at=timezone.now() if message else None
        )
        settings.scheduler_alert = message[:1000]
        # no message: it names rows that only administrators may see
        publish_on_commit("cluster", {"kind": "alert"})
