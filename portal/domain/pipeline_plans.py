"""Pipeline plans as the portal stores and launches them; the scheduler computes them."""

from __future__ import annotations

import json
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
    "best": "PipeDream",
    "hybrid": "Hybrid",
    "straight": "Straight pipeline",
    "data_parallel": "Data parallel",
}
MAX_MICRO_BATCHES = 256
DEFAULT_MICRO_BATCHES = 8
MAX_NODES, MAX_GPUS_PER_NODE = 64, 16
MIN_BANDWIDTH, MAX_BANDWIDTH = 1e6, 1e13
"""Bytes per second."""


def choice_of(answer: dict[str, Any], choice: str) -> dict[str, Any] | None:
    """Return one of the compared plans, or None if it is impossible or unknown."""
    plan = answer if choice == "best" else answer["alternatives"].get(choice)
    return None if plan is None or "impossible" in plan else plan


def bubble_fraction(stages: int, micro_batches: int) -> float:
    """Return the idle fraction of a pipeline that is emptied after each step (GPipe)."""
    return (stages - 1) / (micro_batches + stages - 1)


def flushed_rate(plan: dict[str, Any], micro_batches: int) -> float | None:
    """Return samples per second, or minibatches if their size is unknown, with the bubble of each step."""
    rate = plan["samples_per_s"] or plan["minibatches_per_s"]
    return None if rate is None else rate * (1 - bubble_fraction(len(plan["stages"]), micro_batches))


def split_of(plan: dict[str, Any], micro_batches: int) -> dict[str, Any]:
    """Return what the training program needs of a plan."""
    return {
        "stages": [stage["layers"] for stage in plan["stages"]],
        "ranks": [stage["ranks"] for stage in plan["stages"]],
        "micro_batches": micro_batches,
    }


def launch_variables(plan_id: str, plan: dict[str, Any], micro_batches: int) -> dict[str, str]:
    """Return the variables of a job that runs the plan."""
    split = json.dumps(split_of(plan, micro_batches), separators=(",", ":"))
    return {PLAN_VARIABLE: plan_id, SPLIT_VARIABLE: split}
