"""The shape of a task (what it requests of a node), and the slots that it holds."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from portal.domain.feasibility import gpu_constraints
from scheduler.core.model.snapshot import WHOLE_MILLI, NodeId, PendingRow, ProjectId

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


class TaskShape(NamedTuple):
    """What one task requests of a node.

    With ``share_mib`` it requests that much memory of each GPU instead of ``milli``; the milli then depend on
    the node, and ``milli`` is unused.
    """

    gpus: int
    milli: int
    gpu_model: str | None
    min_gpu_memory_mib: int | None
    cpu_milli: int
    memory_mib: int
    avoid_nodes: tuple[NodeId, ...]
    node_affinity: NodeId | None
    share_mib: int | None = None
    mig_profile: str | None = None
    min_compute_capability: float | None = None
    tenant: ProjectId | None = None  # the project of a share; only its shares may use the same GPU

    @classmethod
    def from_job(cls, job: PendingRow) -> TaskShape:
        """Return the shape of a job's tasks; equal requests give equal shapes."""
        return cls(
            job.gpus_per_task,
            job.milli_per_gpu if job.gpus_per_task else WHOLE_MILLI,
            cpu_milli=job.cpu_milli,
            memory_mib=job.memory_mib,
            avoid_nodes=tuple(sorted(job.avoid_nodes)),
            node_affinity=job.node_affinity,
            share_mib=job.share_mib if job.gpus_per_task else None,
            tenant=job.project if job.gpus_per_task and job.task_request.is_fractional else None,
            **gpu_constraints(job)._asdict(),
        )

    @property
    def uses_whole_gpus(self) -> bool:
        """True if each GPU is requested whole."""
        return self.milli == WHOLE_MILLI and self.share_mib is None

    @property
    def has_gpu_constraints(self) -> bool:
        """True if only some kinds of GPU match."""
        return any(each is not None for each in gpu_constraints(self))


class HeldSlots(NamedTuple):
    """What one task holds: a node by index, GPU slots on it, milli of each, CPU and memory."""

    node: int
    slots: tuple[int, ...]
    milli: int
    cpu_milli: int
    memory_mib: int
    tenant: int = 0  # tenant number of its shares; 0 is none


class SlotBatch:
    """The slots of many owners as arrays, one owner after the other.

    ``held_counts[n]`` and ``gpu_counts[n]`` are the numbers of entries and of GPUs of the first ``n`` owners.
    """

    def __init__(self, owners: Sequence[Sequence[HeldSlots]]) -> None:
        held = [one for mine in owners for one in mine]
        slots = [len(one.slots) for one in held]
        self.held_counts = [0, *accumulate(map(len, owners))]
        until = [0, *accumulate(slots)]
        self.gpu_counts = [until[places] for places in self.held_counts]
        self.node = _ints([one.node for one in held])
        self.cpu_milli = _ints([one.cpu_milli for one in held])
        self.memory_mib = _ints([one.memory_mib for one in held])
        self.gpu_node = np.repeat(self.node, slots)
        self.gpu_slot = _ints([slot for one in held for slot in one.slots])
        self.gpu_milli = np.repeat(_ints([one.milli for one in held]), slots)


def _ints(values: Sequence[int]) -> Ints:
    return np.fromiter(values, dtype=np.int64, count=len(values))
