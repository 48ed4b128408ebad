"""Reads metrics per minute for charts: of one node, or of the GPUs of one job."""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass, field
from typing import Any

from django.utils import timezone

from portal.access import Permission, Requester, require_permission
from portal.models import Allocation, Job, Node, NodeMetricsMinute, Task

MAX_SPAN = dt.timedelta(days=7)
DEFAULT_SPAN = dt.timedelta(hours=1)


@dataclass
class GpuSeries:
    """One GPU with a value per minute; None if unknown."""

    uuid: str
    node: str
    index: int
    model: str
    utilisation_percent: list[float | None] = field(default_factory=list)
    memory_used_mib: list[float | None] = field(default_factory=list)
    power_watts: list[float | None] = field(default_factory=list)
    temperature_c: list[float | None] = field(default_factory=list)
    energy_joules: list[float | None] = field(default_factory=list)


@dataclass
class TaskSeries:
    rank: int
    node: str
    cpu_percent: list[float | None] = field(default_factory=list)
    memory_mib: list[float | None] = field(default_factory=list)


@dataclass
class MetricSeries:
    """Minutes as Unix seconds, and the values of each."""

    minutes_s: list[int] = field(default_factory=list)
    gpus: list[GpuSeries] = field(default_factory=list)
    tasks: list[TaskSeries] = field(default_factory=list)
    cpu_percent: list[float | None] = field(default_factory=list)
    memory_used_mib: list[float | None] = field(default_factory=list)

    @property
    def energy_joules(self) -> float:
        """Measured energy of all GPUs over the period."""
        return sum(joules or 0.0 for gpu in self.gpus for joules in gpu.energy_joules)


_COLUMNS = ("utilisation_percent", "memory_used_mib", "power_watts", "temperature_c", "energy_joules")


def read_node_series(requester: Requester, node: Node) -> MetricSeries:
    """Return a node's minutes of the last hour."""
    require_permission(requester, Permission.VIEW, node)
    begin = _range_start(None)
    series = MetricSeries(
        gpus=[
            GpuSeries(gpu.uuid, node.public_id, gpu.index, gpu.model)
            for gpu in node.gpus.filter(present=True)
        ]
    )
    for row in NodeMetricsMinute.objects.filter(node=node, minute__gte=begin).order_by("minute"):
        series.minutes_s.append(int(row.minute.timestamp()))
        series.cpu_percent.append(row.cpu_percent)
        series.memory_used_mib.append(row.node_memory_used_mib)
        places = {uuid: place for place, uuid in enumerate(row.gpu_uuids)}
        for gpu in series.gpus:
            _append(gpu, row, places.get(gpu.uuid))
    return series


def read_job_series(requester: Requester, job: Job, since: dt.datetime | None = None) -> MetricSeries:
    """Return the minutes of a job's newest attempt: its GPUs while allocated, CPU and memory per rank."""
    require_permission(requester, Permission.VIEW, job)
    tasks = list(
        Task.objects.filter(attempt__job=job, attempt__number=job.attempt_count)
        .select_related("node", "attempt")
        .order_by("rank")
    )
    if not tasks:
        return MetricSeries()
    held = list(
        Allocation.objects.filter(task__in=tasks)
        .select_related("gpu__node")
        .order_by("task__rank", "gpu__index")
    )
    begin = max(_range_start(since), _floor_minute(tasks[0].attempt.created_at))
    ended = [row.ended_at for row in held if row.ended_at is not None]
    end = max(ended) if held and len(ended) == len(held) else timezone.now()
    series = MetricSeries(
        gpus=[GpuSeries(row.gpu.uuid, row.gpu.node.public_id, row.gpu.index, row.gpu.model) for row in held],
        tasks=[TaskSeries(task.rank, task.node.public_id) for task in tasks],
    )
    by_minute: dict[int, dict[str, NodeMetricsMinute]] = {}
    nodes = {task.node_id for task in tasks}
    rows = NodeMetricsMinute.objects.filter(node__in=nodes, minute__gte=begin, minute__lte=end)
    for row in rows.select_related("node").order_by("minute"):
        by_minute.setdefault(int(row.minute.timestamp()), {})[row.node.public_id] = row
    for minute_s, found in sorted(by_minute.items()):
        series.minutes_s.append(minute_s)
        for gpu in series.gpus:
            of_node = found.get(gpu.node)
            places = {uuid: place for place, uuid in enumerate(of_node.gpu_uuids)} if of_node else {}
            _append(gpu, of_node, places.get(gpu.uuid))
        for task in series.tasks:
            used = _task(found.get(task.node), job.public_id, task.rank)
            task.cpu_percent.append(used.get("cpu_percent"))
            task.memory_mib.append(used.get("memory_mib"))
    return series


def _append(gpu: GpuSeries, row: NodeMetricsMinute | None, index: int | None) -> None:
    for name in _COLUMNS:
        values = getattr(row, name) if row is not None and index is not None else []
        getattr(gpu, name).append(values[index] if index is not None and index < len(values) else None)


def _task(row: NodeMetricsMinute | None, job: str, rank: int) -> dict[str, Any]:
    if row is None:
        return {}
    return next((task for task in row.tasks if task["job"] == job and task["rank"] == rank), {})


def _range_start(since: dt.datetime | None) -> dt.datetime:
    now = timezone.now()
    return _floor_minute(max(since or now - DEFAULT_SPAN, now - MAX_SPAN))


def _floor_minute(moment: dt.datetime) -> dt.datetime:
    return moment.replace(second=0, microsecond=0)
