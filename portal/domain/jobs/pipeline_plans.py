"""Pipeline plans as the portal stores and launches them; the scheduler computes them."""

from __future__ import annotations

import json
import math
from typing import Any

PLAN_VARIABLE = "PIPELINE_PLAN_ID"
"""Environment variable of a job that names the plan it was launched from."""
SPLIT_VARIABLE = "PIPELINE_PLAN"
"""Environment variable with the stages, for the training program."""
PROFILE_VARIABLE = "LAYER_PROFILE"
"""Environment variable of a job that measures layers: the name of the profile that is stored when it completes."""
PROFILE_PROGRAM, PIPELINE_PROGRAM = "profile_layers.py", "train_pipeline.py"
"""Files that such jobs find in $FAIRWAY_SECRETS."""
CHOICES = {
    "best": "Best division",
    "hybrid": "Hybrid",
    "straight": "Straight pipeline",
    "data_parallel": "Data parallel",
}
SCHEDULES = {"1f1b": "1F1B", "gpipe": "GPipe", "pipedream": "PipeDream"}
DEFAULT_SCHEDULE, WITHOUT_FLUSH = "1f1b", "pipedream"
MAX_MICRO_BATCHES = 256
DEFAULT_MICRO_BATCHES = 8
MAX_NODES, MAX_GPUS_PER_NODE = 64, 16
MIN_BANDWIDTH, MAX_BANDWIDTH = 1e6, 1e13
"""Bytes per second."""


def choice_of(answer: dict[str, Any], choice: str) -> dict[str, Any] | None:
    """Return one of the compared plans, or None if it is impossible or unknown."""
    plan = answer if choice == "best" else answer["alternatives"].get(choice)
    return None if plan is None or "impossible" in plan else plan


def bubble_fraction(plan: dict[str, Any], micro_batches: int, schedule: str) -> float:
    """Return the idle fraction of a step; PipeDream does not empty the pipeline between steps, and has none."""
    after_first = len(plan["stages"]) - 1
    return 0.0 if schedule == WITHOUT_FLUSH else after_first / (micro_batches + after_first)


def predicted_rate(plan: dict[str, Any], micro_batches: int, schedule: str) -> float | None:
    """Return samples per second, or minibatches if their size is unknown, with the bubble of each step."""
    rate = plan["samples_per_s"] or plan["minibatches_per_s"]
    return None if rate is None else rate * (1 - bubble_fraction(plan, micro_batches, schedule))


def stage_memory_bytes(plan: dict[str, Any], micro_batches: int, schedule: str) -> list[float]:
    """Return the memory of a GPU of each stage: activations of all micro-batches in flight, and the weights.

    PipeDream keeps the weights of each micro-batch in flight. GPipe has all micro-batches of a step in flight.
    """
    amounts = []
    for stage in plan["stages"]:
        in_step = math.ceil(micro_batches * max(plan["replicas"]) / stage["replicas"])
        in_flight = {WITHOUT_FLUSH: stage["in_flight"], "gpipe": in_step}.get(
            schedule, min(stage["in_flight"], in_step)
        )
        versions = in_flight if schedule == WITHOUT_FLUSH else 1
        amounts.append(in_flight * stage["activation_bytes"] + versions * stage["parameter_bytes"])
    return amounts


def split_of(plan: dict[str, Any], micro_batches: int, schedule: str) -> dict[str, Any]:
    """Return what the training program needs of a plan."""
    return {
        "stages": [stage["layers"] for stage in plan["stages"]],
        "ranks": [stage["ranks"] for stage in plan["stages"]],
        "micro_batches": micro_batches,
        "schedule": schedule,
    }


def launch_variables(plan_id: str, plan: dict[str, Any], micro_batches: int, schedule: str) -> dict[str, str]:
    """Return the variables of a job that runs the plan."""
    split = json.dumps(split_of(plan, micro_batches, schedule), separators=(",", ":"))
    return {PLAN_VARIABLE: plan_id, SPLIT_VARIABLE: split}
