"""Reads metrics per minute, or per second of a short run, for charts: of one node, or of the GPUs of one job."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from django.utils import timezone

from portal.access import Permission, Requester, require_permission
from portal.models import Allocation, Attempt, AttemptSeconds, Job, Node, NodeMetricsMinute, Task
from portal.models.reports.usage import SHORT_RUN_S
from portal.valkey.sample_cache import attempt_seconds

MAX_SPAN = dt.timedelta(days=7)
DEFAULT_SPAN = dt.timedelta(hours=1)


@dataclass
class GpuSeries:
    """One GPU with a value at each time; None if unknown."""

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
    """Times in Unix seconds, a minute or a second apart, and the values at each."""

    times_s: list[int] = field(default_factory=list)
    gpus: list[GpuSeries] = field(default_factory=list)
    tasks: list[TaskSeries] = field(default_factory=list)
    cpu_percent: list[float | None] = field(default_factory=list)
    memory_used_mib: list[float | None] = field(default_factory=list)

    @property
    def energy_joules(self) -> float:
        """Measured energy of all GPUs over the period."""
        return sum(joules or 0.0 for gpu in self.gpus for joules in gpu.energy_joules)


_MINUTE_S = 60.0
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
        series.times_s.append(int(row.minute.timestamp()))
        series.cpu_percent.append(row.cpu_percent)
        series.memory_used_mib.append(row.node_memory_used_mib)
        places = {uuid: place for place, uuid in enumerate(row.gpu_uuids)}
        for gpu in series.gpus:
            _append(gpu, row, places.get(gpu.uuid))
    return series


def read_job_series(requester: Requester, job: Job, since: dt.datetime | None = None) -> MetricSeries:
    """Return the minutes of a job's newest attempt: each GPU while it was held, CPU and memory per rank.

    Minutes in which a GPU was held in part count only if there are no others.
    Of an attempt that has not run for long, the seconds if they are known.
    """
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
    if seconds := _read_seconds(job.public_id, tasks[0].attempt):
        _fill_by_second(series, seconds)
        return series
    by_minute: dict[int, dict[str, NodeMetricsMinute]] = {}
    nodes = {task.node_id for task in tasks}
    rows = NodeMetricsMinute.objects.filter(node__in=nodes, minute__gte=begin, minute__lte=end)
    for row in rows.select_related("node").order_by("minute"):
        by_minute.setdefault(int(row.minute.timestamp()), {})[row.node.public_id] = row
    # the mean of a minute contains the time before and after, in which a GPU was free or another's
    whole = {at_s for at_s in by_minute if any(_held_s(each, at_s, end) == _MINUTE_S for each in held)}
    for minute_s in sorted(whole or by_minute):
        found = by_minute[minute_s]
        series.times_s.append(minute_s)
        for gpu, allocation in zip(series.gpus, held, strict=True):
            held_s = _held_s(allocation, minute_s, end)
            of_node = found.get(gpu.node) if held_s and (held_s == _MINUTE_S or not whole) else None
            places = {uuid: place for place, uuid in enumerate(of_node.gpu_uuids)} if of_node else {}
            _append(gpu, of_node, places.get(gpu.uuid))
        for task in series.tasks:
            used = _task(found.get(task.node), job.public_id, task.rank)
            task.cpu_percent.append(used.get("cpu_percent"))
            task.memory_mib.append(used.get("memory_mib"))
    return series


def _held_s(row: Allocation, minute_s: int, end: dt.datetime) -> float:
    """Return the seconds of a minute in which a GPU was held, 0 to 60."""
    begins_s = max(float(minute_s), row.started_at.timestamp())
    return max(0.0, min(minute_s + _MINUTE_S, (row.ended_at or end).timestamp()) - begins_s)


def _read_seconds(job: str, attempt: Attempt) -> list[dict[str, Any]]:
    """Return the rows of each second of an attempt; empty if it ran for long, or less than two are known."""
    if attempt.running_at is None:
        return []
    if ((attempt.ended_at or timezone.now()) - attempt.running_at).total_seconds() > SHORT_RUN_S:
        return []
    stored = AttemptSeconds.objects.filter(attempt=attempt).first()
    rows: list[dict[str, Any]] = stored.rows if stored else attempt_seconds(job, attempt.number)
    return rows if len(rows) > 1 else []


def _fill_by_second(series: MetricSeries, seconds: list[dict[str, Any]]) -> None:
    """Add the rows; a second that is missing among them becomes unknown, so that no line hides it.

    Those after the last one in which a task was measured are left out: the GPUs are held a little longer.
    """
    last_busy_s = max((row["at_s"] for row in seconds if row["tasks"]), default=None)
    by_time = {row["at_s"]: row for row in seconds if last_busy_s is None or row["at_s"] <= last_busy_s}
    first_s, last_s = min(by_time), min(max(by_time), min(by_time) + 2 * int(SHORT_RUN_S))
    for at_s in range(first_s, last_s + 1):
        row = by_time.get(at_s, {"gpus": {}, "tasks": {}})
        series.times_s.append(at_s)
        for gpu in series.gpus:
            values = [*row["gpus"].get(gpu.uuid, (None,) * 4), None]  # energy is known by minute only
            for name, value in zip(_COLUMNS, values, strict=True):
                getattr(gpu, name).append(value)
        for task in series.tasks:
            cpu_percent, memory_mib = row["tasks"].get(str(task.rank), (None, None))
            task.cpu_percent.append(cpu_percent)
            task.memory_mib.append(memory_mib)


RECENT_SPAN = dt.timedelta(minutes=30)


@dataclass
class RecentGpuUse:
    """The GPUs of one attempt over the last half hour: mean use by minute, and what is known newest."""

    gpus: set[str] = field(default_factory=set)
    memory_mib: int = 0
    """Memory of all its GPUs."""
    by_minute: dict[dt.datetime, list[float]] = field(default_factory=dict)
    memory_used_mib: float | None = None

    @property
    def points(self) -> list[tuple[int, float]]:
        """Minutes before now and the mean use in percent, oldest first."""
        now = timezone.now()
        return [
            (round((now - minute).total_seconds() / 60), sum(values) / len(values))
            for minute, values in sorted(self.by_minute.items())
        ]

    @property
    def utilisation_percent(self) -> int | None:
        return round(self.points[-1][1]) if self.by_minute else None


def recent_gpu_use(attempts: Iterable[Attempt]) -> dict[int, RecentGpuUse]:
    """Return the recent use of GPUs by attempt id, for those that hold GPUs, in two queries."""
    found: dict[int, RecentGpuUse] = {}
    holder: dict[str, tuple[RecentGpuUse, dt.datetime]] = {}
    nodes: set[int] = set()
    held = Allocation.objects.filter(task__attempt__in=list(attempts), ended_at__isnull=True)
    for attempt, node, uuid, memory_mib, started_at in held.values_list(
        "task__attempt_id", "gpu__node_id", "gpu__uuid", "gpu__memory_mib", "started_at"
    ):
        use = found.setdefault(attempt, RecentGpuUse())
        holder[uuid] = (use, started_at)
        use.gpus.add(uuid)
        use.memory_mib += memory_mib
        nodes.add(node)
    if not nodes:
        return found
    rows = NodeMetricsMinute.objects.filter(node__in=nodes, minute__gte=timezone.now() - RECENT_SPAN)
    columns = ("minute", "gpu_uuids", "utilisation_percent", "memory_used_mib")
    for minute, uuids, utilisation, memory in rows.order_by("minute").values_list(*columns):
        used: dict[int, float] = {}
        for uuid, percent, used_mib in zip(uuids, utilisation, memory, strict=False):
            if uuid not in holder:
                continue
            of, started_at = holder[uuid]
            if minute < started_at:  # perhaps another job's
                continue
            if percent is not None:
                of.by_minute.setdefault(minute, []).append(percent)
            if used_mib is not None:
                used[id(of)] = used.get(id(of), 0.0) + used_mib
                of.memory_used_mib = used[id(of)]
    return found


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
