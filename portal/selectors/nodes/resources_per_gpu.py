"""Reads how many CPUs and how much memory nodes have for each of their GPUs, and which amounts follow from them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from portal.access import Requester
from portal.domain.jobs.feasibility import accepts_gpu_model
from portal.domain.jobs.job_spec import PROPORTIONAL_AMOUNTS, job_fields
from portal.domain.states import NodeState
from portal.models import Job
from portal.selectors.nodes.node_groups import NodeGroup, node_groups

SHARED_MEMORY_PART = 8
"""Shared memory is this part of the memory of a task."""
SHARED_MEMORY_MIB = 64
"""The least shared memory of a task."""


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
    shares: Sequence[ResourcesPerGpu],
    *,
    pool: str = "",
    gpu_model: str = "",
    gpus_per_task: int = 1,
    milli_per_gpu: int = 1000,
) -> dict[str, int]:
    """Return ``PROPORTIONAL_AMOUNTS`` in proportion to GPUs of any fitting node; empty if unknown.

    ``pool`` is a public id. Whole cores and GiB where there is more than one; without GPUs the defaults of a job.
    """
    if gpus_per_task < 1:
        return _default_amounts()
    fitting = [
        share
        for share in shares
        if (not pool or share.pool == pool) and accepts_gpu_model(gpu_model, share.model)
    ]
    if not fitting:
        return {}
    milli = gpus_per_task * milli_per_gpu
    cpu_milli = _round_down(milli * min(share.cpu_milli for share in fitting) // 1000, 1000)
    memory_mib = max(32, _round_down(milli * min(share.memory_mib for share in fitting) // 1000, 1024))
    return {
        "cpu_milli": max(100, cpu_milli),
        "memory_mib": memory_mib,
        "shm_mib": shared_memory_mib(memory_mib),
    }


def following_amounts(
    shares: Sequence[ResourcesPerGpu], present: Mapping[str, int], typed: Collection[str], **gpus: Any
) -> dict[str, int]:
    """Return the new values of the amounts that were not typed; ``gpus`` as of ``proportional_amounts``.

    Shared memory is in proportion to memory that was typed.
    """
    amounts = proportional_amounts(shares, **gpus)
    if amounts and "memory_mib" in typed and "memory_mib" in present:
        amounts["shm_mib"] = shared_memory_mib(present["memory_mib"])
    return {name: amount for name, amount in amounts.items() if name not in typed}


def presumably_typed(
    shares: Sequence[ResourcesPerGpu], present: Mapping[str, int], **gpus: Any
) -> tuple[str, ...]:
    """Return the amounts that are neither in proportion to the GPUs nor defaults, where none are recorded."""
    usual = [_default_amounts(), following_amounts(shares, present, ("memory_mib",), **gpus)]
    usual.append(proportional_amounts(shares, **gpus))
    return tuple(
        name
        for name in PROPORTIONAL_AMOUNTS
        if name in present and all(present[name] != amounts.get(name) for amounts in usual)
    )


def typed_amounts_of_job(job: Job, shares: Sequence[ResourcesPerGpu]) -> tuple[str, ...]:
    """Return which amounts of the job were typed, or differ from what nobody would have to type."""
    if job.typed_amounts is not None:
        return tuple(job.typed_amounts)
    return presumably_typed(shares, amounts_of_job(job), **gpus_of_job(job))


def amounts_of_job(job: Job) -> dict[str, int]:
    return {name: getattr(job, name) for name in PROPORTIONAL_AMOUNTS}


def gpus_of_job(job: Any) -> dict[str, Any]:
    """Return the GPUs of a job or of a request as arguments of ``proportional_amounts``."""
    names = ("gpu_model", "gpus_per_task", "milli_per_gpu")
    return {name: getattr(job, name) for name in names} | {"pool": job.pool.public_id if job.pool else ""}


def shared_memory_mib(memory_mib: int) -> int:
    """Return the shared memory of a task with this memory."""
    return min(memory_mib, max(SHARED_MEMORY_MIB, _round_down(memory_mib // SHARED_MEMORY_PART, 1024)))


def _default_amounts() -> dict[str, int]:
    rules = job_fields()
    return {name: rules[name].default for name in PROPORTIONAL_AMOUNTS}


def _round_down(amount: int, step: int) -> int:
    return amount // step * step if amount >= step else amount
