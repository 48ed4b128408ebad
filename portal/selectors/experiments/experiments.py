"""Reads experiments, runs, metrics, artifacts and models of a project from the tracking server."""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from django.db.models import OuterRef, Subquery
from django.utils.translation import gettext as _

from portal.access import visible_jobs, visible_projects
from portal.domain.experiments.tracking import (
    JOB_TAG,
    MODEL_LIST_ENDPOINT,
    NOTE_TAG,
    RUN_NAME_TAG,
    USER_TAG,
    read_metric,
)
from portal.errors import NotFound
from portal.models import Attempt, EnvironmentRecord, Job, Project, User
from portal.selectors.lookup import get_first
from portal.selectors.reports.gpu_hours import job_gpu_hours
from portal.tracking.client import call

MAX_EXPERIMENTS = 200
MAX_VERSIONS = 100
MAX_ARTIFACTS = 500
SERIES_POINTS = 400
"""Points of a curve; MLflow samples longer histories evenly by step."""


@dataclass(frozen=True)
class Experiment:
    id: str
    name: str


@dataclass(frozen=True)
class Run:
    """A run. ``job`` is the public id of the job that created it, or blank."""

    id: str
    name: str
    experiment: str
    status: str
    user: str
    started_at: dt.datetime | None
    ended_at: dt.datetime | None
    params: Mapping[str, str]
    metrics: Mapping[str, float]
    """Last values, perhaps not finite."""
    tags: Mapping[str, str]
    note: str
    job: str

    @property
    def is_running(self) -> bool:
        return self.status in ("RUNNING", "SCHEDULED")


@dataclass(frozen=True)
class RunPage:
    runs: list[Run]
    next_token: str


@dataclass(frozen=True)
class Artifact:
    path: str
    is_folder: bool
    size_bytes: int | None

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]


@dataclass(frozen=True)
class ModelVersion:
    version: str
    stage: str
    created_at: dt.datetime | None
    run: str
    status: str
    description: str
    tags: Mapping[str, str]
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True)
class RegisteredModel:
    name: str
    description: str
    changed_at: dt.datetime | None
    newest: str
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Version by alias."""
    tags: Mapping[str, str] = field(default_factory=dict)


class ProjectModel(NamedTuple):
    project: Project
    model: RegisteredModel

    @property
    def key(self) -> tuple[int, str]:
        return self.project.pk, self.model.name


@dataclass(frozen=True)
class ModelPage:
    models: list[ProjectModel]
    has_more: bool


def get_visible_project(user: User, public_id: str) -> Project:
    return get_first(visible_projects(user).filter(public_id=public_id), _("There is no such project."))


def list_experiments(project: Project) -> list[Experiment]:
    """Return the active experiments, newest first."""
    found = call(project.public_id, "GET", "experiments/search", max_results=MAX_EXPERIMENTS)
    return [Experiment(each["experiment_id"], each["name"]) for each in found.get("experiments", [])]


def search_runs(
    project: Project,
    experiments: Sequence[str],
    *,
    filter_text: str = "",
    order_by: Sequence[str] = (),
    limit: int = 50,
    page_token: str = "",
) -> RunPage:
    """Return one page of runs. Raise InvalidRequest for a filter that MLflow does not understand."""
    if not experiments:
        return RunPage([], "")
    body: dict[str, Any] = {"experiment_ids": list(experiments), "max_results": limit}
    body |= {"filter": filter_text} if filter_text else {}
    body |= {"order_by": list(order_by)} if order_by else {}
    body |= {"page_token": page_token} if page_token else {}
    found = call(project.public_id, "POST", "runs/search", body)
    return RunPage([_run(each) for each in found.get("runs", [])], found.get("next_page_token", ""))


def get_run(project: Project, run: str) -> Run:
    """Return a run. Raise NotFound."""
    return _run(call(project.public_id, "GET", "runs/get", run_id=run)["run"])


def runs_by_id(project: Project, ids: Sequence[str]) -> dict[str, Run]:
    """Return those of the runs that exist in the project, by id."""
    wanted = list(dict.fromkeys(ids))
    if not wanted:
        return {}
    experiments = [each.id for each in list_experiments(project)]
    text = f"attributes.run_id IN ({', '.join(map(quoted, wanted))})"
    found = search_runs(project, experiments, filter_text=text, limit=len(wanted))
    return {run.id: run for run in found.runs}


def list_job_runs(job: Job, limit: int = 10) -> list[Run]:
    """Return the runs that a job created, newest first."""
    experiments = [each.id for each in list_experiments(job.project)]
    return search_runs(
        job.project, experiments, filter_text=f"tags.`{JOB_TAG}` = '{job.public_id}'", limit=limit
    ).runs


class SeriesPoint(NamedTuple):
    """A value of a metric, perhaps not finite. ``at_s`` is the Unix time at which it was logged."""

    step: int
    value: float
    at_s: float


def read_metric_series(project: Project, runs: Sequence[str], key: str) -> dict[str, list[SeriesPoint]]:
    """Return the points of one metric by run, in the order of steps."""
    found = call(
        project.public_id,
        "GET",
        "metrics/get-history-bulk-interval",
        run_ids=list(runs),
        metric_key=key,
        max_results=SERIES_POINTS,
    )
    series: dict[str, list[SeriesPoint]] = {}
    for point in found.get("metrics", []):
        if (value := read_metric(point.get("value"))) is not None:
            at_s = float(point.get("timestamp", 0)) / 1000
            series.setdefault(point["run_id"], []).append(SeriesPoint(int(point.get("step", 0)), value, at_s))
    return {run: sorted(points, key=lambda each: (each.step, each.at_s)) for run, points in series.items()}


@dataclass(frozen=True)
class RunJob:
    """The job that logged a run, with what a comparison of runs needs. ``commit`` is blank if unknown."""

    job: Job
    gpu_hours: float
    commit: str

    @property
    def gpus(self) -> int:
        return self.job.total_gpus


def jobs_of_runs(user: User, runs: Sequence[Run]) -> dict[str, RunJob]:
    """Return the visible jobs of runs by public id, in one query; none without jobs."""
    wanted = {run.job for run in runs if run.job}
    if not wanted:
        return {}
    checked_out = Attempt.objects.filter(job=OuterRef("pk")).exclude(code_commit="").order_by("-number")
    rows = visible_jobs(user).filter(public_id__in=wanted).select_related("environment", "environment_record")
    rows = rows.annotate(
        gpu_hours=job_gpu_hours(job=OuterRef("pk")),
        checked_out=Subquery(checked_out.values("code_commit")[:1]),
    )
    found = {}
    for job in rows:
        record: EnvironmentRecord | None = getattr(job, "environment_record", None)
        commit = job.checked_out or (record.git_commit if record else "")
        found[job.public_id] = RunJob(job, job.gpu_hours, commit)
    return found


def quoted(text: str) -> str:
    """Return a text as a literal of MLflow's filters, which know no escapes."""
    return f"'{text}'" if "'" not in text else '"' + text.replace('"', "") + '"'


def list_artifacts(project: Project, run: str, path: str = "") -> list[Artifact]:
    """Return the files and folders directly below a path of a run."""
    found = call(project.public_id, "GET", "artifacts/list", run_id=run, path=path or None)
    rows = found.get("files", [])[:MAX_ARTIFACTS]
    sizes = ((row, row.get("file_size")) for row in rows)
    return [
        Artifact(row["path"], bool(row.get("is_dir")), None if size is None else int(size))
        for row, size in sizes
    ]


def artifact_path(project: Project, run: Run, path: str) -> str:
    """Return the path of an artifact below the server's artifact endpoint."""
    return f"workspaces/{project.public_id}/{run.experiment}/{run.id}/artifacts/{path}"


def list_models(projects: Sequence[Project], limit: int, offset: int = 0, *, search: str = "") -> ModelPage:
    """Return some models of the projects in one request, last changed first.

    ``search`` is part of the name of a model or project, of a description or of a tag; blank: all.
    """
    by_id = {project.public_id: project for project in projects}
    if not by_id:
        return ModelPage([], has_more=False)
    text = search.lower()
    named = [key for key, project in by_id.items() if text in project.name.lower()]
    body = {"workspaces": list(by_id), "named": named, "text": text, "max_results": limit, "offset": offset}
    found = call("", "POST", MODEL_LIST_ENDPOINT, body)
    rows = [ProjectModel(by_id[each["workspace"]], _model(each)) for each in found["registered_models"]]
    return ModelPage(rows, found["has_more"])


def get_model(project: Project, name: str) -> RegisteredModel:
    """Return a model. Raise NotFound."""
    return _model(call(project.public_id, "GET", "registered-models/get", name=name)["registered_model"])


def list_versions(project: Project, model: RegisteredModel) -> list[ModelVersion]:
    """Return the versions of a model, newest first."""
    found = call(
        project.public_id,
        "GET",
        "model-versions/search",
        filter=f"name = {quoted(model.name)}",
        max_results=MAX_VERSIONS,
        order_by="version_number DESC",
    )
    return [_version(each, model) for each in found.get("model_versions", [])]


def get_version(project: Project, model: str, version: str) -> ModelVersion:
    """Return a version of a model, without its aliases. Raise NotFound."""
    number = int(version) if version.isdecimal() and len(version) < 10 else 0
    wanted = f"name = {quoted(model)} and version_number = {number}"
    rows = call(project.public_id, "GET", "model-versions/search", filter=wanted).get("model_versions", [])
    if not rows:
        raise NotFound(_("The model {model} has no version {version}.").format(model=model, version=version))
    return _version(rows[0], RegisteredModel(model, "", None, ""))


def _run(raw: Mapping[str, Any]) -> Run:
    info, data = raw["info"], raw.get("data", {})
    tags = {each["key"]: each["value"] for each in data.get("tags", [])}
    return Run(
        id=info["run_id"],
        name=info.get("run_name") or tags.get(RUN_NAME_TAG, ""),
        experiment=info["experiment_id"],
        status=info.get("status", ""),
        user=tags.get(USER_TAG, ""),
        started_at=_time(info.get("start_time")),
        ended_at=_time(info.get("end_time")),
        params={each["key"]: each["value"] for each in data.get("params", [])},
        metrics={
            each["key"]: value
            for each in data.get("metrics", [])
            if (value := read_metric(each.get("value"))) is not None
        },
        tags={key: value for key, value in tags.items() if not key.startswith(("mlflow.", "fairway."))},
        note=tags.get(NOTE_TAG, ""),
        job=tags.get(JOB_TAG, ""),
    )


def _model(raw: Mapping[str, Any]) -> RegisteredModel:
    versions = [int(each["version"]) for each in raw.get("latest_versions", [])]
    return RegisteredModel(
        name=raw["name"],
        description=raw.get("description", ""),
        changed_at=_time(raw.get("last_updated_timestamp")),
        newest=str(max(versions)) if versions else "",
        aliases={each["alias"]: str(each["version"]) for each in raw.get("aliases", [])},
        tags={
            each["key"]: each["value"]
            for each in raw.get("tags", [])
            if not each["key"].startswith("mlflow.")
        },
    )


def _version(raw: Mapping[str, Any], model: RegisteredModel) -> ModelVersion:
    version = str(raw["version"])
    return ModelVersion(
        version=version,
        stage=raw.get("current_stage", "None"),
        created_at=_time(raw.get("creation_timestamp")),
        run=raw.get("run_id", ""),
        status=raw.get("status", ""),
        description=raw.get("description", ""),
        tags={each["key"]: each["value"] for each in raw.get("tags", [])},
        aliases=tuple(alias for alias, held in model.aliases.items() if held == version),
    )


def _time(milliseconds: Any) -> dt.datetime | None:
    if not milliseconds:
        return None
    try:
        return dt.datetime.fromtimestamp(int(milliseconds) / 1000, dt.UTC)
    except (OverflowError, OSError, ValueError):  # a client may send any number
        return None
