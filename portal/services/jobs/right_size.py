"""Reads what the user's past runs of the same template or environment used, and what would have been enough."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from django.db.models import Max

from portal.domain.formatting import format_distinct_memories, format_memory
from portal.models import Attempt, Environment, Template, User
from portal.services.jobs.submission import JobRequest

RUNS_READ = 8
MIN_RUNS = 3
MIN_SAMPLES_PER_GPU = 300
"""Shorter runs (in seconds) say little."""
BUSY_TOLERANCE = 0.25
"""1.25 busy GPUs still count as one."""
GPU_MEMORY_PART = 0.9
"""The memory of all GPUs must fit into this part of the memory of fewer."""
MEMORY_MARGIN = 1.25
MAX_MEMORY_PART = 0.5
"""Less memory is suggested only if this part of the requested is enough."""


@dataclass(frozen=True)
class RightSizeAdvice:
    """A smaller request that would have been enough for all of the latest runs; ``fields`` are its new values.

    ``used_gpus`` is the highest mean number of busy GPUs, and ``gpus`` the number held then. GPU memory is that
    of one GPU; memory is that of one task, None if unknown.
    """

    runs: int
    of: str
    used_gpus: float
    gpus: int
    gpu_memory_used_mib: int
    gpu_memory_mib: int
    memory_used_mib: int | None
    fields: dict[str, Any]

    @property
    def message(self) -> str:
        used, held = format_distinct_memories(self.gpu_memory_used_mib, self.gpu_memory_mib)
        known = [f"{used} of {held} of GPU memory", f"{self.used_gpus:.1f} of {_count(self.gpus)}"]
        if "memory_mib" in self.fields:
            known.append(f"{format_memory(self.memory_used_mib or 0)} of memory")
        enough = []
        if "gpus_per_task" in self.fields:
            enough.append(_count(self.fields["gpus_per_task"]))
        if "memory_mib" in self.fields:
            enough.append(f"{format_memory(self.fields['memory_mib'])} of memory")
        return (
            f"Your last {self.runs} runs of this {self.of} used at most {', '.join(known[:-1])} and {known[-1]}: "
            f"{' and '.join(enough)} would do."
        )


def _count(gpus: int) -> str:
    return f"{gpus} GPU" if gpus == 1 else f"{gpus} GPUs"


def right_size_advice(user: User, request: JobRequest) -> RightSizeAdvice | None:
    """Return what the user's latest runs say about a request; None unless at least three agree. One query."""
    if not request.gpus_per_task or request.tasks > 1 or request.roles or request.milli_per_gpu != 1000:
        return None
    of: Template | Environment = request.template or request.environment
    kind = "template" if request.template else "environment"
    rows = (
        Attempt.objects.filter(
            job__owner=user, job__kind=request.kind, job__tasks=1, job__milli_per_gpu=1000,
            job__gpus_per_task__gt=0, ended_at__isnull=False, gpu_use__samples__gte=MIN_SAMPLES_PER_GPU,
            **{f"job__{kind}": of},
        )
        .select_related("gpu_use", "job")
        .annotate(
            gpu_memory_mib=Max("task_rows__allocations__gpu__memory_mib"),
            peak_memory_mib=Max("task_rows__peak_memory_mib"),
        )
        .order_by("-pk")[:RUNS_READ]
    )  # fmt: skip
    runs = [run for run in rows if run.gpu_use.samples >= MIN_SAMPLES_PER_GPU * run.job.gpus_per_task]
    runs = [run for run in runs if run.gpu_memory_mib]
    if len(runs) < MIN_RUNS:
        return None
    busiest = max(runs, key=_busy_gpus)
    fields: dict[str, Any] = {}
    enough = max(map(_gpus_needed, runs))
    if enough < request.gpus_per_task:
        fields["gpus_per_task"] = enough
    peaks = [run.peak_memory_mib for run in runs]
    if all(peak is not None for peak in peaks):
        memory_mib = max(1024, math.ceil(max(peaks) * MEMORY_MARGIN / 1024) * 1024)
        if memory_mib <= request.memory_mib * MAX_MEMORY_PART:
            fields["memory_mib"] = memory_mib
    if not fields:
        return None
    fullest = max(runs, key=lambda run: run.gpu_use.peak_memory_mib)
    return RightSizeAdvice(
        len(runs),
        kind,
        round(_busy_gpus(busiest), 1),
        busiest.job.gpus_per_task,
        round(fullest.gpu_use.peak_memory_mib),
        fullest.gpu_memory_mib,
        max(peaks) if "memory_mib" in fields else None,
        fields,
    )


def _busy_gpus(run: Any) -> float:
    return float(run.gpu_use.mean_utilisation_percent / 100 * run.job.gpus_per_task)


def _gpus_needed(run: Any) -> int:
    """Return how many GPUs the run needed: as busy as they were, and with the memory of all of them."""
    memory_mib = run.gpu_use.peak_memory_mib * run.job.gpus_per_task
    return max(
        1,
        math.ceil(_busy_gpus(run) - BUSY_TOLERANCE),
        math.ceil(memory_mib / (GPU_MEMORY_PART * run.gpu_memory_mib)),
    )
