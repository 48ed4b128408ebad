"""Replays the recorded jobs of a pool on its present nodes, and reports what each project gets.

Two replays that differ only in quotas are compared, so differences are due to the quotas.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from scheduler.core.decide import decide
from scheduler.core.model.plan import JobPlacement
from scheduler.core.model.policy import Policy
from scheduler.core.model.snapshot import (
    WHOLE_MILLI,
    JobId,
    NodeRow,
    PendingRow,
    PoolId,
    ProjectId,
    RunningRow,
    RunningTask,
    Snapshot,
)
from scheduler.core.session.cache import DecisionCache
from scheduler.replay.metrics import ReplayResult, percentile, restart_cost_s
from scheduler.replay.simulator import SimulationConfig, SimulationHook, Simulator, SnapshotRows
from scheduler.replay.trace import ClusterSize, TraceJob


@dataclass(frozen=True, slots=True)
class HistoryJob:
    """A job that was submitted or ran in the period, and how long it ran in it.

    ``row`` is its request; ``submitted_s`` is at least the start of the period.
    """

    row: PendingRow
    duration_s: int


@dataclass(frozen=True, slots=True)
class ProjectOutcome:
    """What a project got in the period. Waits are to the first start, of jobs that started; None without one.

    ``served_percent`` is the part that it got of the GPU-hours that its jobs needed.
    """

    jobs: int
    never_started: int
    wait_p50_s: float | None
    wait_p90_s: float | None
    gpu_hours: float
    served_percent: float
    preemptions: int


Progress = Callable[[float], None]
"""Called with the part of the replay that is done, 0 to 1; may raise to end it."""


def replay_history(
    snapshot: Snapshot,
    policy: Policy,
    pool: PoolId,
    jobs: Sequence[HistoryJob],
    period_s: tuple[float, float],
    progress: Progress,
) -> dict[ProjectId, ProjectOutcome]:
    """Return the outcome of each project with jobs, with the nodes, projects and quotas of the snapshot.

    ``jobs`` are ordered by ``row.submitted_s``. Running and pending jobs of the snapshot do not take part.
    """
    if not jobs:
        return {}
    trace = [
        TraceJob(
            number,
            str(job.row.project),
            math.ceil(job.row.submitted_s),
            job.duration_s,
            math.ceil(job.row.total_milli / WHOLE_MILLI),
        )
        for number, job in enumerate(jobs)
    ]
    rows = _HistoryRows(snapshot, pool, [job.row for job in jobs])
    result = _ProjectResult(trace, ClusterSize(1, 1), period_s, [job.row.total_milli for job in jobs])
    decide_without_verdicts = partial(decide, cache=DecisionCache(), explain=False)
    config = SimulationConfig(trace, result.size, {}, policy, decide_without_verdicts, pool)
    Simulator(config, _ProgressHook(period_s, progress), rows, result).run()
    return result.by_project()


class _HistoryRows(SnapshotRows):
    """The nodes of a snapshot without their jobs, and requests as they were recorded."""

    def __init__(self, snapshot: Snapshot, pool: PoolId, requests: Sequence[PendingRow]) -> None:
        self._pools = tuple(row for row in snapshot.pools if row.id == pool)
        self._projects = snapshot.projects
        self._quotas = tuple(row for row in snapshot.quotas if row.pool == pool)
        self._nodes = {row.id: _empty(row) for row in snapshot.nodes if row.pool == pool}
        self._topologies = snapshot.topologies
        self._requests = [
            replace(
                row,
                job=JobId(f"{number:06d}"),
                pools=(pool,),
                submitted_s=float(math.ceil(row.submitted_s)),
                held=False,
                not_before_s=None,
                min_tasks=None,
                dependencies=(),
                nominated_tasks=(),
                avoid_nodes=row.ineligible_nodes,
            )
            for number, row in enumerate(requests)
        ]

    def pending(self, job: TraceJob) -> PendingRow:
        return self._requests[job.number]

    def running(self, row: PendingRow, start: JobPlacement, now_s: float) -> RunningRow:
        asked = row.request
        tasks = tuple(
            RunningTask(task.node, task.gpus, asked.cpu_milli, asked.memory_mib, share_mib=asked.share_mib)
            for task in start.tasks
        )
        pool, limit_s = row.pools[0], row.time_limit_s
        return RunningRow(
            row.job, row.project, row.user, pool, row.priority, row.preemptible, now_s, limit_s, tasks
        )

    def hold(self, row: RunningRow, sign: int) -> None:
        for task in row.tasks:
            node = self._nodes[task.node]
            milli = {share.uuid: share.milli for share in task.gpus}
            gpus = tuple(
                replace(
                    gpu,
                    used_milli=gpu.used_milli + sign * milli[gpu.uuid],
                    exclusive=sign > 0 and milli[gpu.uuid] == WHOLE_MILLI,
                )
                if gpu.uuid in milli
                else gpu
                for gpu in node.gpus
            )
            self._nodes[task.node] = replace(
                node,
                gpus=gpus,
                cpu_used_milli=node.cpu_used_milli + sign * task.cpu_milli,
                memory_used_mib=node.memory_used_mib + sign * task.memory_mib,
            )


def _empty(node: NodeRow) -> NodeRow:
    gpus = tuple(replace(gpu, used_milli=0, exclusive=False) for gpu in node.gpus)
    return replace(node, gpus=gpus, cpu_used_milli=0, memory_used_mib=0)


class _ProgressHook(SimulationHook):
    def __init__(self, period_s: tuple[float, float], progress: Progress) -> None:
        self._begin_s, self._end_s = period_s
        self._progress = progress

    def before_decision(self, running: Mapping[JobId, RunningRow], now_s: float) -> None:
        self._progress(min(1.0, (now_s - self._begin_s) / (self._end_s - self._begin_s)))


class _ProjectResult(ReplayResult):
    """Counts GPU time within the period, and preemptions, by project."""

    def __init__(
        self,
        jobs: Sequence[TraceJob],
        size: ClusterSize,
        period_s: tuple[float, float],
        total_milli: Sequence[int],
    ) -> None:
        super().__init__(jobs, size)
        self._period_s, self._total_milli = period_s, total_milli
        self._milli_s: Counter[str] = Counter()
        self._preempted: Counter[str] = Counter()

    def add_run(self, job: TraceJob, from_s: float, to_s: float) -> None:
        low, high = self._period_s
        held_s = max(0.0, min(to_s, high) - max(from_s, low))
        self._milli_s[job.project] += self._total_milli[job.number] * held_s  # type: ignore[assignment]

    def add_preemption(self, job: TraceJob) -> int:
        self._preempted[job.project] += 1
        return restart_cost_s(job.gpus)

    def by_project(self) -> dict[ProjectId, ProjectOutcome]:
        groups: dict[str, list[TraceJob]] = defaultdict(list)
        for job in self.jobs:
            groups[job.project].append(job)
        return {ProjectId(name): self._outcome(name, mine) for name, mine in sorted(groups.items())}

    def _outcome(self, project: str, jobs: Sequence[TraceJob]) -> ProjectOutcome:
        high = self._period_s[1]
        started = [job for job in jobs if self.started_s[job.number] < high]
        waits_s = sorted(self.started_s[job.number] - job.submitted_s for job in started)
        needed_milli_s = sum(self._total_milli[job.number] * job.duration_s for job in jobs)
        got_milli_s = self._milli_s[project]
        return ProjectOutcome(
            jobs=len(jobs),
            never_started=len(jobs) - len(started),
            wait_p50_s=percentile(waits_s, 0.5) if waits_s else None,
            wait_p90_s=percentile(waits_s, 0.9) if waits_s else None,
            gpu_hours=round(got_milli_s / WHOLE_MILLI / 3600, 2),
            served_percent=round(100 * min(1.0, got_milli_s / needed_milli_s), 1),
            preemptions=self._preempted[project],
        )


def fairness(outcomes: Mapping[ProjectId, ProjectOutcome]) -> float | None:
    """Return Jain's index of the served parts: 1 if all projects got an equal part of what they needed.

    ``(sum x)^2 / (n sum x^2)`` (Jain, Chiu and Hawe 1984).
    """
    shares = [each.served_percent for each in outcomes.values()]
    squares = math.fsum(share * share for share in shares)
    return round(math.fsum(shares) ** 2 / (len(shares) * squares), 4) if squares else None
