"""Runs of the demo on the tracking server, with curves, and a registered model."""

from __future__ import annotations

import datetime as dt
import json
import math
import random

from portal.domain.experiments.tracking import JOB_TAG, RUN_NAME_TAG, USER_TAG
from portal.domain.states import JobState
from portal.errors import NotFound
from portal.models import Job, Project, User
from portal.services.experiments.experiments import do_register_model, do_set_alias
from portal.tracking.client import TrackingUnavailable, call, send

RUNS = 6
POINTS = 200
MODEL = "depth-small"
FOLDER = "model"
PAST_TAG = "demo_past"
"""Of runs that were added with the past jobs; the others are logged by jobs."""


def add_runs(project: Project) -> list[str]:
    """Add runs of the newest completed jobs of the project, unless they were added; return their ids.

    Raise TrackingUnavailable.
    """
    experiment = _experiment(project)
    past = f"tags.{PAST_TAG} = 'yes'"
    body = {"experiment_ids": [experiment], "max_results": RUNS, "filter": past}
    found = call(project.public_id, "POST", "runs/search", body)
    if runs := found.get("runs"):
        return [run["info"]["run_id"] for run in runs]
    jobs = Job.objects.filter(project=project, state=JobState.COMPLETED.value, ended_at__isnull=False)
    newest = jobs.select_related("owner").order_by("-ended_at")[:RUNS]
    return [_add_run(project, experiment, job) for job in newest]


def register_model(owner: User, project: Project) -> None:
    """Register a file of a run as a model. Raise NotFound without a run, and TrackingUnavailable."""
    runs = add_runs(project)
    if not runs:
        raise NotFound("There is no run yet.")
    info = call(project.public_id, "GET", "runs/get", run_id=runs[0])["run"]["info"]
    stored = str(info["artifact_uri"]).removeprefix("mlflow-artifacts:").strip("/")
    content = json.dumps({"layers": [[0.12, -0.4], [0.7, 0.05]], "classes": ["near", "far"]}).encode()
    path = f"/api/2.0/mlflow-artifacts/artifacts/{stored}/{FOLDER}/weights.json"
    with send(project.public_id, "PUT", path, body=content) as answer:
        answer.read()
        if answer.status >= 400:
            raise TrackingUnavailable
    version = do_register_model(owner, project, runs[0], FOLDER, MODEL)
    do_set_alias(owner, project, MODEL, version, "champion")


def _experiment(project: Project) -> str:
    try:
        found = call(project.public_id, "GET", "experiments/get-by-name", experiment_name=project.name)
        return str(found["experiment"]["experiment_id"])
    except NotFound:
        made = call(project.public_id, "POST", "experiments/create", {"name": project.name})
        return str(made["experiment_id"])


def _add_run(project: Project, experiment: str, job: Job) -> str:
    """Add the finished run of a job, with its parameters and the curves of loss and accuracy."""
    began, ended = job.started_at, job.ended_at
    if began is None or ended is None:
        raise NotFound("The job has not run.")
    dice = random.Random(job.pk)  # noqa: S311 - only variety is wanted
    rate, batch = 10 ** dice.uniform(-5, -2), dice.choice([32, 64, 128])
    tags = {RUN_NAME_TAG: job.name, USER_TAG: job.owner.username, JOB_TAG: job.public_id}
    tags[PAST_TAG] = "yes"
    made = call(
        project.public_id, "POST", "runs/create",
        {
            "experiment_id": experiment, "user_id": job.owner.username, "start_time": _milliseconds(began),
            "run_name": job.name, "tags": [{"key": key, "value": value} for key, value in tags.items()],
        },
    )  # fmt: skip
    run = str(made["run"]["info"]["run_id"])
    step_s, metrics = (ended - began).total_seconds() / POINTS, []
    best = 0.3 + abs(math.log10(rate) + 3.5) / 4
    for step in range(POINTS):
        loss = best + 2.2 * math.exp(-step / 40) + dice.random() / 25
        values = {
            "loss": loss,
            "accuracy": max(0.0, 1 - loss / 3),
            "learning_rate": rate * (1 - step / POINTS),
        }
        at = _milliseconds(began + dt.timedelta(seconds=step * step_s))
        metrics += [{"key": k, "value": v, "timestamp": at, "step": step} for k, v in values.items()]
    parameters = {"learning_rate": f"{rate:.3g}", "batch_size": str(batch), "gpus": str(job.gpus_per_task)}
    body = {
        "run_id": run,
        "metrics": metrics,
        "params": [{"key": k, "value": v} for k, v in parameters.items()],
    }
    call(project.public_id, "POST", "runs/log-batch", body)
    finish = {"run_id": run, "status": "FINISHED", "end_time": _milliseconds(ended)}
    call(project.public_id, "POST", "runs/update", finish)
    return run


def _milliseconds(at: dt.datetime) -> int:
    return int(at.timestamp() * 1000)
