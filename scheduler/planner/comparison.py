"""Compares the plans of a profile on a topology, with GPipe's bubble and the synchronization of gradients."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from scheduler.planner.partition import (
    MAX_STEPS,
    BandwidthLevel,
    CostModel,
    Partition,
    Partitioner,
    PlanError,
)
from scheduler.planner.profile import Profile

BUBBLE_MICRO_BATCHES = (1, 2, 4, 8, 16, 32, 64)


def bubble_fraction(stages: int, micro_batches: int) -> float:
    """Return the idle fraction of a synchronous pipeline: (K-1)/(M+K-1) (GPipe, section 2.3)."""
    return (stages - 1) / (micro_batches + stages - 1)


def ring_all_reduce_s(parameter_bytes: float, workers: int, bandwidth: float) -> float:
    """Return the time in which a ring sums gradients: each worker sends and receives 2(m-1)/m of them."""
    return 2 * (workers - 1) / workers * parameter_bytes / bandwidth


def parameter_server_s(parameter_bytes: float, workers: int, bandwidth: float, servers: int = 1) -> float:
    """Return the time in which all workers push gradients and pull parameters.

    The links of ``servers`` separate servers, each with an equal part of the parameters, or those of the
    workers are the bottleneck.
    """
    return 2 * parameter_bytes / bandwidth * max(1.0, workers / servers)


def compare_plans(
    profile: Profile,
    levels: Sequence[BandwidthLevel],
    cost: CostModel = CostModel.PAPER,
    memory_bytes: float | None = None,
    max_steps: int = MAX_STEPS,
) -> dict[str, Any]:
    """Return the fields of the best plan and its alternatives, or raise PlanError if no plan is possible.

    Layers are merged if more than ``max_steps`` combinations would have to be examined.
    """
    straight, data_parallel = [1] * len(levels), [level.machines for level in levels]
    mixed = _mixed_replicas(levels)
    searches: list[Sequence[int | None]] = [[None] * len(levels), straight, data_parallel, *mixed]
    search = Partitioner(profile, levels, cost, memory_bytes, max_steps, searches)
    best = search.best()
    gpus = math.prod(level.machines for level in levels)
    parameter_bytes = float(search.cuts.parameter_bytes[-1])
    slowest = min((level.bandwidth for level in levels if level.machines > 1), default=math.inf)
    return {
        "model": profile.model,
        "gpus": gpus,
        "levels": [level._asdict() for level in levels],
        "cost": cost.value,
        "memory_bytes": memory_bytes,
        "merged": merged_fields(search),
        **plan_fields(best, profile, search),
        "alternatives": {
            "straight": _fields_of_fixed(search, profile, [straight]),
            "data_parallel": _fields_of_fixed(search, profile, [data_parallel]),
            "hybrid": _fields_of_fixed(search, profile, mixed),
        },
        "sync_s": {
            "ring_all_reduce": ring_all_reduce_s(parameter_bytes, gpus, slowest),
            "parameter_server": parameter_server_s(parameter_bytes, gpus, slowest),
        },
    }


def merged_fields(search: Partitioner) -> dict[str, Any] | None:
    """Return how many layers, or states of parallel branches, were planned instead of those of the profile."""
    layers, planned = len(search.all_cuts), len(search.cuts)
    if layers == planned and not search.branches_merged:
        return None
    return {"layers": layers, "planned": planned, "branches": search.branches_merged}


def merged_text(merged: Mapping[str, Any]) -> str:
    """Return what was merged as a sentence."""
    texts = []
    if merged["branches"]:
        texts.append("Parallel branches are planned as one layer: they can be cut in too many ways.")
    if merged["layers"] > merged["planned"]:
        texts.append(
            f"The {merged['layers']} layers are planned as {merged['planned']}: the smallest neighbors are merged."
        )
    return " ".join(texts)


def _mixed_replicas(levels: Sequence[BandwidthLevel]) -> list[tuple[int, ...]]:
    """Return the equal replicas by level that divide the machines, without straight and data parallel."""
    divisors = [[n for n in range(1, one.machines + 1) if one.machines % n == 0] for one in levels]
    ends = (tuple(1 for _ in levels), tuple(level.machines for level in levels))
    return [replicas for replicas in itertools.product(*divisors) if replicas not in ends]


def _fields_of_fixed(
    search: Partitioner, profile: Profile, choices: Sequence[Sequence[int]]
) -> dict[str, Any]:
    """Return the fields of the fastest plan with these replicas, or ``{"impossible": reason}``."""
    plans, reason = [], "No other number of equal replicas divides these GPUs."
    for replicas in choices:
        try:
            plans.append(search.best(replicas))
        except PlanError as error:
            reason = str(error)
    if not plans:
        return {"impossible": reason}
    return plan_fields(min(plans, key=lambda plan: plan.stage_time_s), profile, search)


def plan_fields(plan: Partition, profile: Profile, search: Partitioner) -> dict[str, Any]:
    """Return a plan for JSON. Layers are numbered from 0, and the end is exclusive."""
    count = len(plan.stages)
    per_s = 1 / plan.stage_time_s if plan.stage_time_s else None
    return {
        "config": plan.config,
        "replicas": [stage.replicas for stage in plan.stages],
        "stages": [
            {
                "layers": [stage.start, stage.end],
                "replicas": stage.replicas,
                "machines": list(stage.machines),
                "ranks": ranks,
                "compute_s": stage.compute_s,
                "parameter_bytes": stage.parameter_bytes,
                "activation_bytes": stage.activation_bytes,
                "output_bytes": float(search.all_cuts.output_bytes[stage.end - 1]),
                "in_flight": stage.in_flight,
                "memory_bytes": stage.memory_bytes,
            }
            for stage, ranks in zip(plan.stages, plan.ranks(search.levels), strict=True)
        ],
        "stage_time_s": plan.stage_time_s,
        "minibatches_per_s": per_s,
        "samples_per_s": per_s * profile.batch_size if per_s and profile.batch_size else None,
        "speedup": float(search.cuts.compute_s[-1]) * per_s if per_s else None,
        "bubble": [
            {"micro_batches": number, "fraction": bubble_fraction(count, number)}
            for number in BUBBLE_MICRO_BATCHES
        ],
    }
