"""Builds the live frames for browsers from the last samples; pure functions.

Every frame is ``{"topic": ..., "data": {...}}``; those of this module have ``kind`` "sample", the portal's
time ``at_s`` of the tick, and ``lag_s``: the age of its oldest sample. Unknown values are null.

``cluster``   ``nodes``: for each node with a recent sample
              ``{"lag_s", "cpu", "u": [...], "m": [...], "w": [...]}``: utilization in percent, memory in MiB
              and power in watts of its GPUs, in the order of ``gpus`` of the backfill frame
``node.<id>`` the node's sample: ``cpu_percent``, ``memory_used_mib``, ``disk_free_mib``, and ``gpus``, each
              with uuid, utilization, memory, power, temperature, health, ``busy``: "job", "foreign" or null,
              and ``foreign``: its processes that belong to no job, with pid, memory, account and program
``job.<id>``  ``tasks``: for each rank ``cpu_percent``, ``memory_mib``, and its ``gpus``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from agents.wire.messages import GpuSample, NodeSample

STALE_AFTER_S = 60.0
"""Nodes without a sample for this long are not in frames; pages show them as unreachable."""

Frame = dict[str, Any]


@dataclass(frozen=True)
class ReceivedSample:
    """A node's newest sample; ``taken_s`` and ``received_s`` are in the portal's time."""

    sample: NodeSample
    taken_s: float
    received_s: float

    def lag_s(self, now_s: float) -> float:
        return round(max(0.0, now_s - self.taken_s), 3)


@dataclass(frozen=True)
class RunningTask:
    job: str
    attempt: int
    rank: int
    node: str
    gpus: tuple[str, ...]
    started_s: float | None = None
    """When its attempt began to run; None: not yet."""


def cluster_frame(
    samples: Mapping[str, ReceivedSample], orders: Mapping[str, tuple[str, ...]], now_s: float
) -> Frame:
    """Return all GPUs of all nodes with recent samples, as arrays."""
    nodes: Frame = {}
    lag_s = 0.0
    for node, latest in samples.items():
        if now_s - latest.received_s > STALE_AFTER_S:
            continue
        gpus = {gpu.uuid: gpu for gpu in latest.sample.gpus}
        row = [gpus.get(uuid) for uuid in orders.get(node, ())]
        lag = latest.lag_s(now_s)
        lag_s = max(lag_s, lag)
        nodes[node] = {
            "lag_s": lag,
            "cpu": _round(latest.sample.cpu_percent),
            "u": [_round(gpu.utilisation_percent) if gpu else None for gpu in row],
            "m": [_round(gpu.memory_used_mib) if gpu else None for gpu in row],
            "w": [_round(gpu.power_watts) if gpu else None for gpu in row],
        }
    return {"kind": "sample", "at_s": round(now_s, 3), "lag_s": lag_s, "nodes": nodes}


def node_frame(latest: ReceivedSample, now_s: float) -> Frame:
    """Return everything about one node except whose jobs it runs: its readers may not see all jobs."""
    sample = latest.sample
    return {
        "kind": "sample",
        "at_s": round(now_s, 3),
        "lag_s": latest.lag_s(now_s),
        "cpu_percent": sample.cpu_percent,
        "memory_used_mib": sample.memory_used_mib,
        "disk_free_mib": sample.disk_free_mib,
        "gpus": [_gpu(gpu) | {"busy": _utilisation(gpu), "foreign": _foreign(gpu)} for gpu in sample.gpus],
    }


def job_frame(
    running_tasks: Iterable[RunningTask], samples: Mapping[str, ReceivedSample], now_s: float
) -> Frame | None:
    """Return the ranks of one job with their GPUs; None when none of its nodes has a recent sample."""
    tasks: list[Frame] = []
    lag_s = 0.0
    for placement in running_tasks:
        latest = samples.get(placement.node)
        if latest is None or now_s - latest.received_s > STALE_AFTER_S:
            continue
        lag_s = max(lag_s, latest.lag_s(now_s))
        own = (placement.job, placement.attempt, placement.rank)
        used = next((t for t in latest.sample.tasks if (t.job, t.attempt, t.task) == own), None)
        tasks.append(
            {
                "rank": placement.rank,
                "node": placement.node,
                "cpu_percent": used.cpu_percent if used else None,
                "memory_mib": used.memory_mib if used else None,
                "gpus": [_gpu(gpu) for gpu in latest.sample.gpus if gpu.uuid in placement.gpus],
            }
        )
    if not tasks:
        return None
    return {"kind": "sample", "at_s": round(now_s, 3), "lag_s": lag_s, "tasks": tasks}


def second_row(frame: Frame) -> Frame:
    """Return a frame of a job in short: at_s, cpu and memory by rank, and the measurements of each GPU by UUID.

    Those of a GPU are utilization, memory, power and temperature.
    """
    tasks = {str(task["rank"]): [task["cpu_percent"], task["memory_mib"]] for task in frame["tasks"]}
    names = ("utilisation_percent", "memory_used_mib", "power_watts", "temperature_c")
    gpus = {gpu["uuid"]: [gpu[name] for name in names] for task in frame["tasks"] for gpu in task["gpus"]}
    return {"at_s": round(frame["at_s"]), "tasks": tasks, "gpus": gpus}


def _gpu(gpu: GpuSample) -> Frame:
    return {
        "uuid": gpu.uuid,
        "utilisation_percent": gpu.utilisation_percent,
        "memory_used_mib": gpu.memory_used_mib,
        "power_watts": gpu.power_watts,
        "temperature_c": gpu.temperature_c,
        "health": gpu.health,
    }


def _foreign(gpu: GpuSample) -> list[Frame]:
    return [
        {"pid": each.pid, "memory_mib": each.memory_mib, "account": each.account, "command": each.command}
        for each in gpu.processes
        if each.foreign
    ]


def _utilisation(gpu: GpuSample) -> str | None:
    if any(process.foreign for process in gpu.processes):
        return "foreign"
    return "job" if gpu.processes else None


def _round(value: float | None) -> int | None:
    return None if value is None else round(value)
