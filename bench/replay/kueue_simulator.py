"""Simulates Kueue's scenario on a clock that advances by the real duration of each cycle.

A cohort is a pool with a root project, a queue a project below it. The scenario is about quota only, so the
GPUs of a cohort are on one node and placement never fails.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from scheduler.core.model.plan import Eviction, JobPlacement
from scheduler.core.model.policy import Policy
from scheduler.core.model.snapshot import (
    WHOLE_MILLI,
    GpuRow,
    GpuShare,
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
    UserId,
)
from scheduler.replay.simulator import Decide, apply_nominations


class Workload(NamedTuple):
    """One workload of a queue; times in seconds."""

    job: JobId
    kind: str  # its class: "small", "large", ...
    cohort: int
    queue: int
    created_s: float
    run_time_s: float
    priority: int
    gpus: int


@dataclass(frozen=True, slots=True)
class Cohorts:
    """Equal cohorts of equal queues; amounts in whole GPUs. ``borrowing_limit``: None is unlimited."""

    cohorts: int
    queues_per_cohort: int
    nominal_quota: int
    borrowing_limit: int | None

    @property
    def cohort_gpus(self) -> int:
        return self.queues_per_cohort * self.nominal_quota


class KueueSimulator:
    """A running scenario: arrivals and ends trigger cycles, one after the other.

    Arrivals and ends during a cycle are seen by the next. A preempted workload is gone at once and is queued
    again to run from the beginning, as in Kueue's own test.
    """

    def __init__(
        self,
        cohorts: Cohorts,
        workloads: Sequence[Workload],
        policy: Policy,
        decide: Decide,
        seconds: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.admitted_s: dict[JobId, float] = {}
        """When each workload was admitted, the last time if it was preempted."""
        self.decisions = self.preemptions = self.truncated_decisions = 0
        self.decide_s = self.commit_s = self.longest_cycle_s = 0.0
        self.busy_gpu_s = self.lost_gpu_s = self.wall_s = 0.0
        self._policy, self._decide, self._seconds = policy, decide, seconds
        self._arrivals = sorted(workloads, key=lambda each: (each.created_s, each.job))
        self._workload = {each.job: each for each in workloads}
        self._rows = _Rows(cohorts)
        self._pending: dict[JobId, PendingRow] = {}
        self._running: dict[JobId, RunningRow] = {}
        self._ends: list[tuple[float, JobId, float]] = []  # end, job, time of admission
        self._nominated: set[JobId] = set()
        self._base_s = 0.0  # simulated time without the current cycle
        self._cycle_started_s: float | None = None

    @property
    def now_s(self) -> float:
        """Return simulated seconds since the beginning."""
        return self._base_s + (
            0.0 if self._cycle_started_s is None else self._seconds() - self._cycle_started_s
        )

    def run(self) -> set[JobId]:
        """Run until nothing more can happen; return the workloads that were never admitted."""
        arrived, woken = 0, False
        while True:
            while self._ends and self._ends[0][0] <= self._base_s:
                ends_s, job, admitted_s = heapq.heappop(self._ends)
                if self.admitted_s.get(job) == admitted_s:
                    self._end(job, ends_s)
                    woken = True
            while arrived < len(self._arrivals) and self._arrivals[arrived].created_s <= self._base_s:
                workload = self._arrivals[arrived]
                self._pending[workload.job] = self._rows.pending(workload)
                arrived, woken = arrived + 1, True
            if woken and self._pending:
                woken = self._cycle()
                continue
            next_s = self._arrivals[arrived].created_s if arrived < len(self._arrivals) else math.inf
            next_s = min(next_s, self._ends[0][0] if self._ends else math.inf)
            if next_s == math.inf:
                return set(self._pending)
            self._base_s, woken = next_s, False

    def _cycle(self) -> bool:
        """Snapshot, decide, commit; return True when a further cycle is needed."""
        began_s = self._cycle_started_s = self._seconds()
        snapshot = self._rows.snapshot(self._base_s, self._running, self._pending)
        plan = self._decide(snapshot, self._policy)
        decided_s = self._seconds()
        gone = sum([self._evict(eviction) for eviction in plan.evictions])
        for start in plan.starts:
            self._start(start)
        self._nominated = apply_nominations(
            plan, self._rows.pending_rows, self._pending, self._running, self._nominated
        )
        ended_s = self._seconds()
        self._base_s, self._cycle_started_s = self._base_s + ended_s - began_s, None
        self.decisions += 1
        self.truncated_decisions += plan.truncated
        self.decide_s += decided_s - began_s
        self.commit_s += ended_s - decided_s
        self.longest_cycle_s = max(self.longest_cycle_s, ended_s - began_s)
        return gone > 0 or (plan.truncated and bool(plan.starts))

    def _start(self, start: JobPlacement) -> None:
        row, workload = self._pending.pop(start.job), self._workload[start.job]
        now_s = self.now_s
        self._running[row.job] = self._rows.running(row, start, now_s)
        self.admitted_s[row.job] = now_s
        heapq.heappush(self._ends, (now_s + workload.run_time_s, row.job, now_s))

    def _evict(self, eviction: Eviction) -> bool:
        """Evict and requeue a workload; return False when it ended meanwhile."""
        workload, now_s = self._workload[eviction.job], self.now_s
        ran_s = now_s - self.admitted_s[eviction.job]
        if ran_s >= workload.run_time_s:
            return False
        self._release(eviction.job, ran_s)
        del self.admitted_s[eviction.job]
        self._pending[eviction.job] = self._rows.pending(workload)
        self.preemptions += 1
        self.lost_gpu_s += workload.gpus * ran_s
        return True

    def _end(self, job: JobId, now_s: float) -> None:
        self._release(job, self._workload[job].run_time_s)
        self.wall_s = max(self.wall_s, now_s)

    def _release(self, job: JobId, ran_s: float) -> None:
        self._rows.free(self._running.pop(job))
        self.busy_gpu_s += self._workload[job].gpus * ran_s


class _Rows:
    """Snapshot rows, rebuilt only when they change."""

    def __init__(self, cohorts: Cohorts) -> None:
        most = None
        if cohorts.borrowing_limit is not None:
            most = (cohorts.nominal_quota + cohorts.borrowing_limit) * WHOLE_MILLI
        self._pools: list[PoolRow] = []
        self._projects: list[ProjectRow] = []
        self._quotas: list[QuotaRow] = []
        self._nodes: list[NodeRow] = []
        self._gpus: list[list[GpuRow]] = []
        self._changed: set[int] = set()
        self.pending_rows: dict[JobId, PendingRow] = {}
        for number in range(cohorts.cohorts):
            pool, top = PoolId(f"cohort{number:03}"), _project(number)
            self._pools.append(PoolRow(pool, pool))
            self._projects.append(ProjectRow(top, top, None, 0.0))
            self._quotas.append(QuotaRow(top, pool, cohorts.cohort_gpus * WHOLE_MILLI, None))
            for queue in range(cohorts.queues_per_cohort):
                name = _project(number, queue)
                self._projects.append(ProjectRow(name, name, top, float(queue)))
                self._quotas.append(QuotaRow(name, pool, cohorts.nominal_quota * WHOLE_MILLI, most))
            gpus = [
                GpuRow(GpuUuid(f"{number}-{index}"), index, "GPU", 1) for index in range(cohorts.cohort_gpus)
            ]
            self._gpus.append(gpus)
            self._nodes.append(NodeRow(NodeId(pool), pool, pool, True, True, 0, 0, 0, 0, tuple(gpus)))

    def pending(self, workload: Workload) -> PendingRow:
        """Return the row of a pending workload, the same object each time."""
        if workload.job not in self.pending_rows:
            project = _project(workload.cohort, workload.queue)
            self.pending_rows[workload.job] = PendingRow(
                workload.job, "", project, UserId(project), (self._pools[workload.cohort].id,),
                workload.created_s, workload.priority, True, 1,
                TaskRequest(workload.gpus, WHOLE_MILLI, 0, 0), None,
            )  # fmt: skip
        return self.pending_rows[workload.job]

    def running(self, row: PendingRow, start: JobPlacement, now_s: float) -> RunningRow:
        """Return the row of a workload that starts now, and allocate its GPUs."""
        tasks = tuple(RunningTask(task.node, task.gpus, 0, 0) for task in start.tasks)
        for task in start.tasks:
            self._set(task.gpus, held=True)
        return RunningRow(
            row.job, row.project, row.user, start.pool, row.priority, row.preemptible, now_s, None, tasks
        )

    def free(self, row: RunningRow) -> None:
        """Release the GPUs of a workload."""
        for task in row.tasks:
            self._set(task.gpus, held=False)

    def _set(self, shares: Sequence[GpuShare], *, held: bool) -> None:
        for share in shares:
            cohort, index = map(int, share.uuid.split("-"))
            gpu = self._gpus[cohort][index]
            self._gpus[cohort][index] = replace(gpu, used_milli=WHOLE_MILLI if held else 0, exclusive=held)
            self._changed.add(cohort)

    def snapshot(
        self, now_s: float, running: dict[JobId, RunningRow], pending: dict[JobId, PendingRow]
    ) -> Snapshot:
        for cohort in self._changed:
            self._nodes[cohort] = replace(self._nodes[cohort], gpus=tuple(self._gpus[cohort]))
        self._changed.clear()
        return Snapshot(
            now_s,
            tuple(self._pools),
            tuple(self._nodes),
            tuple(self._projects),
            tuple(self._quotas),
            (),
            tuple(running.values()),
            tuple(pending.values()),
        )


def _project(cohort: int, queue: int | None = None) -> ProjectId:
    return ProjectId(f"cohort{cohort:03}" if queue is None else f"cohort{cohort:03}-queue{queue:03}")
