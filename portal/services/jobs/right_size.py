"""Reads what the user's past runs of the same template or environment used, and what would have been enough."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from django.db.models import Aggregate, Max, OuterRef, Subquery, Sum
from django.utils.translation import gettext as _

from portal.domain.formatting import format_distinct_memories, format_memory
from portal.models import Attempt, AttemptGpuDay, Environment, Template, User
from portal.services.jobs.submission import JobRequest

RUNS_READ = 8
MIN_RUNS = 3
MIN_MEASURED_S = 300
"""Shorter runs say little."""
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
        known = [
            _("{used} of {held} of GPU memory").format(used=used, held=held),
            _("{used} of {held}").format(used=f"{self.used_gpus:.1f}", held=_count(self.gpus)),
        ]
        if "memory_mib" in self.fields:
            known.append(_("{memory} of memory").format(memory=format_memory(self.memory_used_mib or 0)))
        enough = []
        if "gpus_per_task" in self.fields:
            enough.append(_count(self.fields["gpus_per_task"]))
        if "memory_mib" in self.fields:
            enough.append(_("{memory} of memory").format(memory=format_memory(self.fields["memory_mib"])))
        text = (
            _("Your last {runs} runs of this template used at most {used}: {enough} would do.")
            if self.of == "template"
            else _("Your last {runs} runs of this environment used at most {used}: {enough} would do.")
        )
        used = _("{first} and {last}").format(first=", ".join(known[:-1]), last=known[-1])
        return text.format(runs=self.runs, used=used, enough=_(" and ").join(enough))


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
            job__gpus_per_task__gt=0, ended_at__isnull=False,
            **{f"job__{kind}": of},
        )
        .select_related("job")
        .annotate(
            measured_gpu_s=_of_days(Sum("measured_gpu_s")),
            busy_gpu_s=_of_days(Sum("busy_gpu_s")),
            gpu_peak_mib=_of_days(Max("peak_memory_mib")),
            gpu_memory_mib=Max("task_rows__allocations__gpu__memory_mib"),
            peak_memory_mib=Max("task_rows__peak_memory_mib"),
        )
        .filter(measured_gpu_s__gt=0)
        .order_by("-pk")[:RUNS_READ]
    )  # fmt: skip
    runs = [
        run
        for run in rows
        if run.measured_gpu_s >= MIN_MEASURED_S * run.job.gpus_per_task
        and run.gpu_memory_mib
        and run.gpu_peak_mib is not None
    ]
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
    fullest = max(runs, key=lambda run: run.gpu_peak_mib)
    return RightSizeAdvice(
        len(runs),
        kind,
        round(_busy_gpus(busiest), 1),
        busiest.job.gpus_per_task,
        round(fullest.gpu_peak_mib),
        fullest.gpu_memory_mib,
        max(peaks) if "memory_mib" in fields else None,
        fields,
    )


def _of_days(total: Aggregate) -> Subquery:
    days = AttemptGpuDay.objects.filter(attempt=OuterRef("pk")).order_by().values("attempt")
    return Subquery(days.annotate(total=total).values("total"))


def _busy_gpus(run: Any) -> float:
    return float(run.busy_gpu_s / run.measured_gpu_s * run.job.gpus_per_task)


def _gpus_needed(run: Any) -> int:
    """Return how many GPUs the run needed: as busy as they were, and with the memory of all of them."""
    memory_mib = float(run.gpu_peak_mib * run.job.gpus_per_task)
    return max(
        1,
        math.ceil(_busy_gpus(run) - BUSY_TOLERANCE),
        math.ceil(memory_mib / (GPU_MEMORY_PART * float(run.gpu_memory_mib))),
    )
