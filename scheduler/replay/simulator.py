"""Simulated clock around the decision: jobs of a trace arrive, start, are preempted and end.

Unchanged rows are the same objects in every snapshot. There is at most one decision per simulated second, and
only after an arrival, an end or a release.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from scheduler.core.model.plan import Eviction, JobPlacement, Plan
from scheduler.core.model.policy import Policy
from scheduler.core.model.snapshot import (
    WHOLE_MILLI,
    GpuRow,
    GpuUuid,
    JobId,
    NodeId,
    NodeRow,
    PendingRow,
    PoolId,
    PoolRow,
    ProjectId,
    ProjectRow,
    QuotaRow,
    RunningRow,
    RunningTask,
    Snapshot,
    TaskRequest,
    TopologyRow,
    UsageRow,
    UserId,
)
from scheduler.replay.metrics import ReplayResult
from scheduler.replay.trace import ClusterSize, TraceJob

POOL = PoolId("pool")
PRIORITY = 50
USAGE_REFRESH_S = 600
"""Interval between updates of usage rows; usage changes slowly compared with its half-life of days."""

Decide = Callable[[Snapshot, Policy], Plan]


@dataclass(frozen=True, slots=True)
class SimulationConfig:
    """Jobs, cluster, guaranteed GPUs of projects, and the policy of a replay."""

    jobs: Sequence[TraceJob]
    size: ClusterSize
    quotas: Mapping[str, int]
    policy: Policy
    decide: Decide
    pool: PoolId = POOL


class SimulationHook:
    """Callbacks of a replay; the base class does nothing."""

    def on_submit(self, job: TraceJob, row: PendingRow, now_s: float) -> PendingRow:
        """Called at submit; return the row to queue."""
        return row

    def on_start(self, job: TraceJob, row: RunningRow, ran_s: float) -> RunningRow:
        """Called at a start after ``ran_s`` of earlier running time; return the row to run."""
        return row

    def on_preempt(self, job: TraceJob, row: RunningRow, ran_s: float) -> None:
        """Called when ``job`` is preempted after ``ran_s`` of running time."""

    def on_end(self, job: TraceJob, now_s: float) -> None:
        """Called when ``job`` has completed."""

    def before_decision(self, running: dict[JobId, RunningRow], now_s: float) -> None:
        """Called before a snapshot; rows of ``running`` may be replaced."""

    def on_decision(self, snapshot: Snapshot, plan: Plan) -> None:
        """Called after each decision."""


class Simulator:
    """``rows`` and ``result`` replace those of a trace, whose cluster is uniform."""

    def __init__(
        self,
        config: SimulationConfig,
        hook: SimulationHook | None = None,
        rows: SnapshotRows | None = None,
        result: ReplayResult | None = None,
    ) -> None:
        self.config = config
        self.hook = hook or SimulationHook()
        self.result = result or ReplayResult(config.jobs, config.size)
        self.decisions = 0
        self.truncated_decisions = 0
        self._rows = rows or SnapshotRows(config)
        self._remaining_s = [float(job.duration_s) for job in config.jobs]
        self._ran_s = [0.0] * len(config.jobs)
        self._submitted: dict[JobId, PendingRow] = {}
        self._attempt = [0] * len(config.jobs)
        self._ends: list[tuple[float, int, int]] = []
        self._pending: dict[JobId, PendingRow] = {}
        self._running: dict[JobId, RunningRow] = {}
        self._evicted: list[Eviction] = []
        self._nominated: set[JobId] = set()
        self._usage = _Usage(config)

    def run(self) -> ReplayResult:
        """Run the whole trace; every job that can ever start completes."""
        jobs, arrived = self.config.jobs, 0
        while arrived < len(jobs) or self._ends or self._evicted:
            arrives_s = jobs[arrived].submitted_s if arrived < len(jobs) else math.inf
            now_s = min(arrives_s, self._ends[0][0] if self._ends else math.inf)
            if self._evicted:
                now_s = min(now_s, self._usage.now_s + 1)
            now_s = float(math.ceil(now_s))
            self._usage.advance(now_s)
            self._release_evicted(now_s)
            while self._ends and self._ends[0][0] <= now_s:
                _, number, attempt = heapq.heappop(self._ends)
                if attempt == self._attempt[number]:
                    self._end(jobs[number], now_s)
            while arrived < len(jobs) and jobs[arrived].submitted_s <= now_s:
                job = jobs[arrived]
                row = self.hook.on_submit(job, self._rows.pending(job), now_s)
                self._pending[row.job] = self._submitted[row.job] = row
                arrived += 1
            if self._pending:
                self._decide(now_s)
        return self.result

    def _decide(self, now_s: float) -> None:
        """Take one decision and apply it at once."""
        self.hook.before_decision(self._running, now_s)
        snapshot = self._rows.snapshot(
            now_s, self._usage.rows(now_s), tuple(self._running.values()), tuple(self._pending.values())
        )
        plan = self.config.decide(snapshot, self.config.policy)
        self.decisions += 1
        self.truncated_decisions += plan.truncated
        self.hook.on_decision(snapshot, plan)
        self._nominated = apply_nominations(
            plan, self._submitted, self._pending, self._running, self._nominated
        )
        for eviction in plan.evictions:
            self._running[eviction.job] = replace(
                self._running[eviction.job], stopping=True, preempted_for=eviction.for_job
            )
        self._evicted.extend(plan.evictions)
        for start in plan.starts:
            self._start(start, now_s)

    def _start(self, start: JobPlacement, now_s: float) -> None:
        job = self.config.jobs[int(start.job)]
        row = self._rows.running(self._pending.pop(start.job), start, now_s)
        self._running[row.job] = self.hook.on_start(job, row, self._ran_s[job.number])
        self._rows.hold(row, +1)
        self._usage.hold(job, +1)
        if math.isnan(self.result.started_s[job.number]):
            self.result.started_s[job.number] = now_s
        heapq.heappush(
            self._ends, (now_s + self._remaining_s[job.number], job.number, self._attempt[job.number])
        )

    def _end(self, job: TraceJob, now_s: float) -> None:
        self._stop(job, now_s)
        self._finish(job, now_s)

    def _finish(self, job: TraceJob, now_s: float) -> None:
        del self._submitted[_job_id(job)]
        self.result.ended_s[job.number] = now_s
        self.hook.on_end(job, now_s)

    def _stop(self, job: TraceJob, now_s: float) -> float:
        """End the attempt of ``job``; return how long it ran."""
        row = self._running.pop(_job_id(job))
        self._rows.hold(row, -1)
        self._usage.hold(job, -1)
        self._attempt[job.number] += 1
        self._ran_s[job.number] += now_s - row.started_s
        self.result.add_run(job, row.started_s, now_s)
        return now_s - row.started_s

    def _release_evicted(self, now_s: float) -> None:
        """Release evicted jobs one second later and requeue them."""
        for eviction in self._evicted:
            row = self._running.get(eviction.job)
            if row is None:
                continue  # it ended in that second
            job = self.config.jobs[int(eviction.job)]
            self._remaining_s[job.number] -= self._stop(job, now_s)
            if self._remaining_s[job.number] <= 0:
                self._finish(job, now_s)
            else:
                self._remaining_s[job.number] += self.result.add_preemption(job)
                asked = self._submitted[row.job]
                self._pending[row.job] = (
                    replace(asked, nominated_tasks=row.nominated_tasks) if row.nominated_tasks else asked
                )
                self.hook.on_preempt(job, row, self._ran_s[job.number])
        self._evicted = []


def apply_nominations(
    plan: Plan,
    submitted: Mapping[JobId, PendingRow],
    pending: dict[JobId, PendingRow],
    running: dict[JobId, RunningRow],
    nominated: set[JobId],
) -> set[JobId]:
    """Set the nominated placements of the plan in the rows; return the nominated jobs.

    ``nominated`` are those of the previous plan, ``submitted`` the rows without a nomination.
    """
    kept = {start.job: _nominated_tasks(start) for start in plan.nominations}
    for job in nominated - kept.keys():
        if job in pending:
            pending[job] = submitted[job]
    for job, places in kept.items():
        if job in pending and pending[job].nominated_tasks != places:
            pending[job] = replace(pending[job], nominated_tasks=places)
        elif job in running:
            running[job] = replace(running[job], nominated_tasks=places)
    return set(kept)


def _nominated_tasks(start: JobPlacement) -> tuple[RunningTask, ...]:
    return tuple(RunningTask(task.node, task.gpus, 0, 0, rank=task.rank) for task in start.tasks)


def _job_id(job: TraceJob) -> JobId:
    return JobId(f"{job.number:06d}")


class SnapshotRows:
    """Snapshot rows; node rows are rebuilt only when they change."""

    _topologies: tuple[TopologyRow, ...] = ()

    def __init__(self, config: SimulationConfig) -> None:
        projects = sorted({job.project for job in config.jobs} | set(config.quotas))
        self._per_node = config.size.gpus_per_node
        self._pools: tuple[PoolRow, ...] = (PoolRow(POOL, "trace"),)
        self._projects = tuple(ProjectRow(ProjectId(name), name, None, 0.0) for name in projects)
        self._quotas = tuple(
            QuotaRow(ProjectId(name), POOL, gpus * WHOLE_MILLI, None)
            for name, gpus in sorted(config.quotas.items())
        )
        self._free: dict[GpuUuid, GpuRow] = {}
        self._used: dict[GpuUuid, GpuRow] = {}
        self._nodes: dict[NodeId, NodeRow] = {}
        for n in range(config.size.nodes):
            node = NodeId(f"n{n:04d}")
            gpus = [GpuRow(GpuUuid(f"{node}-{g}"), g, "GPU", 1) for g in range(self._per_node)]
            self._free.update({gpu.uuid: gpu for gpu in gpus})
            self._used.update({g.uuid: replace(g, used_milli=WHOLE_MILLI, exclusive=True) for g in gpus})
            self._nodes[node] = NodeRow(node, str(node), POOL, True, True, 0, 0, 0, 0, tuple(gpus))

    def pending(self, job: TraceJob) -> PendingRow:
        """Return the row of a pending job. One that spans nodes only partly gets equal smaller tasks."""
        each = job.gpus if job.gpus <= self._per_node else math.gcd(job.gpus, self._per_node)
        return PendingRow(
            _job_id(job),
            "",
            ProjectId(job.project),
            UserId(job.project),
            (POOL,),
            float(job.submitted_s),
            PRIORITY,
            True,
            job.gpus // each,
            TaskRequest(each, WHOLE_MILLI, 0, 0),
            None,
        )

    def running(self, row: PendingRow, start: JobPlacement, now_s: float) -> RunningRow:
        tasks = tuple(RunningTask(task.node, task.gpus, 0, 0) for task in start.tasks)
        return RunningRow(
            row.job, row.project, row.user, POOL, row.priority, row.preemptible, now_s, None, tasks
        )

    def hold(self, row: RunningRow, sign: int) -> None:
        """Allocate (+1) or release (-1) the GPUs of a job."""
        rows = self._used if sign > 0 else self._free
        for task in row.tasks:
            node = self._nodes[task.node]
            taken = {share.uuid for share in task.gpus}
            gpus = tuple(rows[gpu.uuid] if gpu.uuid in taken else gpu for gpu in node.gpus)
            self._nodes[task.node] = replace(node, gpus=gpus)

    def snapshot(
        self,
        now_s: float,
        usage: tuple[UsageRow, ...],
        running: tuple[RunningRow, ...],
        pending: tuple[PendingRow, ...],
    ) -> Snapshot:
        return Snapshot(
            now_s,
            self._pools,
            tuple(self._nodes.values()),
            self._projects,
            self._quotas,
            usage,
            running,
            pending,
            self._topologies,
        )


class _Usage:
    """Decayed GPU-seconds of each project: ``u' = u d + held tau (1 - d)``, ``d = e^(-t/tau)``."""

    def __init__(self, config: SimulationConfig) -> None:
        self.now_s = float(config.jobs[0].submitted_s)
        self._tau_s = config.policy.usage_half_life_s / math.log(2)
        self._held = dict.fromkeys(sorted({job.project for job in config.jobs}), 0)
        self._past = dict.fromkeys(self._held, 0.0)
        self._pool = config.pool
        self._made_s = -math.inf
        self._rows: tuple[UsageRow, ...] = ()

    def advance(self, now_s: float) -> None:
        if now_s > self.now_s:
            fades = math.exp(-(now_s - self.now_s) / self._tau_s)
            for project, held in self._held.items():
                self._past[project] = self._past[project] * fades + held * self._tau_s * (1 - fades)
            self.now_s = now_s

    def hold(self, job: TraceJob, sign: int) -> None:
        """Add (+1) or remove (-1) the GPUs of ``job``."""
        self._held[job.project] += sign * job.gpus

    def rows(self, now_s: float) -> tuple[UsageRow, ...]:
        """Return the usage rows, refreshed every ``USAGE_REFRESH_S``."""
        if now_s >= self._made_s + USAGE_REFRESH_S:
            self._made_s = now_s
            self._rows = tuple(
                UsageRow(ProjectId(name), self._pool, UserId(name), past) for name, past in self._past.items()
            )
        return self._rows
