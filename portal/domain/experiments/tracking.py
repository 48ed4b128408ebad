"""Names of tags that MLflow and Fairway give to runs, and stages of model versions."""

from __future__ import annotations

import math
import sys
from typing import Any

TRACKING_ENTRY = "tracking"
"""Entry of a project's list of network destinations: the address of the MLflow API."""
JOB_TAG = "fairway.job"
"""The public id of the job that created the run."""
ATTEMPT_TAG = "fairway.attempt"
"""The number of the newest attempt of the job that logs to the run."""
FIRST_NAME_TAG = "fairway.name"
"""The name with which the job created the run."""
RESERVED_TAG_PREFIX = "fairway."
USER_TAG = "mlflow.user"
NOTE_TAG = "mlflow.note.content"
RUN_NAME_TAG = "mlflow.runName"

MODEL_STAGES = ("None", "Staging", "Production", "Archived")
MODEL_LIST_ENDPOINT = "registered-models/search-workspaces"
"""Of the tracking server, beside MLflow's own: models of several projects. Not offered to scripts."""
CONTINUE_ENDPOINT = "runs/continue"
"""Of the tracking server, beside MLflow's own: the run that a later attempt of a job continues."""
REPLACE_PARAMS_HEADER = "X-Fairway-Replace-Params"
"""Names the job whose runs get other values of parameters that they have."""
MAX_PARAM_LENGTH = 6000
"""Longest value of a parameter that MLflow accepts."""

SPECIAL_METRICS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
"""Values of metrics that are no finite numbers, by their names in JSON."""


def read_metric(raw: Any) -> float | None:
    """Return a value of MLflow's REST API, which may be NaN or infinite; None for other types.

    MLflow's store keeps infinity as the largest finite number.
    """
    if isinstance(raw, str):
        return SPECIAL_METRICS.get(raw)
    if not isinstance(raw, int | float) or isinstance(raw, bool):
        return None
    value = float(raw)
    return math.copysign(math.inf, value) if abs(value) >= sys.float_info.max else value


def metric_name(value: float) -> float | str:
    """Return the value for JSON and CSV: itself if it is finite, else its name of ``SPECIAL_METRICS``."""
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
