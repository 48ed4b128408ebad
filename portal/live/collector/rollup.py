"""Rolls samples of one node up into minutes: means, and energy by GPU counters, else by power; no I/O."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from agents.wire.messages import MAX_GPU_WATTS, GpuSample, NodeSample
from portal.domain.scheduling.policy_settings import NUMBER_SETTINGS
from portal.live.collector.sample_filter import Holder

MAX_SAMPLE_GAP_S = 5.0
"""Power is not integrated over a longer gap between two samples."""
IDLE_PERCENT = NUMBER_SETTINGS["idle_gpu_percent"].default
"""A GPU with a lower utilisation is idle in reports."""
MAX_COUNTER_GAP_S = 300.0
"""Energy counters continue without a listener; after a longer gap the energy is not attributed."""


@dataclass
class Mean:
    """The mean of known values; None without any."""

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
    utilisation_percent: Mean = field(default_factory=Mean)
    memory_used_mib: Mean = field(default_factory=Mean)
    power_watts: Mean = field(default_factory=Mean)
    temperature_c: Mean = field(default_factory=Mean)
    energy_joules: float | None = None
    holders: set[str] = field(default_factory=set)


@dataclass
class TaskMinute:
    cpu_percent: Mean = field(default_factory=Mean)
    memory_mib: Mean = field(default_factory=Mean)


@dataclass
class AttemptGpuUse:
    """GPU-seconds that an attempt held, in proportion to its share of each GPU, and their energy.

    ``measured_s``: with a known utilisation; ``busy_s``: weighted with it; ``idle_s``: below ``IDLE_PERCENT``.
    """

    joules: float | None = None
    measured_s: float = 0.0
    busy_s: float = 0.0
    idle_s: float = 0.0
    peak_memory_mib: float | None = None
    """Highest memory use of a GPU that it held alone."""

    def add(self, other: AttemptGpuUse) -> None:
        if other.joules is not None:
            self.joules = (self.joules or 0.0) + other.joules
        self.measured_s += other.measured_s
        self.busy_s += other.busy_s
        self.idle_s += other.idle_s
        if other.peak_memory_mib is not None:
            self.peak_memory_mib = max(self.peak_memory_mib or 0.0, other.peak_memory_mib)


@dataclass
class Minute:
    """One node over one minute; ``start_s`` is its start in Unix time."""

    start_s: int
    samples: int = 0
    cpu_percent: Mean = field(default_factory=Mean)
    memory_used_mib: Mean = field(default_factory=Mean)
    gpus: dict[str, GpuMinute] = field(default_factory=lambda: defaultdict(GpuMinute))
    tasks: dict[tuple[str, int], TaskMinute] = field(default_factory=lambda: defaultdict(TaskMinute))
    attempts: dict[tuple[str, int], AttemptGpuUse] = field(default_factory=lambda: defaultdict(AttemptGpuUse))


class NodeRollup:
    """Process the samples of one node in order, and return each minute once it is over.

    ``at_s`` is the portal's time of a sample. Energy between two samples is the difference of the GPU's
    counter; without a counter, or after its reset, the trapezoid under their power. It belongs to the minute
    and the holders of the later sample.
    """

    def __init__(self) -> None:
        self._minute: Minute | None = None
        self._previous: tuple[float, dict[str, GpuSample]] | None = None

    def add(
        self, at_s: float, sample: NodeSample, holders: Mapping[str, Sequence[Holder]] | None = None
    ) -> Minute | None:
        """Add a sample with the holders of each GPU (by UUID); return the minute that it finishes, if any."""
        finished = self.pop_finished(at_s)
        if self._minute is None:
            self._minute = Minute(int(at_s // 60) * 60)
        minute = self._minute
        minute.samples += 1
        minute.cpu_percent.add(sample.cpu_percent)
        minute.memory_used_mib.add(sample.memory_used_mib)
        for gpu in sample.gpus:
            row = minute.gpus[gpu.uuid]
            row.utilisation_percent.add(gpu.utilisation_percent)
            row.memory_used_mib.add(gpu.memory_used_mib)
            row.power_watts.add(gpu.power_watts)
            row.temperature_c.add(gpu.temperature_c)
            for process in gpu.processes:
                row.holders.add("foreign" if process.foreign or process.job is None else process.job)
            joules = self._energy_joules(at_s, gpu)
            if joules is not None:
                row.energy_joules = (row.energy_joules or 0.0) + joules
            for job, attempt, milli in (holders or {}).get(gpu.uuid, ()):
                minute.attempts[job, attempt].add(self._use(at_s, gpu, joules, milli / 1000))
        for task in sample.tasks:
            used = minute.tasks[(task.job, task.task)]
            used.cpu_percent.add(task.cpu_percent)
            used.memory_mib.add(task.memory_mib)
        self._previous = (at_s, {gpu.uuid: gpu for gpu in sample.gpus})
        return finished

    def pop_finished(self, now_s: float) -> Minute | None:
        """Return the minute that is over by now, once."""
        minute = self._minute
        if minute is not None and now_s >= minute.start_s + 60:
            self._minute = None
            return minute
        return None

    def pop_partial(self) -> Minute | None:
        minute, self._minute = self._minute, None
        return minute

    def _use(self, at_s: float, gpu: GpuSample, joules: float | None, share: float) -> AttemptGpuUse:
        """Return the use of a share of a GPU since the previous sample."""
        use = AttemptGpuUse(None if joules is None else joules * share)
        if share == 1.0 and gpu.memory_used_mib is not None:
            use.peak_memory_mib = float(gpu.memory_used_mib)
        step_s = at_s - self._previous[0] if self._previous else 0.0
        if gpu.utilisation_percent is not None and 0 < step_s <= MAX_SAMPLE_GAP_S:
            use.measured_s = step_s * share
            use.busy_s = use.measured_s * gpu.utilisation_percent / 100
            use.idle_s = use.measured_s if gpu.utilisation_percent < IDLE_PERCENT else 0.0
        return use

    def _energy_joules(self, at_s: float, gpu: GpuSample) -> float | None:
        """Return joules since the previous sample; None if unknown."""
        if self._previous is None or (then := self._previous[1].get(gpu.uuid)) is None:
            return None
        step_s = at_s - self._previous[0]
        if then.energy_joules is not None and gpu.energy_joules is not None:
            grown = gpu.energy_joules - then.energy_joules
            if 0 < step_s <= MAX_COUNTER_GAP_S and 0 <= grown <= MAX_GPU_WATTS * step_s:
                return grown
        if then.power_watts is None or gpu.power_watts is None or not 0 < step_s <= MAX_SAMPLE_GAP_S:
            return None
        return (then.power_watts + gpu.power_watts) / 2 * step_s


def minute_columns(minute: Minute, order: Iterable[str]) -> dict[str, object]:
    """Return a minute as columns of NodeMetricsMinute, with arrays in the given order of GPUs."""
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
