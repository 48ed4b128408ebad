"""What one task asks of a node, as its shape, and what it took there."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from scheduler.core.model.snapshot import WHOLE_MILLI, NodeId, PendingRow, ProjectId

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


class TaskShape(NamedTuple):
    """What one task asks of a node.

    ``share_mib`` not None asks for that much memory of each GPU instead of ``milli``: what it then takes of a GPU
    differs from node to node, and ``milli`` says nothing here.
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
    tenant: ProjectId | None = None  # of a share of a GPU, whose shares alone may stand beside it

    @classmethod
    def from_job(cls, job: PendingRow) -> TaskShape:
        """The shape of a job's tasks; equal requests give equal shapes."""
        return cls(
            job.gpus_per_task,
            job.milli_per_gpu if job.gpus_per_task else WHOLE_MILLI,
            job.gpu_model,
            job.min_gpu_memory_mib,
            job.cpu_milli,
            job.memory_mib,
            tuple(sorted(job.avoid_nodes)),
            job.node_affinity,
            job.share_mib if job.gpus_per_task else None,
            job.mig_profile,
            job.min_compute_capability,
            job.project if job.gpus_per_task and job.task_request.is_fractional else None,
        )

    @property
    def uses_whole_gpus(self) -> bool:
        """True when each GPU is asked for alone."""
        return self.milli == WHOLE_MILLI and self.share_mib is None

    @property
    def has_gpu_constraints(self) -> bool:
        """True when not every GPU will do."""
        kinds = (self.gpu_model, self.min_gpu_memory_mib, self.mig_profile, self.min_compute_capability)
        return any(kind is not None for kind in kinds)


class HeldSlots(NamedTuple):
    """What one task took: a node by index, GPU slots on it, and the rest."""

    node: int
    slots: tuple[int, ...]
    milli: int
    cpu_milli: int
    memory_mib: int
    tenant: int = 0  # whose shares, by the floor's number; 0: none, or it does not matter


class SlotBatch:
    """The places of many owners as arrays, one owner after the other.

    ``places[n]`` and ``gpus[n]`` are how many the first ``n`` owners hold together.
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
