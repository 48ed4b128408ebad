"""Reads the step times of the ranks of an attempt, what their GPUs did, and which rank slows the attempt down."""

from __future__ import annotations

import datetime as dt
from collections import defaultdict
from dataclasses import dataclass
from statistics import mean, median, median_low
from typing import NamedTuple

from django.utils import timezone

from portal.domain.jobs.stragglers import (
    GpuState,
    RankReport,
    StepParts,
    StepTime,
    Straggler,
    find_straggler,
    likely_cause,
    slow_count,
    step_parts,
    step_times,
)
from portal.models import Attempt, Gpu, NodeMetricsMinute, RankProgress, Task

GPU_SPAN = dt.timedelta(minutes=10)
"""Span of the mean state of a GPU."""
SHOWN_SPAN = dt.timedelta(minutes=30)


class GpuMinute(NamedTuple):
    """Means of the GPUs of a rank over a minute; None: not measured. ``at_s`` is the Unix time of its start."""

    at_s: float
    utilisation_percent: float | None
    memory_percent: float | None


@dataclass(frozen=True)
class RankRow:
    """One rank: step times oldest first, their median, and the state of its GPUs."""

    task: Task
    times: list[StepTime]
    median_s: float | None
    units: float | None
    gpu: GpuState
    minutes: list[GpuMinute]
    memory_mib: float | None
    """Memory used on its GPUs in the last minute."""
    parts: StepParts | None
    is_straggler: bool = False

    @property
    def rank(self) -> int:
        return self.task.rank

    @property
    def node(self) -> str:
        return self.task.node.name

    @property
    def gpus(self) -> list[Gpu]:
        return [allocation.gpu for allocation in self.task.allocations.all()]

    @property
    def has_gpu_problem(self) -> bool:
        return any(gpu.health_reason or gpu.ecc_uncorrected for gpu in self.gpus)


@dataclass(frozen=True)
class RankOverview:
    """All ranks in order, the slow one with the likely cause, and the median step time."""

    rows: list[RankRow]
    straggler: Straggler | None
    node: str
    cause: str
    median_s: float | None

    @property
    def slow_since(self) -> dt.datetime | None:
        return dt.datetime.fromtimestamp(self.straggler.since_s, dt.UTC) if self.straggler else None

    @property
    def slow_row(self) -> RankRow | None:
        return next((row for row in self.rows if row.is_straggler), None)

    @property
    def slow_intervals(self) -> int:
        """Number of the intervals of the slow rank in which it was slow."""
        row = self.slow_row
        return slow_count(row.times, self.straggler.median_s) if row and self.straggler else 0

    @property
    def usual_parts(self) -> StepParts | None:
        """The median parts of a step of the other ranks; None unless they report their own work."""
        known = [row.parts for row in self.rows if row.parts and not row.is_straggler]
        if not known:
            return None
        return StepParts(
            median_low([each.own_s for each in known]), median_low([each.wait_s for each in known])
        )

    def lost_gpu_s(self, until: dt.datetime) -> float:
        """Return the GPU-seconds in which the other ranks waited for the slow one, since it is slow."""
        if self.straggler is None:
            return 0.0
        milli = sum(
            allocation.milli
            for row in self.rows
            if not row.is_straggler
            for allocation in row.task.allocations.all()
        )
        seconds = max(0.0, until.timestamp() - self.straggler.since_s)
        return seconds * self.straggler.waiting_fraction * milli / 1000


def rank_overview(attempt: Attempt) -> RankOverview:
    """Return the ranks of an attempt, in two queries beside its tasks and allocations."""
    tasks = list(attempt.task_rows.all())
    reports = {
        row.rank: [RankReport(*each) for each in row.reports]
        for row in RankProgress.objects.filter(attempt=attempt)
    }
    times = {task.rank: step_times(reports.get(task.rank, [])) for task in tasks}
    slow, measured = find_straggler(times), _gpu_minutes(attempt, tasks)
    recent = (attempt.ended_at or timezone.now()) - GPU_SPAN
    states = {task.rank: _gpu_state(task, measured[task.rank], recent) for task in tasks}
    rows = [
        RankRow(
            task,
            known := times[task.rank],
            median(each.seconds for each in known) if known else None,
            reports[task.rank][-1].units if reports.get(task.rank) else None,
            states[task.rank],
            [each.shown for each in measured[task.rank]],
            measured[task.rank][-1].memory_mib if measured[task.rank] else None,
            step_parts(reports.get(task.rank, [])),
            slow is not None and slow.rank == task.rank,
        )
        for task in tasks
    ]
    medians = [row.median_s for row in rows if row.median_s is not None]
    if slow is None:
        return RankOverview(rows, None, "", "", median_low(medians) if medians else None)
    cause = likely_cause(states[slow.rank], [state for rank, state in states.items() if rank != slow.rank])
    node = next(row.node for row in rows if row.is_straggler)
    return RankOverview(rows, slow, node, cause, slow.median_s)


class _Minute(NamedTuple):
    """What a minute measured of the GPUs of a rank: means, and memory in all."""

    at: dt.datetime
    utilisation_percent: float | None
    temperature_c: float | None
    power_watts: float | None
    memory_mib: float | None
    memory_percent: float | None

    @property
    def shown(self) -> GpuMinute:
        return GpuMinute(self.at.timestamp(), self.utilisation_percent, self.memory_percent)


def _gpu_minutes(attempt: Attempt, tasks: list[Task]) -> dict[int, list[_Minute]]:
    """Return the last minutes of the GPUs of each rank, oldest first, in one query."""
    until = attempt.ended_at or timezone.now()
    since = max(until - SHOWN_SPAN, attempt.running_at or until)
    rows = NodeMetricsMinute.objects.filter(
        node__in={task.node_id for task in tasks}, minute__gte=since, minute__lte=until
    )
    columns = ("gpu_uuids", "utilisation_percent", "temperature_c", "power_watts", "memory_used_mib")
    by_minute: dict[dt.datetime, dict[str, tuple[float | None, ...]]] = defaultdict(dict)
    for minute, uuids, *values in rows.order_by("minute").values_list("minute", *columns):
        by_minute[minute] |= {uuid: state for uuid, *state in zip(uuids, *values, strict=False)}
    return {
        task.rank: [_of_gpus(minute, task, found) for minute, found in by_minute.items()] for task in tasks
    }


def _of_gpus(at: dt.datetime, task: Task, found: dict[str, tuple[float | None, ...]]) -> _Minute:
    gpus = [allocation.gpu for allocation in task.allocations.all()]
    samples = [found[gpu.uuid] for gpu in gpus if gpu.uuid in found]
    used, warm, power = (_mean([sample[place] for sample in samples]) for place in range(3))
    memory = [sample[3] for sample in samples if sample[3] is not None]
    size_mib = sum(gpu.memory_mib for gpu in gpus)
    percent = 100 * sum(memory) / size_mib if memory and size_mib else None
    return _Minute(at, used, warm, power, sum(memory) if memory else None, percent)


def _gpu_state(task: Task, minutes: list[_Minute], since: dt.datetime) -> GpuState:
    """Return the mean state of the GPUs of a rank since then."""
    recent = [each for each in minutes if each.at >= since]
    problem = next(
        (
            allocation.gpu.health_reason
            for allocation in task.allocations.all()
            if allocation.gpu.health_reason
        ),
        "",
    )
    return GpuState(
        _mean([each.utilisation_percent for each in recent]),
        _mean([each.temperature_c for each in recent]),
        _mean([each.power_watts for each in recent]),
        problem,
    )


def _mean(values: list[float | None]) -> float | None:
    known = [each for each in values if each is not None]
    return mean(known) if known else None
