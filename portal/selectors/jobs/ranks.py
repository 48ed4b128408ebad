"""Reads the step times of the ranks of an attempt, and which rank slows it down."""

from __future__ import annotations

import datetime as dt
from collections import defaultdict
from dataclasses import dataclass
from statistics import mean, median, median_low

from django.utils import timezone

from portal.domain.stragglers import (
    GpuState,
    RankReport,
    StepTime,
    Straggler,
    find_straggler,
    likely_cause,
    step_times,
)
from portal.models import Attempt, NodeMetricsMinute, RankProgress, Task

GPU_SPAN = dt.timedelta(minutes=10)


@dataclass(frozen=True)
class RankRow:
    """One rank: step times oldest first, their median, and the state of its GPUs."""

    task: Task
    times: list[StepTime]
    median_s: float | None
    units: float | None
    gpu: GpuState
    is_straggler: bool = False

    @property
    def rank(self) -> int:
        return self.task.rank

    @property
    def node(self) -> str:
        return self.task.node.name


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


def rank_overview(attempt: Attempt) -> RankOverview:
    """Return the ranks of an attempt, in two queries beside its tasks and allocations."""
    tasks = list(attempt.task_rows.all())
    reports = {
        row.rank: [RankReport(*each) for each in row.reports]
        for row in RankProgress.objects.filter(attempt=attempt)
    }
    times = {task.rank: step_times(reports.get(task.rank, [])) for task in tasks}
    slow, states = find_straggler(times), _gpu_states(attempt, tasks)
    rows = [
        RankRow(
            task,
            known := times[task.rank],
            median(each.seconds for each in known) if known else None,
            reports[task.rank][-1].units if reports.get(task.rank) else None,
            states[task.rank],
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


def _gpu_states(attempt: Attempt, tasks: list[Task]) -> dict[int, GpuState]:
    """Return the mean state of each rank's GPUs over the last minutes of the attempt."""
    until = attempt.ended_at or timezone.now()
    measured: dict[str, list[tuple[float | None, ...]]] = defaultdict(list)
    minutes = NodeMetricsMinute.objects.filter(
        node__in={task.node_id for task in tasks}, minute__gte=until - GPU_SPAN, minute__lte=until
    )
    columns = ("gpu_uuids", "utilisation_percent", "temperature_c", "power_watts")
    for uuids, *values in minutes.values_list(*columns):
        for uuid, *state in zip(uuids, *values, strict=False):
            measured[uuid].append(tuple(state))
    states = {}
    for task in tasks:
        gpus = [allocation.gpu for allocation in task.allocations.all()]
        samples = [sample for gpu in gpus for sample in measured[gpu.uuid]]
        used, warm, power = (_mean([sample[place] for sample in samples]) for place in range(3))
        problem = next((gpu.health_reason for gpu in gpus if gpu.health_reason), "")
        states[task.rank] = GpuState(used, warm, power, problem)
    return states


def _mean(values: list[float | None]) -> float | None:
    known = [each for each in values if each is not None]
    return mean(known) if known else None
