"""One sample of the node: CPU, memory, disk, GPUs, tasks, and owners of GPU processes."""

from __future__ import annotations

import time
from typing import Any, Dict, List, Optional, Tuple

from agents.node.gpus import GpuSample
from agents.node.gpus.process_owners import ProcessOwnerResolver, has_own_cgroup
from agents.node.host import cgroup, procfs
from agents.node.host.atomic_files import free_mib
from agents.node.ledger.ledger import RUNNING, Record
from agents.node.tasks.task_manager import TaskManager

MIN_PAUSE_S = 0.2
"""Pause between samples, also after a slow one."""


def wait_until_phase_s(phase_s: float, now_s: float) -> float:
    """Return the wait until ``phase_s`` (0 to 1) of a second, given the current time: 0.2 to 1.2 s."""
    return MIN_PAUSE_S + (phase_s - now_s - MIN_PAUSE_S) % 1.0


class Sampler:
    """Samples of one subscription; percentages refer to the previous sample, so the first are None."""

    def __init__(self, tasks: TaskManager) -> None:
        self._tasks = tasks
        self._ticks: Optional[procfs.CpuTicks] = None
        self._owners = ProcessOwnerResolver()
        self._task_cpu: Dict[str, Tuple[float, float]] = {}

    def sample(self) -> Dict[str, Any]:
        records = {
            name: each for name, each in self._tasks.ledger.tasks().items() if each["phase"] == RUNNING
        }
        ticks, before = procfs.cpu_ticks(), self._ticks
        self._ticks = ticks
        readings = self._tasks.gpus.sample(self._tasks.ledger.live_milli())
        on_gpus = [reading.processes for reading in readings]
        owners = self._owners.describe_processes(on_gpus, records.values(), self._tasks.mps_daemons.pids())
        return {
            "event": "sample",
            "at_s": time.time(),
            "cpu_percent": procfs.cpu_percent(before, ticks),
            "memory_used_mib": procfs.memory_used_mib(),
            "disk_free_mib": free_mib(self._tasks.settings.state_dir),
            "gpus": [_gpu_row(reading, rows) for reading, rows in zip(readings, owners)],
            "tasks": self._task_rows(records),
        }

    def _task_rows(self, records: Dict[str, Record]) -> List[Dict[str, Any]]:
        now_s, everyone = time.monotonic(), _ProcessSnapshot()
        rows, cpu = [], {}
        for name, record in sorted(records.items()):
            usage = _task_usage(record, everyone)
            percent = None
            if usage.cpu_s is not None:
                cpu[name] = (now_s, usage.cpu_s)
                earlier = self._task_cpu.get(name)
                if earlier is not None and now_s > earlier[0]:
                    percent = round(max(0.0, 100.0 * (usage.cpu_s - earlier[1]) / (now_s - earlier[0])), 1)
            rows.append(
                {
                    "job": record["job"],
                    "attempt": record["attempt"],
                    "task": record["task"],
                    "cpu_percent": percent,
                    "memory_mib": usage.memory_mib,
                }
            )
        self._task_cpu = cpu
        return rows


class _ProcessSnapshot:
    """All processes of the machine, read once and only for tasks without a control group of their own."""

    def __init__(self) -> None:
        self._found: Optional[List[procfs.ProcessInfo]] = None

    def descendants(self, pid: int) -> List[procfs.ProcessInfo]:
        if self._found is None:
            self._found = procfs.list_processes()
        return procfs.descendants(pid, self._found)


def _task_usage(record: Record, processes: _ProcessSnapshot) -> cgroup.CgroupUsage:
    pid = record["pid"]
    if not procfs.is_alive(pid, record["pid_start"]):
        return cgroup.NO_USAGE
    group = cgroup.cgroup_of(pid)
    if group is not None and (record["runtime"] != "process" or has_own_cgroup(pid)):
        return group.usage()
    family = processes.descendants(pid)
    return cgroup.CgroupUsage(
        memory_mib=int(sum(each.resident_mib for each in family)),
        peak_memory_mib=None,
        oom_kills=None,
        cpu_s=sum(each.cpu_s for each in family),
    )


def _gpu_row(reading: GpuSample, owners: List[Dict[str, Any]]) -> Dict[str, Any]:
    row = reading._asdict()
    row["processes"] = owners
    return row
