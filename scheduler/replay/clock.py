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

from scheduler.core.cluster import (
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
from scheduler.core.plan import Eviction, Plan, Start
from scheduler.core.policy import Policy
from scheduler.replay.outcome import Outcome
from scheduler.replay.trace import Size, TracedJob

POOL = PoolId("pool")
PRIORITY = 50
USAGE_EVERY_S = 600
"""Past use moves slowly against its half-life of days: its rows are made anew this often."""

Decide = Callable[[Snapshot, Policy], Plan]


@dataclass(frozen=True, slots=True)
class Replay:
    """What a replay needs: jobs, the cluster, guaranteed GPUs of projects, and the policy to decide by."""

    jobs: Sequence[TracedJob]
    size: Size
    quotas: Mapping[str, int]
    policy: Policy
    decide: Decide


class Watcher:
    """Looks on while a replay runs; the base looks away."""

    def arrived(self, job: TracedJob, row: PendingRow, now_s: float) -> PendingRow:
        """``job`` was submitted; the row it joins the queue with."""
        return row

    def started(self, job: TracedJob, row: RunningRow, had_s: float) -> RunningRow:
        """``job`` started, with ``had_s`` of running behind it; the row it runs with."""
        return row

    def left(self, job: TracedJob, row: RunningRow, had_s: float) -> None:
        """``job`` gave way and queues again, with ``had_s`` of running behind it."""

    def ended(self, job: TracedJob, now_s: float) -> None:
        """``job`` ended after all its work."""

    def looked(self, running: dict[JobId, RunningRow], now_s: float) -> None:
        """A photograph is about to be taken; rows of ``running`` may be exchanged."""

    def decided(self, snapshot: Snapshot, plan: Plan) -> None:
        """``plan`` was decided upon."""


class Clock:
    """One replay while it runs."""

    def __init__(self, replay: Replay, watcher: Watcher | None = None) -> None:
        self.replay = replay
        self.watcher = watcher or Watcher()
        self.outcome = Outcome(replay.jobs, replay.size)
        self.decisions = 0
        self.not_reached = 0
        self._rows = _Rows(replay)
        self._left_s = [float(job.duration_s) for job in replay.jobs]
        self._had_s = [0.0] * len(replay.jobs)
        self._asked: dict[JobId, PendingRow] = {}
        self._attempt = [0] * len(replay.jobs)
        self._ends: list[tuple[float, int, int]] = []
        self._pending: dict[JobId, PendingRow] = {}
        self._running: dict[JobId, RunningRow] = {}
        self._leaving: list[Eviction] = []
        self._keeping: set[JobId] = set()
        self._usage = _Usage(replay)

    def run(self) -> Outcome:
        """Goes through the whole trace; every job that can ever stand here ends."""
        jobs, arrived = self.replay.jobs, 0
        while arrived < len(jobs) or self._ends or self._leaving:
            arrives_s = jobs[arrived].submitted_s if arrived < len(jobs) else math.inf
            now_s = min(arrives_s, self._ends[0][0] if self._ends else math.inf)
            if self._leaving:
                now_s = min(now_s, self._usage.now_s + 1)
            now_s = float(math.ceil(now_s))
            self._usage.advance(now_s)
            self._let_go(now_s)
            while self._ends and self._ends[0][0] <= now_s:
                _, number, attempt = heapq.heappop(self._ends)
                if attempt == self._attempt[number]:
                    self._end(jobs[number], now_s)
            while arrived < len(jobs) and jobs[arrived].submitted_s <= now_s:
                job = jobs[arrived]
                row = self.watcher.arrived(job, self._rows.pending(job), now_s)
                self._pending[row.job] = self._asked[row.job] = row
                arrived += 1
            if self._pending:
                self._decide(now_s)
        return self.outcome

    def _decide(self, now_s: float) -> None:
        """One decision, carried out at once."""
        self.watcher.looked(self._running, now_s)
        snapshot = self._rows.snapshot(
            now_s, self._usage.rows(now_s), tuple(self._running.values()), tuple(self._pending.values())
        )
        plan = self.replay.decide(snapshot, self.replay.policy)
        self.decisions += 1
        self.not_reached += plan.truncated
        self.watcher.decided(snapshot, plan)
        self._keeping = keep_places(plan, self._asked, self._pending, self._running, self._keeping)
        for eviction in plan.evictions:
            self._running[eviction.job] = replace(
                self._running[eviction.job], stopping=True, stopping_for=eviction.for_job
            )
        self._leaving.extend(plan.evictions)
        for start in plan.starts:
            self._start(start, now_s)

    def _start(self, start: Start, now_s: float) -> None:
        job = self.replay.jobs[int(start.job)]
        row = self._rows.running(self._pending.pop(start.job), start, now_s)
        self._running[row.job] = self.watcher.started(job, row, self._had_s[job.number])
        self._rows.hold(row, +1)
        self._usage.hold(job, +1)
        if math.isnan(self.outcome.started_s[job.number]):
            self.outcome.started_s[job.number] = now_s
        heapq.heappush(self._ends, (now_s + self._left_s[job.number], job.number, self._attempt[job.number]))

    def _end(self, job: TracedJob, now_s: float) -> None:
        self._stop(job, now_s)
        self._over(job, now_s)

    def _over(self, job: TracedJob, now_s: float) -> None:
        """All its work is done."""
        del self._asked[_id(job)]
        self.outcome.ended_s[job.number] = now_s
        self.watcher.ended(job, now_s)

    def _stop(self, job: TracedJob, now_s: float) -> float:
        """Ends the attempt of ``job``; for how long it ran."""
        row = self._running.pop(_id(job))
        self._rows.hold(row, -1)
        self._usage.hold(job, -1)
        self._attempt[job.number] += 1
        self._had_s[job.number] += now_s - row.started_s
        self.outcome.ran(job, row.started_s, now_s)
        return now_s - row.started_s

    def _let_go(self, now_s: float) -> None:
        """Who was asked to leave is gone a second later and queues again."""
        for eviction in self._leaving:
            row = self._running.get(eviction.job)
            if row is None:
                continue  # it ended by itself in that second
            job = self.replay.jobs[int(eviction.job)]
            self._left_s[job.number] -= self._stop(job, now_s)
            if self._left_s[job.number] <= 0:
                self._over(job, now_s)
            else:
                self._left_s[job.number] += self.outcome.preempted(job)
                asked = self._asked[row.job]
                self._pending[row.job] = replace(asked, kept=row.kept) if row.kept else asked
                self.watcher.left(job, row, self._had_s[job.number])
        self._leaving = []


def keep_places(
    plan: Plan,
    asked: Mapping[JobId, PendingRow],
    pending: dict[JobId, PendingRow],
    running: dict[JobId, RunningRow],
    keeping: set[JobId],
) -> set[JobId]:
    """Notes in the rows which places the plan keeps for whom; ``keeping`` is for whom the plan before did.

    ``asked`` has the rows of jobs for whom nothing is kept.
    """
    kept = {start.job: _places(start) for start in plan.keeps}
    for job in keeping - kept.keys():
        if job in pending:
            pending[job] = asked[job]
    for job, places in kept.items():
        if job in pending and pending[job].kept != places:
            pending[job] = replace(pending[job], kept=places)
        elif job in running:
            running[job] = replace(running[job], kept=places)
    return set(kept)


def _places(start: Start) -> tuple[RunningTask, ...]:
    return tuple(RunningTask(task.node, task.gpus, 0, 0, rank=task.rank) for task in start.tasks)


def _id(job: TracedJob) -> JobId:
    return JobId(f"{job.number:06d}")


class _Rows:
    """Makes the rows of the photograph; those of nodes anew only when what they say changed."""

    def __init__(self, replay: Replay) -> None:
        projects = sorted({job.project for job in replay.jobs} | set(replay.quotas))
        self._per_node = replay.size.gpus_per_node
        self._pools = (PoolRow(POOL, "trace"),)
        self._projects = tuple(ProjectRow(ProjectId(name), name, None, 0.0) for name in projects)
        self._quotas = tuple(
            QuotaRow(ProjectId(name), POOL, gpus * WHOLE_MILLI, None)
            for name, gpus in sorted(replay.quotas.items())
        )
        self._free: dict[GpuUuid, GpuRow] = {}
        self._used: dict[GpuUuid, GpuRow] = {}
        self._nodes: dict[NodeId, NodeRow] = {}
        for n in range(replay.size.nodes):
            node = NodeId(f"n{n:04d}")
            gpus = [GpuRow(GpuUuid(f"{node}-{g}"), g, "GPU", 1) for g in range(self._per_node)]
            self._free.update({gpu.uuid: gpu for gpu in gpus})
            self._used.update({g.uuid: replace(g, used_milli=WHOLE_MILLI, whole=True) for g in gpus})
            self._nodes[node] = NodeRow(node, str(node), POOL, True, True, 0, 0, 0, 0, tuple(gpus))

    def pending(self, job: TracedJob) -> PendingRow:
        """The row of a waiting job. One that spans nodes and does not fill them comes in equal smaller tasks."""
        each = job.gpus if job.gpus <= self._per_node else math.gcd(job.gpus, self._per_node)
        return PendingRow(
            _id(job),
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

    def running(self, row: PendingRow, start: Start, now_s: float) -> RunningRow:
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

    def __init__(self, replay: Replay) -> None:
        self.now_s = float(replay.jobs[0].submitted_s)
        self._tau_s = replay.policy.half_life_s / math.log(2)
        self._held = dict.fromkeys(sorted({job.project for job in replay.jobs}), 0)
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

    def hold(self, job: TracedJob, sign: int) -> None:
        """Counts the GPUs of ``job`` in (+1) or out (-1)."""
        self._held[job.project] += sign * job.gpus

    def rows(self, now_s: float) -> tuple[UsageRow, ...]:
        """The rows of the photograph, made anew now and then."""
        if now_s >= self._made_s + USAGE_EVERY_S:
            self._made_s = now_s
            self._rows = tuple(
                UsageRow(ProjectId(name), POOL, UserId(name), past) for name, past in self._past.items()
            )
        return self._rows
