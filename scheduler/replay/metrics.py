"""Metrics of a replay: completion and waiting times of all jobs of a trace."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from scheduler.replay.trace import ClusterSize, TraceJob

LARGE_JOB_GPUS = 16
"""Jobs of at least this size are reported separately: they starve when smaller jobs overtake them."""

SINGLE_GPU_COST_S, NODE_COST_S, GANG_COST_S = 7, 30, 60


def restart_cost_s(gpus: int) -> int:
    """Return the seconds of work that a preemption adds to a job; its progress is kept."""
    if gpus == 1:
        return SINGLE_GPU_COST_S
    return NODE_COST_S if gpus <= 8 else GANG_COST_S


@dataclass(slots=True)
class ReplayResult:
    """First start and end of each job by number, and the cost of preemption."""

    jobs: Sequence[TraceJob]
    size: ClusterSize
    started_s: list[float] = field(default_factory=list)
    ended_s: list[float] = field(default_factory=list)
    preemptions: int = 0
    lost_gpu_s: float = 0.0
    busy_gpu_s: float = 0.0  # between the first and the last submit

    def __post_init__(self) -> None:
        self.started_s = [math.nan] * len(self.jobs)
        self.ended_s = [math.nan] * len(self.jobs)

    def add_run(self, job: TraceJob, from_s: float, to_s: float) -> None:
        """Count a period in which ``job`` held its GPUs."""
        low, high = self.jobs[0].submitted_s, self.jobs[-1].submitted_s
        self.busy_gpu_s += job.gpus * max(0.0, min(to_s, high) - max(from_s, low))

    def add_preemption(self, job: TraceJob) -> int:
        """Count a preemption of ``job``; return the seconds that it adds."""
        cost_s = restart_cost_s(job.gpus)
        self.preemptions += 1
        self.lost_gpu_s += cost_s * job.gpus
        return cost_s

    def wait_s(self, job: TraceJob) -> float:
        """Return completion time minus duration: queueing and the cost of preemptions."""
        return self.ended_s[job.number] - job.submitted_s - job.duration_s

    def summary(self) -> dict[str, Any]:
        """Return the metrics of one JSON line; a mean over no job is None."""
        jobs = self.jobs
        completion = sorted(self.ended_s[job.number] - job.submitted_s for job in jobs)
        waits = [self.wait_s(job) for job in jobs]
        by_project: dict[str, list[float]] = {}
        for job, wait_s in zip(jobs, waits, strict=True):
            by_project.setdefault(job.project, []).append(wait_s)
        span_s = max(1, jobs[-1].submitted_s - jobs[0].submitted_s)
        return {
            "jobs": len(jobs),
            "mean_completion_s": _mean(completion),
            "p50_completion_s": percentile(completion, 0.50),
            "p95_completion_s": percentile(completion, 0.95),
            "p99_completion_s": percentile(completion, 0.99),
            "mean_wait_s": _mean(waits),
            "mean_wait_16plus_s": _mean(
                [w for job, w in zip(jobs, waits, strict=True) if job.gpus >= LARGE_JOB_GPUS]
            ),
            "max_wait_s": round(max(waits), 1),
            "utilisation": round(self.busy_gpu_s / (self.size.gpus * span_s), 4),
            "preemptions": self.preemptions,
            "lost_gpu_s": round(self.lost_gpu_s),
            "wait_by_project_s": {name: _mean(found) for name, found in sorted(by_project.items())},
        }


def _mean(values: Sequence[float]) -> float | None:
    return round(math.fsum(values) / len(values), 1) if values else None


def percentile(sorted_values: Sequence[float], fraction: float) -> float:
    """Return the percentile ``fraction`` (0 to 1), linearly interpolated."""
    at = fraction * (len(sorted_values) - 1)
    low = math.floor(at)
    high = min(low + 1, len(sorted_values) - 1)
    return round(sorted_values[low] + (sorted_values[high] - sorted_values[low]) * (at - low), 1)
