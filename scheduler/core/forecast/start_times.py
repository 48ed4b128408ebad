"""Forecast of start times: simulate the queue of a pool forward from a plan.

Running and pending jobs run as long as similar jobs did; the simulation (``queue_simulation.py``) yields
start times. It obeys what a decision obeys: placement (``capacity_buckets.py``), limits and guarantees,
reservations. The runs give a median, and the errors of past medians an interval around it
(``calibration.py``).

Everything is deterministic: draws are the fractional parts of ``job * golden ratio + run``, not random
numbers.

``estimate_delay_impact`` simulates twice, with a running job ending at either of two times and all other draws
equal, so that the difference is due to the job. Future submissions are not considered.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from types import MappingProxyType

from portal.domain.jobs.reasons import NO_FORECAST_REASONS, VerdictCode
from scheduler.core.forecast.capacity_buckets import BucketBuilder
from scheduler.core.forecast.durations import MIN_SAMPLES, DurationHistory, DurationKey
from scheduler.core.forecast.queue_simulation import (
    MAX_STEPS,
    SIMULATION_RUNS,
    Closure,
    JobClass,
    RunningJob,
    SimulationInput,
    simulate_queue,
)
from scheduler.core.forecast.simulated_reclaims import ReclaimRules, Requeue
from scheduler.core.model.apply_plan import complete_evictions, requeued_row
from scheduler.core.model.plan import Plan, Verdict
from scheduler.core.model.policy import Policy
from scheduler.core.model.project_tree import ProjectTree
from scheduler.core.model.resources import ZERO, ResourceVector
from scheduler.core.model.snapshot import (
    JobId,
    NodeId,
    PendingRow,
    PoolId,
    ProjectId,
    ReservationRow,
    RunningRow,
    Snapshot,
    TaskShape,
    UserId,
)
from scheduler.core.session.admin_reservations import reservation_blocks
from scheduler.core.session.gang import build_task_shape
from scheduler.core.session.job_queue import queue_ages_s
from scheduler.core.shares.quota_ledger import JobOwner, PoolLedger
from scheduler.core.shares.reclaim_rules import reclaim_min_runtime_s

GOLDEN = 0.618_033_988_749_895
DEFAULT_REMAINING_S = 600.0
"""Least remaining time of a job that outlived all similar jobs; at the median it is as long as it has run. That of a
pending job of an unknown size."""

EVICTION_S = 1.0
"""Start of a job whose GPUs are being freed by evictions."""

_BLOCKED_CODES = frozenset(
    {
        VerdictCode.INSUFFICIENT_RESOURCES,
        VerdictCode.OVER_FAIR_SHARE,
        VerdictCode.VICTIMS_PROTECTED,
        VerdictCode.RESERVED_FOR_OTHER_JOB,
        VerdictCode.PROJECT_LIMIT,
        VerdictCode.USER_LIMIT,
        VerdictCode.NON_PREEMPTIBLE_OVER_QUOTA,
    }
)
"""What a decision says of a job that nothing free lets start. The simulation knows no topology, no groups, and not
the CPU and memory that others use, so that such a job might seem to fit now."""

ANY_USER = UserId("")
"""The user of all jobs where no user limit applies."""

GangDemand = tuple[tuple[tuple[TaskShape, int], ...], ResourceVector]
"""Shapes of a gang's tasks with their counts, and the total demand."""


def draw_quantiles(number: int, runs: int = SIMULATION_RUNS) -> list[float]:
    """Return the duration quantile of a job in each run, evenly spread over runs and jobs."""
    return [(number * GOLDEN + (run + 0.5) / runs) % 1.0 for run in range(runs)]


def has_forecast(row: PendingRow, verdict: Verdict) -> bool:
    """Return False for a job without GPUs, or one whose start depends on how other jobs end or on people."""
    depends = verdict.code in NO_FORECAST_REASONS or row.held or bool(row.dependencies)
    return not depends and bool(row.total_milli)


def queue_pool_of(row: PendingRow, verdict: Verdict | None) -> PoolId | None:
    """Return the pool in whose queue a job is: that of its verdict, else its first pool."""
    seen = verdict.details.get("pool") if verdict is not None else None
    return PoolId(str(seen)) if seen is not None else next(iter(row.pools), None)


class QueueForecast:
    """The known future of one pool after a plan: remaining times, pending jobs and fair shares.

    ``consumed_s`` is the earlier run time of jobs; ``template_of`` their template; ``known_ends_s`` the ends
    of running jobs that are given, in the clock of the snapshot.
    """

    def __init__(
        self,
        snapshot: Snapshot,
        plan: Plan,
        pool: PoolId,
        durations: DurationHistory,
        policy: Policy,
        consumed_s: Mapping[JobId, float] = MappingProxyType({}),
        template_of: Mapping[JobId, str | None] = MappingProxyType({}),
        known_ends_s: Mapping[JobId, float] = MappingProxyType({}),
        runs: int = SIMULATION_RUNS,
    ) -> None:
        self._runs = runs
        after = complete_evictions(snapshot, plan)
        waiting = {row.job for row in snapshot.pending if not row.ranks}
        self._nominated = {start.job: start.pool for start in plan.nominations if start.job in waiting}
        self._pool = pool
        self._now_s = after.now_s
        self._durations = durations
        self._consumed_s = consumed_s
        self._template_of = template_of
        self._known_ends_s = known_ends_s
        self._tree = ProjectTree(after.projects)
        quotas = self._tree.quotas_in_pool(after.quotas, pool)
        self._ledger = PoolLedger(quotas, self._tree.path)
        self._min_runtime_s = {
            leaf: reclaim_min_runtime_s(self._tree.path[leaf], quotas, policy.preempt_min_runtime_s)
            for leaf in self._tree.leaf_of.values()
        }
        nodes = [node for node in after.nodes if node.pool == pool]
        self._smallest_gpu_mib = min((gpu.memory_mib for node in nodes for gpu in node.gpus), default=1)
        self._reservations = _upcoming_reservations(after, {node.id for node in nodes})
        verdicts = {verdict.job: verdict for verdict in plan.verdicts}
        self._blocked = {verdict.job for verdict in plan.verdicts if verdict.code in _BLOCKED_CODES}
        queued = [
            row
            for row in after.pending
            if _is_queued(row) and queue_pool_of(row, verdicts.get(row.job)) == pool
        ]
        here = sorted((row for row in after.running if row.pool == pool), key=lambda row: row.job)
        shares_milli = {
            each.project: each.fair_share_milli for each in plan.share_breakdowns if each.pool == pool
        }
        reclaims = "reclaim" in policy.semantics.actions
        evictable = _jobs_over_share(here, shares_milli) if reclaims else frozenset()
        queued += [requeued_row(row) for row in here if row.job in evictable]
        ages_s = queue_ages_s(queued, policy)
        ordered = sorted(
            zip(queued, ages_s, strict=True), key=lambda pair: (-pair[0].priority, pair[1], pair[0].job)
        )
        rows = [row for row, _ in ordered]
        self._demands: dict[tuple[object, ...], GangDemand] = {}
        asked = [self._demand(row) for row in rows]
        shapes = dict.fromkeys(shape for tasks, _ in asked for shape, _ in tasks)
        settings = (each.settings for each in after.pools if each.id == pool)
        sharing = None if policy.for_pool(next(settings, ())).gpu_sharing_scope == "any" else here
        self._bucket_builder = BucketBuilder(
            nodes, shapes, [row.nodes for row in self._reservations], sharing
        )
        job_classes, requeue_of = self._job_classes(rows, asked, evictable)
        running = [
            self._running_job(row, number, requeue_of.get(row.job))
            for number, row in enumerate(sorted(after.running, key=lambda row: row.job))
            if row.pool == pool
        ]
        for job in running:
            owner = job.owner
            self._ledger.add(owner.leaf_project, owner.user, owner.amounts, owner.preemptible)
        self._position = {row.job: position for position, row in enumerate(rows) if row.job not in evictable}
        self._simulation_input = SimulationInput(
            self._bucket_builder.build(job.slots for job in running),
            running,
            job_classes,
            [
                () if row.job in evictable else self._durations_s(row, position)
                for position, row in enumerate(rows)
            ],
            shares_milli,
            self._ledger if self._ledger.can_block(all(row.preemptible for row in rows)) else None,
            runs,
            ReclaimRules(policy.preemption_delay_s, self._min_runtime_s, [row.priority for row in rows])
            if reclaims
            else None,
        )

    @property
    def queue(self) -> Sequence[JobId]:
        """The pending jobs with a queue position in this pool, in order; first those whose GPUs are being freed."""
        nominated = (job for job, pool in self._nominated.items() if pool == self._pool)
        return (*nominated, *self._position)

    def median_starts_s(self, jobs: Iterable[JobId], max_steps: int = MAX_STEPS) -> dict[JobId, float]:
        """Return the median start of each job over the runs, in seconds from now.

        It is infinite if the job does not start even after everything that runs or is ahead of it has ended.
        Jobs that start later than the runs reach in ``max_steps`` are left out.

        Raises:
            KeyError: a job has no position here: it is held, has dependencies, or requests no GPU.
        """
        jobs = list(jobs)
        found = {job: EVICTION_S for job in jobs if job in self._nominated}
        positions = {self._position[job]: job for job in jobs if job not in found}
        for position, runs in simulate_queue(self._simulation_input, positions, max_steps=max_steps).items():
            known = sorted(start_s for start_s in runs if start_s is not None)
            if len(known) > len(runs) // 2:
                found[positions[position]] = known[len(runs) // 2]
        return found

    def _owner(self, row: PendingRow | RunningRow, amounts: ResourceVector) -> JobOwner:
        """Return the owner of a job with only the details that quotas distinguish."""
        leaf = self._tree.leaf_of[row.project]
        user = row.user if self._ledger.has_user_limit(leaf) else ANY_USER
        counted = amounts if self._ledger.has_cpu_or_memory_quota else ResourceVector(amounts.gpu_milli)
        return JobOwner(row.project, leaf, user, row.preemptible, counted)

    # -- running jobs ----------------------------------------------------------------------------------

    def _running_job(
        self, row: RunningRow, number: int, place_in_queue: tuple[int, int] | None
    ) -> RunningJob:
        milli = sum(gpu.milli for task in row.tasks for gpu in task.gpus)
        cpu_milli = sum(task.cpu_milli for task in row.tasks)
        memory_mib = sum(task.memory_mib for task in row.tasks)
        owner = self._owner(row, ResourceVector(milli, cpu_milli, memory_mib))
        places = self._bucket_builder.slots_of(row.tasks)
        ran_s = max(0.0, self._now_s - row.started_s)
        requeue = None
        if place_in_queue is not None:
            saved_s = max(row.started_s, row.checkpoint_s or row.started_s) - self._now_s
            protected_until_s = self._min_runtime_s[owner.leaf_project] - ran_s
            requeue = Requeue(*place_in_queue, saved_s, protected_until_s)
        if (end_s := self._known_ends_s.get(row.job)) is not None:
            return RunningJob(owner, places, [max(0.0, end_s - self._now_s)] * self._runs, requeue)
        kind = DurationKey(row.project, row.user, self._template_of.get(row.job), milli)
        had_s = self._consumed_s.get(row.job, 0.0) + ran_s
        limit_s = None if row.time_limit_s is None else row.time_limit_s + had_s - ran_s
        return RunningJob(
            owner, places, self._draw_remaining_s(kind, had_s, limit_s, number, runs=True), requeue
        )

    # -- pending jobs ----------------------------------------------------------------------------------

    def _demand(self, row: PendingRow) -> GangDemand:
        """Return the demand of a job with the fewest tasks that it starts with."""
        asked = (row.task_requests, row.request, row.tasks, row.min_tasks, row.needs_same_gpus)
        key = (asked, row.project, row.avoid_nodes, row.node_affinity)
        if (known := self._demands.get(key)) is not None:
            return known
        avoid = tuple(sorted(row.avoid_nodes))
        found: Counter[TaskShape] = Counter()
        amounts = ZERO
        for ask, count in Counter((row.task_requests or (row.request,) * row.tasks)[: row.min_tasks]).items():
            shape, each = build_task_shape(
                ask, row.project, avoid, row.node_affinity, self._smallest_gpu_mib,
                same_gpus=row.needs_same_gpus,
            )  # fmt: skip
            amounts = amounts.add(each.multiply(count))
            if ask.gpus:
                found[shape] += count
        return self._demands.setdefault(key, (tuple(found.items()), amounts))

    def _job_classes(
        self, rows: Sequence[PendingRow], asked: Sequence[GangDemand], running: Set[JobId]
    ) -> tuple[list[JobClass], dict[JobId, tuple[int, int]]]:
        """Group the jobs that fit and are blocked alike.

        Those ``running`` are not in the queue; return the class and the position of each once it is evicted.
        """
        positions: dict[JobClass, list[int]] = {}
        for position, (row, (tasks, amounts)) in enumerate(zip(rows, asked, strict=True)):
            needs = tuple((self._bucket_builder.request_for(shape), count) for shape, count in tasks)
            from_s = max(0.0, (row.not_before_s or 0.0) - self._now_s)
            hardware = self._bucket_builder.hardware_types([shape for shape, _ in tasks])
            owner, blocked = self._owner(row, amounts), row.job in self._blocked
            line = JobClass(owner, needs, (), from_s, self._closures(row), hardware, blocked)
            positions.setdefault(line, []).append(position)
        classes = [
            line._replace(positions=[each for each in mine if rows[each].job not in running])
            for line, mine in positions.items()
        ]
        requeue_of = {
            rows[position].job: (number, position)
            for number, mine in enumerate(positions.values())
            for position in mine
            if rows[position].job in running
        }
        return classes, requeue_of

    def _closures(self, row: PendingRow) -> tuple[Closure, ...]:
        """Return when reserved nodes are closed to this job: from when it might overlap until the end."""
        ancestors = self._tree.path[self._tree.leaf_of[row.project]]
        found = []
        for reservation, bucket_types in zip(
            self._reservations, self._bucket_builder.types_by_node_set, strict=True
        ):
            if bucket_types and reservation_blocks(reservation, ancestors, self._now_s, None):
                lasts_s = math.inf if row.time_limit_s is None else row.time_limit_s
                after_s = reservation.start_s - lasts_s - self._now_s
                after_s = after_s if after_s >= 0.0 else -math.inf
                found.append(Closure(bucket_types, after_s, reservation.end_s - self._now_s))
        return tuple(found)

    def _durations_s(self, row: PendingRow, number: int) -> list[float]:
        kind = DurationKey(row.project, row.user, self._template_of.get(row.job), row.total_milli)
        had_s = self._consumed_s.get(row.job, 0.0)
        limit_s = None if row.time_limit_s is None else row.time_limit_s + had_s
        return self._draw_remaining_s(kind, had_s, limit_s, number, runs=False)

    def _draw_remaining_s(
        self, kind: DurationKey, had_s: float, limit_s: float | None, number: int, *, runs: bool
    ) -> list[float]:
        """Return the remaining time of a job in each run; infinite if it has no limit and nothing is known of it.

        Of a running job nothing is known without similar jobs that ended, as for reservations of gangs
        (``expected_end_s``); of a pending one if no jobs have ended at all. A job that outlived all similar jobs is
        expected to run as long again, at least ``DEFAULT_REMAINING_S``.
        """
        if limit_s is None and (
            self._durations.expected_s(kind) is None if runs else self._durations.learned_count < MIN_SAMPLES
        ):
            return [math.inf] * self._runs
        parts = draw_quantiles(number, self._runs)
        return [
            max(DEFAULT_REMAINING_S, 2.0 * part * had_s) if left_s is None else left_s
            for part, left_s in zip(
                parts, self._durations.remaining_quantiles_s(kind, had_s, limit_s, parts), strict=True
            )
        ]


def _jobs_over_share(running: Sequence[RunningRow], shares_milli: Mapping[ProjectId, float]) -> Set[JobId]:
    """Return the preemptible jobs with GPUs of projects that hold more than their fair share.

    Of other projects only jobs that start later can be reclaimed in a simulation: it evicts the latest first.
    """
    held_milli = {row.job: sum(gpu.milli for task in row.tasks for gpu in task.gpus) for row in running}
    of_project: Counter[ProjectId] = Counter()
    for row in running:
        of_project[row.project] += held_milli[row.job]
    return {
        row.job
        for row in running
        if row.preemptible
        and held_milli[row.job]
        and of_project[row.project] > shares_milli.get(row.project, 0.0)
    }


def _is_queued(row: PendingRow) -> bool:
    """Return False for a job without GPUs, one that waits for another reason, or a running one that grows."""
    return bool(row.total_milli) and not (row.held or row.dependencies or row.ranks)


def _upcoming_reservations(snapshot: Snapshot, nodes: Set[NodeId]) -> list[ReservationRow]:
    """Return the current and later reservations of these nodes."""
    rows = (row for row in snapshot.reservations if row.end_s > snapshot.now_s)
    return sorted((row for row in rows if not nodes.isdisjoint(row.nodes)), key=lambda row: row.id)


MIN_DELAY_S = 60.0
"""Smaller delays are ignored."""
MAX_DELAYED_JOBS = 1_000
"""Pending jobs considered, in queue order; bounded because a user waits for the answer."""


@dataclass(frozen=True, slots=True)
class JobDelay:
    """The delay of one pending job; infinite ``delay_s`` means that its start becomes unknown."""

    job: JobId
    delay_s: float


@dataclass(frozen=True, slots=True)
class DelayImpact:
    """The delayed jobs, longest delay first, and the names of delayed reservations.

    ``is_complete`` is False if more jobs are pending than were considered.
    """

    jobs: tuple[JobDelay, ...]
    reservations: tuple[str, ...]
    is_complete: bool = True


def estimate_delay_impact(
    snapshot: Snapshot,
    plan: Plan,
    policy: Policy,
    job: JobId,
    end_s: float,
    extended_end_s: float,
    durations: DurationHistory,
    template_of: Mapping[JobId, str | None] = MappingProxyType({}),
) -> DelayImpact:
    """Return what is delayed if a running job may run until ``extended_end_s`` instead of ``end_s``.

    Raises:
        ValueError: the job is not running, or the extended end is not later.
    """
    row = next((row for row in snapshot.running if row.job == job), None)
    if row is None or extended_end_s <= end_s:
        raise ValueError("the job is not running, or the extended end is not later")
    before, after = (
        QueueForecast(
            snapshot, plan, row.pool, durations, policy, template_of=template_of, known_ends_s={job: at_s}
        )
        for at_s in (end_s, extended_end_s)
    )
    starts_s = before.median_starts_s(before.queue[:MAX_DELAYED_JOBS])
    then_s = after.median_starts_s(starts_s)
    late = [
        JobDelay(one, by_s)
        for one, start_s in starts_s.items()
        if start_s < math.inf and (by_s := then_s.get(one, math.inf) - start_s) >= MIN_DELAY_S
    ]
    late.sort(key=lambda each: (-each.delay_s, each.job))
    whole = len(before.queue) <= MAX_DELAYED_JOBS
    return DelayImpact(tuple(late), _delayed_reservations(snapshot, row, end_s, extended_end_s), whole)


def _delayed_reservations(
    snapshot: Snapshot, row: RunningRow, end_s: float, extended_end_s: float
) -> tuple[str, ...]:
    """Return the reservations for others on the job's nodes that the added time overlaps."""
    tree = ProjectTree(snapshot.projects)
    line = set(tree.path[tree.leaf_of[row.project]])
    nodes = {task.node for task in row.tasks}
    return tuple(
        sorted(
            each.name
            for each in snapshot.reservations
            if not nodes.isdisjoint(each.nodes)
            and line.isdisjoint(each.projects)
            and each.start_s < extended_end_s
            and each.end_s > end_s
        )
    )
