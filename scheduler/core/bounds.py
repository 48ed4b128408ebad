"""The plain bounds of a pool: the largest thing it could ever hold, and the largest that is free."""

from __future__ import annotations

from dataclasses import dataclass

from scheduler.core.cluster import PoolId, Snapshot


@dataclass(frozen=True, slots=True)
class LargestFit:
    """Whole GPUs of one model (or of any) in a pool: on its largest node and in all, at all and free now."""

    node_gpus: int
    pool_gpus: int
    free_node_gpus: int
    free_pool_gpus: int


def largest_fit(snapshot: Snapshot, pool: PoolId, model: str | None) -> LargestFit:
    """What a request for whole GPUs of ``model`` meets in ``pool``; None is any model."""
    all_gpus: list[int] = [0]
    free: list[int] = [0]
    for node in snapshot.nodes:
        if node.pool != pool:
            continue
        matching = [gpu for gpu in node.gpus if model in (None, gpu.model)]
        all_gpus.append(len(matching))
        if node.schedulable and node.reachable:
            free.append(sum(gpu.healthy and gpu.used_milli == 0 for gpu in matching))
    return LargestFit(max(all_gpus), sum(all_gpus), max(free), sum(free))
