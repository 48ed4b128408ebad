"""Rolls samples of one node up into minutes: means, and energy as the integral of power. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from agents.samples import NodeSample

LONGEST_STEP_S = 5.0
"""A longer gap between two samples is a gap, not a straight line: nothing is integrated over it."""


@dataclass
class Mean:
    """The mean of what was known; None when nothing was."""

    total: float = 0.0
    count: int = 0

    def add(self, value: float | None) -> None:
        if value is not None:
            self.total += value
            self.count += 1

    @property
    def value(self) -> float | None:
        return round(self.total / self.count, 3) if self.count else None


@dataclass
class GpuMinute:
    """What one GPU did in a minute."""

    utilisation_percent: Mean = field(default_factory=Mean)
    memory_used_mib: Mean = field(default_factory=Mean)
    power_watts: Mean = field(default_factory=Mean)
    temperature_c: Mean = field(default_factory=Mean)
    energy_joules: float | None = None
    holders: set[str] = field(default_factory=set)


@dataclass
class TaskMinute:
    """What one task used in a minute."""

    cpu_percent: Mean = field(default_factory=Mean)
    memory_mib: Mean = field(default_factory=Mean)


@dataclass
class Minute:
    """One node over one minute; ``start_s`` is its beginning in Unix time."""

    start_s: int
    samples: int = 0
    cpu_percent: Mean = field(default_factory=Mean)
    memory_used_mib: Mean = field(default_factory=Mean)
    gpus: dict[str, GpuMinute] = field(default_factory=lambda: defaultdict(GpuMinute))
    tasks: dict[tuple[str, int], TaskMinute] = field(default_factory=lambda: defaultdict(TaskMinute))


class NodeRollup:
    """Takes the samples of one node in order, and gives each minute once it is over.

    ``at_s`` is the portal's time of a sample. Energy between two samples is the trapezoid under their power,
    and counts to the minute of the later one.
    """

    def __init__(self) -> None:
        self._minute: Minute | None = None
        self._before: tuple[float, dict[str, float]] | None = None

    def add(self, at_s: float, sample: NodeSample) -> Minute | None:
        """Counts a sample; the finished minute when this one begins another."""
        finished = self.due(at_s)
        if self._minute is None:
            self._minute = Minute(int(at_s // 60) * 60)
        minute = self._minute
        minute.samples += 1
        minute.cpu_percent.add(sample.cpu_percent)
        minute.memory_used_mib.add(sample.memory_used_mib)
        power = {gpu.uuid: gpu.power_watts for gpu in sample.gpus if gpu.power_watts is not None}
        for gpu in sample.gpus:
            row = minute.gpus[gpu.uuid]
            row.utilisation_percent.add(gpu.utilisation_percent)
            row.memory_used_mib.add(gpu.memory_used_mib)
            row.power_watts.add(gpu.power_watts)
            row.temperature_c.add(gpu.temperature_c)
            for process in gpu.processes:
                row.holders.add("foreign" if process.foreign or process.job is None else process.job)
            joules = self._energy(at_s, gpu.uuid, power)
            if joules is not None:
                row.energy_joules = (row.energy_joules or 0.0) + joules
        for task in sample.tasks:
            used = minute.tasks[(task.job, task.task)]
            used.cpu_percent.add(task.cpu_percent)
            used.memory_mib.add(task.memory_mib)
        self._before = (at_s, power)
        return finished

    def due(self, now_s: float) -> Minute | None:
        """The minute that is over by now, once."""
        minute = self._minute
        if minute is not None and now_s >= minute.start_s + 60:
            self._minute = None
            return minute
        return None

    def rest(self) -> Minute | None:
        """What there is of the minute that runs; it begins anew."""
        minute, self._minute = self._minute, None
        return minute

    def _energy(self, at_s: float, uuid: str, power: dict[str, float]) -> float | None:
        if self._before is None:
            return None
        before_s, before = self._before
        step_s = at_s - before_s
        if not 0 < step_s <= LONGEST_STEP_S or uuid not in before or uuid not in power:
            return None
        return (before[uuid] + power[uuid]) / 2 * step_s


def columns(minute: Minute, order: Iterable[str]) -> dict[str, object]:
    """A minute as the columns of UsageMinute, arrays in the given order of GPUs."""
    rows = [minute.gpus.get(uuid) or GpuMinute() for uuid in order]
    return {
        "gpu_uuids": list(order),
        "samples": minute.samples,
        "utilisation_percent": [row.utilisation_percent.value for row in rows],
        "memory_used_mib": [row.memory_used_mib.value for row in rows],
        "power_watts": [row.power_watts.value for row in rows],
        "temperature_c": [row.temperature_c.value for row in rows],
        "energy_joules": [None if row.energy_joules is None else round(row.energy_joules, 3) for row in rows],
        "cpu_percent": minute.cpu_percent.value,
        "node_memory_used_mib": minute.memory_used_mib.value,
        "holders": [sorted(row.holders) for row in rows],
        "tasks": [
            {
                "job": job,
                "rank": rank,
                "cpu_percent": used.cpu_percent.value,
                "memory_mib": used.memory_mib.value,
            }
            for (job, rank), used in sorted(minute.tasks.items())
        ],
    }
