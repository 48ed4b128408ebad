"""Reads how many CPUs and how much memory nodes have for each of their GPUs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from portal.access import Requester
from portal.domain.feasibility import accepts_gpu_model
from portal.domain.states import NodeState
from portal.selectors.nodes.node_groups import NodeGroup, node_groups

SHARED_MEMORY_PART = 8
"""Shared memory is this part of the memory of a task."""


@dataclass(frozen=True)
class ResourcesPerGpu:
    """The CPU and memory for each GPU that every node of a pool with this model has."""

    pool: str
    model: str
    cpu_milli: int
    memory_mib: int


def list_resources_per_gpu(requester: Requester) -> list[ResourcesPerGpu]:
    """Return them by pool (public id) and GPU model, in one query; nodes that take no jobs do not count."""
    by_kind: dict[tuple[str, str], list[NodeGroup]] = defaultdict(list)
    for group in node_groups(requester):
        if group.state in (NodeState.READY, NodeState.CORDONED):
            by_kind[group.pool_public_id, group.model].append(group)
    least = [
        ResourcesPerGpu(
            *kind,
            min(group.cpu_milli_per_gpu for group in groups),
            min(group.memory_mib_per_gpu for group in groups),
        )
        for kind, groups in sorted(by_kind.items())
    ]
    return [each for each in least if min(each.cpu_milli, each.memory_mib) > 0]


def proportional_amounts(
    shares: Sequence[ResourcesPerGpu], pool: str, model: str, gpus: int
) -> dict[str, int]:
    """Return CPU, memory and shared memory in proportion to GPUs of any fitting node; empty if unknown.

    Whole cores and GiB where there is more than one.
    """
    fitting = [
        share
        for share in shares
        if (not pool or share.pool == pool) and accepts_gpu_model(model, share.model)
    ]
    if not fitting or gpus < 1:
        return {}
    cpu_milli = _round_down(gpus * min(share.cpu_milli for share in fitting), 1000)
    memory_mib = _round_down(gpus * min(share.memory_mib for share in fitting), 1024)
    shm_mib = max(64, _round_down(memory_mib // SHARED_MEMORY_PART, 1024))
    return {
        "cpu_milli": max(100, cpu_milli),
        "memory_mib": max(32, memory_mib),
        "shm_mib": min(shm_mib, memory_mib),
    }


def _round_down(amount: int, step: int) -> int:
    return amount // step * step if amount >= step else amount
