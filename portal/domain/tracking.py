"""Names of tags that MLflow and Fairway give to runs, and stages of model versions."""

from __future__ import annotations

TRACKING_ENTRY = "tracking"
"""Entry of a project's list of network destinations: the address of the MLflow API."""
JOB_TAG = "fairway.job"
"""The public id of the job that created the run."""
RESERVED_TAG_PREFIX = "fairway."
USER_TAG = "mlflow.user"
NOTE_TAG = "mlflow.note.content"
RUN_NAME_TAG = "mlflow.runName"

MODEL_STAGES = ("None", "Staging", "Production", "Archived")
MODEL_LIST_ENDPOINT = "registered-models/search-workspaces"
"""Of the tracking server, beside MLflow's own: models of several projects. Not offered to scripts."""
