"""One sample of the node: processors, memory, disk, every GPU, every task, and who uses which GPU."""

from __future__ import annotations

import time
from typing import Any, Dict, List, Optional, Tuple

from agents.node import cgroup, machine
from agents.node.gpus import GpuReading
from agents.node.ledger import RUNNING, Record
from agents.node.tasks import Tasks


class Sampler:
    """Samples of one subscription; percentages are between two samples, so the first are unknown."""

    def __init__(self, tasks: Tasks) -> None:
        self._tasks = tasks
        self._ticks: Optional[machine.CpuTicks] = None
        self._task_cpu: Dict[str, Tuple[float, float]] = {}

    def sample(self) -> Dict[str, Any]:
        """The node now."""
        records = {
            name: each for name, each in self._tasks.ledger.tasks().items() if each["phase"] == RUNNING
        }
        ticks, before = machine.cpu_ticks(), self._ticks
        self._ticks = ticks
        readings = self._tasks.gpus.readings(self._tasks.ledger.live_milli())
        needs_processes = any(reading.processes for reading in readings) or any(
            record["runtime"] == "process" for record in records.values()
        )
        everyone = machine.processes() if needs_processes else []
        return {
            "event": "sample",
            "at_s": time.time(),
            "cpu_percent": machine.cpu_percent(before, ticks),
            "memory_used_mib": machine.memory_used_mib(),
            "disk_free_mib": machine.disk_free_mib(self._tasks.settings.state_dir),
            "gpus": [_gpu(reading, _owners(reading, records, everyone)) for reading in readings],
            "tasks": self._task_rows(records, everyone),
        }

    def _task_rows(
        self, records: Dict[str, Record], everyone: List[machine.ProcessFacts]
    ) -> List[Dict[str, Any]]:
        now_s = time.monotonic()
        rows, cpu = [], {}
        for name, record in sorted(records.items()):
            usage = _usage(record, everyone)
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


def _usage(record: Record, everyone: List[machine.ProcessFacts]) -> cgroup.Usage:
    pid = record["pid"]
    if not machine.is_alive(pid, record["pid_start"]):
        return cgroup.NOTHING
    group = cgroup.of_process(pid)
    if group is not None and (record["runtime"] != "process" or _is_own(pid)):
        return group.usage()
    family = machine.descendants(pid, everyone)
    return cgroup.Usage(
        memory_mib=int(sum(each.resident_mib for each in family)),
        peak_memory_mib=None,
        oom_kills=None,
        cpu_s=sum(each.cpu_s for each in family),
    )


def _is_own(pid: int) -> bool:
    """True when a process stands in a group of its own, not in the one the agent was started in."""
    return machine.read_text(f"/proc/{pid}/cgroup") != machine.read_text("/proc/self/cgroup")


def _gpu(reading: GpuReading, owners: List[Dict[str, Any]]) -> Dict[str, Any]:
    row = reading._asdict()
    row["processes"] = owners
    return row


def _owners(
    reading: GpuReading, records: Dict[str, Record], everyone: List[machine.ProcessFacts]
) -> List[Dict[str, Any]]:
    """Each process on the GPU with the job it belongs to; one of nobody's job is foreign."""
    if not reading.processes:
        return []
    owner = {
        each.pid: record
        for record in records.values()
        if record["pid"]
        for each in machine.descendants(record["pid"], everyone)
    }
    groups = {
        text: record
        for record in records.values()
        if record["pid"] and _is_own(record["pid"])
        for text in [machine.read_text(f"/proc/{record['pid']}/cgroup")]
        if text
    }
    rows = []
    for process in reading.processes:
        found = owner.get(process.pid) or groups.get(machine.read_text(f"/proc/{process.pid}/cgroup") or "-")
        rows.append(
            {
                "pid": process.pid,
                "memory_mib": process.memory_mib,
                "job": found["job"] if found else None,
                "attempt": found["attempt"] if found else None,
                "foreign": found is None,
            }
        )
    return rows
