"""A simulated clock around the one decision: jobs of a trace arrive, start, give way and end.

Rows of the photograph are made once per job and change only with it; everything that did not change is the
very same object in the next photograph. There is at most one decision in each simulated second, and only
where something arrived, ended or left since the last.
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
    UsageRow,
    UserId,
)
from scheduler.replay.metrics import ReplayResult
from scheduler.replay.trace import ClusterSize, TraceJob

POOL = PoolId("pool")
PRIORITY = 50
USAGE_REFRESH_S = 600
"""Past use moves slowly against its half-life of days: its rows are made anew this often."""

Decide = Callable[[Snapshot, Policy], Plan]


@dataclass(frozen=True, slots=True)
class SimulationConfig:
    """What a replay needs: jobs, the cluster, guaranteed GPUs of projects, and the policy to decide by."""

    jobs: Sequence[TraceJob]
    size: ClusterSize
    quotas: Mapping[str, int]
    policy: Policy
    decide: Decide


class SimulationHook:
    """Looks on while a replay runs; the base looks away."""

    def on_submit(self, job: TraceJob, row: PendingRow, now_s: float) -> PendingRow:
        """``job`` was submitted; the row it joins the queue with."""
        return row

    def on_start(self, job: TraceJob, row: RunningRow, ran_s: float) -> RunningRow:
        """``job`` started, with ``had_s`` of running behind it; the row it runs with."""
        return row

    def on_preempt(self, job: TraceJob, row: RunningRow, ran_s: float) -> None:
        """``job`` gave way and queues again, with ``had_s`` of running behind it."""

    def on_end(self, job: TraceJob, now_s: float) -> None:
        """``job`` ended after all its work."""

    def before_decision(self, running: dict[JobId, RunningRow], now_s: float) -> None:
        """A photograph is about to be taken; rows of ``running`` may be exchanged."""

    def on_decision(self, snapshot: Snapshot, plan: Plan) -> None:
        """``plan`` was decided upon."""


class Simulator:
    """One replay while it runs."""

    def __init__(self, config: SimulationConfig, hook: SimulationHook | None = None) -> None:
        self.config = config
        self.hook = hook or SimulationHook()
        self.result = ReplayResult(config.jobs, config.size)
        self.decisions = 0
        self.truncated_decisions = 0
        self._rows = _Rows(config)
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
        """Goes through the whole trace; every job that can ever stand here ends."""
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
        """One decision, carried out at once."""
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
        """All its work is done."""
        del self._submitted[_job_id(job)]
        self.result.ended_s[job.number] = now_s
        self.hook.on_end(job, now_s)

    def _stop(self, job: TraceJob, now_s: float) -> float:
        """Ends the attempt of ``job``; for how long it ran."""
        row = self._running.pop(_job_id(job))
        self._rows.hold(row, -1)
        self._usage.hold(job, -1)
        self._attempt[job.number] += 1
        self._ran_s[job.number] += now_s - row.started_s
        self.result.add_run(job, row.started_s, now_s)
        return now_s - row.started_s

    def _release_evicted(self, now_s: float) -> None:
        """Who was asked to leave is gone a second later and queues again."""
        for eviction in self._evicted:
            row = self._running.get(eviction.job)
            if row is None:
                continue  # it ended by itself in that second
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
    """Notes in the rows which places the plan keeps for whom; ``nominated`` is for whom the plan before did.

    ``submitted`` has the rows of jobs for whom nothing is kept.
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


class _Rows:
    """Makes the rows of the photograph; those of nodes anew only when what they say changed."""

    def __init__(self, config: SimulationConfig) -> None:
        projects = sorted({job.project for job in config.jobs} | set(config.quotas))
        self._per_node = config.size.gpus_per_node
        self._pools = (PoolRow(POOL, "trace"),)
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
        """The row of a waiting job. One that spans nodes and does not fill them comes in equal smaller tasks."""
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
            each,
            WHOLE_MILLI,
            None,
            None,
            0,
            0,
            None,
        )

    def running(self, row: PendingRow, start: JobPlacement, now_s: float) -> RunningRow:
        """The row of a job that starts now."""
        tasks = tuple(RunningTask(task.node, task.gpus, 0, 0) for task in start.tasks)
        return RunningRow(
            row.job, row.project, row.user, POOL, row.priority, row.preemptible, now_s, None, tasks
        )

    def hold(self, row: RunningRow, sign: int) -> None:
        """Takes (+1) or frees (-1) what a job holds."""
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
        """The photograph of this moment."""
        return Snapshot(
            now_s,
            self._pools,
            tuple(self._nodes.values()),
            self._projects,
            self._quotas,
            usage,
            running,
            pending,
        )


class _Usage:
    """Decayed GPU-seconds of each project, kept by steps: ``u' = u d + held tau (1 - d)``, ``d = e^(-t/tau)``."""

    def __init__(self, config: SimulationConfig) -> None:
        self.now_s = float(config.jobs[0].submitted_s)
        self._tau_s = config.policy.usage_half_life_s / math.log(2)
        self._held = dict.fromkeys(sorted({job.project for job in config.jobs}), 0)
        self._past = dict.fromkeys(self._held, 0.0)
        self._made_s = -math.inf
        self._rows: tuple[UsageRow, ...] = ()

    def advance(self, now_s: float) -> None:
        """Lets time pass."""
        if now_s > self.now_s:
            fades = math.exp(-(now_s - self.now_s) / self._tau_s)
            for project, held in self._held.items():
                self._past[project] = self._past[project] * fades + held * self._tau_s * (1 - fades)
            self.now_s = now_s

    def hold(self, job: TraceJob, sign: int) -> None:
        """Counts the GPUs of ``job`` in (+1) or out (-1)."""
        self._held[job.project] += sign * job.gpus

    def rows(self, now_s: float) -> tuple[UsageRow, ...]:
        """The rows of the photograph, made anew now and then."""
        if now_s >= self._made_s + USAGE_REFRESH_S:
            self._made_s = now_s
            self._rows = tuple(
                UsageRow(ProjectId(name), POOL, UserId(name), past) for name, past in self._past.items()
            )
        return self._rows
