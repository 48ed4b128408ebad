"""When a task fits a node: the rule of submit, decision, forecast and commit.

The scheduler also evaluates ``tasks_on_node`` for many nodes at once as array operations
(``scheduler/core/capacity/node_capacity.py``); a property test compares the two.
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter
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


def accepts_gpu_model(requested: str | None, model: str) -> bool:
    """Return True if a request names the model, alone or among several as "A|B", or names none."""
    return not requested or model == requested or model in requested.split("|")


class GpuConstraints(NamedTuple):
    """Which GPUs a task accepts; None and blank accept all, and whole GPUs for ``mig_profile``."""

    gpu_model: str | None = None
    """One model, or several as "A|B"."""
    min_gpu_memory_mib: int | None = None
    mig_profile: str | None = None
    min_compute_capability: float | None = None

    @property
    def restricts(self) -> bool:
        """True if only some kinds of GPU match."""
        return any(each is not None for each in self)

    def accepts(self, gpu: GpuKind) -> bool:
        """Return True if a task may use the GPU.

        MIG slices match only requests for their profile, and whole GPUs only requests without one.
        """
        return (
            accepts_gpu_model(self.gpu_model, gpu.model)
            and (self.min_gpu_memory_mib is None or gpu.memory_mib >= self.min_gpu_memory_mib)
            and (self.mig_profile or "") == gpu.mig_profile
            and (self.min_compute_capability is None or gpu.compute_capability >= self.min_compute_capability)
        )


ANY_GPU = GpuConstraints()


def matching_gpu_models(requested: str, models: Iterable[str]) -> list[str]:
    """Return the models that ``requested`` names: in full, or as some of their words ("h200" of "NVIDIA H200").

    Letter case is ignored. Words in full come before parts of words ("A100" of "A100-SXM4-80GB").
    """
    wanted, known = requested.casefold(), sorted(set(models))
    for matches in (
        lambda model: model == wanted,
        lambda model: f" {wanted} " in f" {model} ",
        lambda model: wanted in model,
    ):
        if found := [model for model in known if matches(model.casefold())]:
            return found
    return []


def proportional_cpu_and_memory(cpu_milli: int, memory_mib: int, count: int, of: int) -> dict[str, int]:
    """Return the CPU and memory of a task for ``count`` of ``of`` parts of it, where they are less than now.

    Whole cores and GiB, and no less than a core and 4 GiB, unless the task has less.
    """
    cpu_part = max(min(cpu_milli, 1_000), cpu_milli * count // of // 1_000 * 1_000)
    memory_part = max(min(memory_mib, 4_096), memory_mib * count // of // 1_024 * 1_024)
    found = {"cpu_milli": cpu_part} if cpu_part < cpu_milli else {}
    return found | ({"memory_mib": memory_part} if memory_part < memory_mib else {})


_values = attrgetter(*GpuConstraints._fields)


def gpu_constraints(request: object) -> GpuConstraints:
    """Return the constraints of a job, row or request, which has them as attributes."""
    return GpuConstraints._make(_values(request))


def milli_by_memory(share_mib: int, gpu_memory_mib: int) -> int:
    """Return the milli of a GPU that hold ``share_mib`` of its memory, rounded up.

    Return more than 1000, which fits nowhere, if the GPU has less memory.
    """
    return -(-share_mib * WHOLE_MILLI // gpu_memory_mib) if gpu_memory_mib > 0 else WHOLE_MILLI + 1


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
