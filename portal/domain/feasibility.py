"""When a task fits a node: the rule of submit, decision, forecast and commit.

The scheduler also evaluates ``tasks_on_node`` for many nodes at once as array operations
(``scheduler/core/capacity/node_capacity.py``); a property test compares the two.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

WHOLE_MILLI = 1000
"""Milli of a whole GPU."""
UNBOUNDED_TASKS = 1_000_000
"""Number of tasks that fit when a task requests nothing countable."""


class GpuKind(NamedTuple):
    """The properties of a GPU that requests distinguish."""

    model: str
    memory_mib: int
    mig_profile: str = ""
    """Blank for a whole GPU."""
    compute_capability: float = 0.0
    """0 is unknown."""


def gpu_matches(
    kind: GpuKind,
    gpu_model: str | None,
    min_gpu_memory_mib: int | None,
    mig_profile: str | None = None,
    min_compute_capability: float | None = None,
) -> bool:
    """Return True if the GPU has the requested model (any, one, or one of "A|B"), memory and capability.

    MIG slices match only requests for their profile, and whole GPUs only requests without one.
    """
    return (
        (not gpu_model or gpu_model == kind.model or kind.model in gpu_model.split("|"))
        and (min_gpu_memory_mib is None or kind.memory_mib >= min_gpu_memory_mib)
        and (mig_profile or "") == kind.mig_profile
        and (min_compute_capability is None or kind.compute_capability >= min_compute_capability)
    )


def tasks_on_node(
    free_milli: Iterable[int],
    gpus: int,
    milli: int,
    *,
    cpu_milli: tuple[int, int],
    memory_mib: tuple[int, int],
) -> int:
    """Return how many tasks fit on a node.

    A task takes ``milli`` of each of ``gpus`` distinct GPUs; ``free_milli`` has the free milli of each matching
    GPU. CPU and memory are pairs (free on the node, requested by one task).
    """
    most = UNBOUNDED_TASKS
    if gpus:
        per_gpu = [free // milli for free in free_milli]
        most = sum(per_gpu) // gpus
        if gpus > 1:  # k tasks use at most k shares of each GPU
            while sum(min(each, most) for each in per_gpu) < most * gpus:
                most -= 1
    for free, requested in (cpu_milli, memory_mib):
        if requested:
            most = min(most, max(free, 0) // requested)
    return most
