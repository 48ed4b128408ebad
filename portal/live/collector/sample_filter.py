"""Restricts a node's sample to its own GPUs and the tasks that it runs according to the database; no I/O."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from agents.wire.messages import GpuProcess, GpuSample, NodeSample

Holder = tuple[str, int, int]
"""Public id of a job, attempt number, and the thousandths of a GPU that it holds."""


@dataclass
class KnownNode:
    """Database state of one node: GPUs by UUID with their holders, running tasks (job, attempt, rank)."""

    shareable_mib: dict[str, int] = field(default_factory=dict)
    """Memory of each GPU less the driver's part; in the order of their index."""
    holders: dict[str, list[Holder]] = field(default_factory=dict)
    tasks: set[tuple[str, int, int]] = field(default_factory=set)


def keep_own_entries(sample: NodeSample, known: KnownNode) -> NodeSample:
    """Return the sample without GPUs and tasks that are unknown or belong to other nodes."""
    attempts = {(job, attempt) for job, attempt, _ in known.tasks}
    return replace(
        sample,
        gpus=tuple(_own_gpus(sample.gpus, known, attempts)),
        tasks=tuple(each for each in sample.tasks if (each.job, each.attempt, each.task) in known.tasks),
    )


def _own_gpus(
    gpus: Sequence[GpuSample], known: KnownNode, attempts: set[tuple[str, int]]
) -> Iterator[GpuSample]:
    seen: set[str] = set()
    for gpu in gpus:
        if gpu.uuid in known.shareable_mib and gpu.uuid not in seen:
            seen.add(gpu.uuid)
            own = tuple(user for user in gpu.processes if _is_own(user, attempts))
            yield gpu if len(own) == len(gpu.processes) else replace(gpu, processes=own)


def _is_own(user: GpuProcess, attempts: set[tuple[str, int]]) -> bool:
    """Return whether a process belongs to no job, or to an attempt that runs on this node."""
    return user.job is None or (user.job, user.attempt) in attempts
