"""Pages of experiments: the runs of a project, a comparison, one run, and its files."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple
from urllib.parse import urlencode

from django.contrib import messages
from django.http import HttpRequest, HttpResponse, JsonResponse, QueryDict
from django.http.response import HttpResponseBase
from django.shortcuts import redirect, render
from django.urls import reverse
from django.utils.translation import gettext as _
from django.utils.translation import gettext_noop, ngettext

from portal.access import AccessPolicy, Permission, can, visible_jobs, visible_projects
from portal.domain.experiments.tracking import USER_TAG, metric_name
from portal.domain.states import JobState
from portal.domain.sweeps.sweeps import Direction
from portal.downloads import ARTIFACT_STATUSES, artifact_response, range_headers
from portal.errors import InvalidRequest, NotFound
from portal.models import Job, Project, User
from portal.selectors.experiments import experiments as selectors
from portal.selectors.experiments.experiments import Run
from portal.selectors.jobs.jobs import get_job
from portal.selectors.sweeps.sweeps import metric_directions
from portal.services.experiments.experiments import (
    do_delete_tag,
    do_delete_tag_of_runs,
    do_set_note,
    do_set_tag,
    do_set_tag_of_runs,
)
from portal.services.jobs.reruns import record_of
from portal.tracking.client import TrackingUnavailable, send
from portal.tracking.endpoints import ARTIFACT_TIMEOUT_S, artifact_path_problem
from portal.web.display.csv_download import csv_response
from portal.web.display.formatting import duration, metric_value
from portal.web.experiments.comparison import BestValue, best_values, cautions, compare_runs, gpus_text
from portal.web.experiments.parallel import build_parallel_coordinates
from portal.web.views import action, page, posted_values, refusals_as_messages

PAGE_SIZE = 50
MAX_COMPARED = 4
MAX_COLUMNS = 4
"""Parameters, and metrics, shown as columns of the list."""
MAX_NUMBER_LENGTH = 8
MAX_CHARTS = 8
MAX_CSV_RUNS = 1000
MAX_PROJECTS = 200
RUN_STATES = {
    "RUNNING": ("running", gettext_noop("Running")),
    "SCHEDULED": ("waiting", gettext_noop("Scheduled")),
    "FINISHED": ("done", gettext_noop("Completed")),
    "FAILED": ("failed", gettext_noop("Failed")),
    "KILLED": ("stopped", gettext_noop("Stopped")),
}
_OPERATOR = re.compile(r"[=<>]|\b(I?LIKE|IN)\b", re.IGNORECASE)


class MetricCell(NamedTuple):
    """A metric of a run. ``best`` is its direction if no run shown has a better value."""

    name: str
    value: float | None
    best: Direction | None


@dataclass(frozen=True)
class RunRow:
    """A run as a row, with the values of the columns; ``number`` is its place among the compared runs, or 0."""

    run: Run
    state: tuple[str, str]
    took: str
    params: list[str | None]
    metrics: list[MetricCell]
    number: int = 0
    gpus: str = ""

    @property
    def letter(self) -> str:
        return "ABCD"[self.number - 1] if self.number else ""


@page(AccessPolicy.SIGNED_IN)
def experiments(request: HttpRequest, user: User) -> HttpResponse:
    projects = list(visible_projects(user).order_by("name")[:MAX_PROJECTS])
    named = request.GET.get("project", "")
    project = selectors.get_visible_project(user, named) if named else default_project(user, projects)
    context: dict[str, Any] = {
        "projects": projects,
        "project": project,
        "search": request.GET.get("q", "").strip()[:500],
    }
    if project is not None:
        try:
            context |= _list_context(request, user, project, context["search"])
        except TrackingUnavailable as error:
            context["problem"] = error.message
        except InvalidRequest as error:
            context["refusal"] = error.message
    return render(request, "experiments/page.html", context)


@page(AccessPolicy.SIGNED_IN)
def mlflow_link(request: HttpRequest, user: User, project_id: str = "") -> HttpResponse:
    """Redirect a link that MLflow's client printed; browsers keep its fragment, which names the run."""
    query = f"?{urlencode({'project': project_id})}" if project_id else ""
    return redirect(f"{reverse('experiments')}{query}")


def default_project(user: User, projects: list[Project]) -> Project | None:
    """Return the project of the user's newest job, else that of the newest running job, else the first."""
    running = Job.objects.filter(project__in=projects, state=JobState.RUNNING.value)
    for jobs in (Job.objects.filter(owner=user), running):
        newest = jobs.order_by("-id").values_list("project_id", flat=True).first()
        if chosen := next((row for row in projects if row.pk == newest), None):
            return chosen
    return projects[0] if projects else None


def _list_context(request: HttpRequest, user: User, project: Project, search: str) -> dict[str, Any]:
    listed = selectors.list_experiments(project)
    experiment = request.GET.get("experiment", "")
    chosen = [each for each in listed if each.id == experiment]
    context: dict[str, Any] = {"experiments": listed, "experiment": experiment if chosen else ""}
    mine, running = "mine" in request.GET, "running" in request.GET
    found = selectors.search_runs(
        project,
        [each.id for each in chosen or listed],
        filter_text=list_filter(search, user if mine else None, running=running),
        limit=PAGE_SIZE,
        page_token=request.GET.get("after", "")[:2000],
    )
    compared = list(dict.fromkeys(request.GET.getlist("run")))[:MAX_COMPARED]
    others = {run.id: run for run in found.runs}
    runs = [others.get(each) or selectors.get_run(project, each) for each in compared]
    numbers = {run.id: number for number, run in enumerate(runs, start=1)}
    params, metrics = common_names(found.runs)
    older = request.GET.copy()
    older["after"] = found.next_token
    jobs = selectors.jobs_of_runs(user, [*found.runs, *runs])
    differences = compare_runs(runs, jobs)
    best = best_values(found.runs, metric_directions(project, metrics))
    return context | {
        "may_edit": can(user, Permission.SUBMIT, project),
        "mine": mine,
        "running": running,
        "running_count": sum(run.is_running for run in found.runs),
        "gpu_hours": sum(jobs[job].gpu_hours for job in {run.job for run in found.runs} & jobs.keys()),
        "params": params,
        "metrics": metrics,
        "rows": [run_row(run, params, metrics, numbers.get(run.id, 0), jobs, best) for run in found.runs],
        "older": f"?{older.urlencode()}" if found.next_token else "",
        "compared": [run_row(run, params, metrics, number) for number, run in enumerate(runs, start=1)],
        "compared_jobs": list(dict.fromkeys(run.job for run in runs if run.job)),
        "compared_gpus": any(jobs[run.job].gpus for run in runs if run.job in jobs),
        "differences": [row for row in differences if row.differs],
        "equal_rows": [row for row in differences if not row.differs],
        "cautions": cautions(runs, differences),
        "chart_query": _chart_query(project, runs),
        "parallel": build_parallel_coordinates(found.runs, numbers, metrics) if runs else None,
    }


def run_filter(search: str) -> str:
    """Return MLflow's filter: the search itself if it has an operator, else a part of the run's name."""
    if not search or _OPERATOR.search(search):
        return search
    return f"attributes.run_name ILIKE {selectors.quoted(f'%{search}%')}"


def list_filter(search: str, owner: User | None, *, running: bool) -> str:
    """Return MLflow's filter of a list: the search, and the runs of ``owner``, and those that have not ended."""
    mine = f"tags.`{USER_TAG}` = {selectors.quoted(owner.username)}" if owner else ""
    parts = [run_filter(search), mine, "attributes.status = 'RUNNING'" if running else ""]
    return " and ".join(filter(None, parts))


def common_names(runs: list[Run]) -> tuple[list[str], list[str]]:
    """Return the parameters that differ and the metrics of most runs, each at most MAX_COLUMNS."""
    values: dict[str, set[str]] = {}
    counts: dict[str, int] = {}
    for run in runs:
        for name, value in run.params.items():
            values.setdefault(name, set()).add(value)
        for name in run.metrics:
            counts[name] = counts.get(name, 0) + 1
    params = sorted(values, key=lambda name: (len(values[name]) < 2, name))[:MAX_COLUMNS]
    return params, sorted(counts, key=lambda name: (-counts[name], name))[:MAX_COLUMNS]


def run_row(
    run: Run,
    params: list[str],
    metrics: list[str],
    number: int = 0,
    jobs: Mapping[str, selectors.RunJob] | None = None,
    best: Mapping[str, BestValue] | None = None,
) -> RunRow:
    job = (jobs or {}).get(run.job)
    ended = run.ended_at
    took = duration((ended - run.started_at).total_seconds()) if ended and run.started_at else ""
    return RunRow(
        run,
        RUN_STATES.get(run.status, ("waiting", run.status)),
        took,
        [short_parameter(run.params.get(name)) for name in params],
        [_metric_cell(name, run.metrics.get(name), (best or {}).get(name)) for name in metrics],
        number,
        gpus_text(job) if job else "",
    )


def _metric_cell(name: str, value: float | None, best: BestValue | None) -> MetricCell:
    return MetricCell(name, value, best.direction if best and best.value == value else None)


def short_parameter(value: str | None) -> str | None:
    """Return a long number as a metric is shown, and anything else unchanged."""
    if value is None or len(value) <= MAX_NUMBER_LENGTH:
        return value
    try:
        number = float(value)
    except ValueError:
        return value
    return metric_value(number) if math.isfinite(number) else value


def _chart_query(project: Project, runs: list[Run]) -> str:
    """Return the query of the charts' data."""
    return urlencode([("project", project.public_id), *(("run", run.id) for run in runs)]) if runs else ""


@page(AccessPolicy.SIGNED_IN)
def series(request: HttpRequest, user: User) -> JsonResponse:
    """Return the curves of up to four runs: for each metric, steps and values by run.

    Values that are not finite are the strings of ``SPECIAL_METRICS``.
    """
    project = selectors.get_visible_project(user, request.GET.get("project", ""))
    ids = list(dict.fromkeys(request.GET.getlist("run")))[:MAX_COMPARED]
    runs = [selectors.get_run(project, each) for each in ids]
    _, names = common_names(runs)
    others = sorted({name for run in runs for name in run.metrics} - set(names))
    curves = {}
    jobs = selectors.jobs_of_runs(user, runs)
    starts_s = {run.id: run.started_at.timestamp() for run in runs if run.started_at}
    for name in [*names, *others][:MAX_CHARTS]:
        found = selectors.read_metric_series(project, ids, name)
        curves[name] = {
            run: {
                "steps": [each.step for each in points],
                "hours": [max(0.0, each.at_s - starts_s.get(run, each.at_s)) / 3600 for each in points],
                "values": [metric_name(each.value) for each in points],
            }
            for run, points in found.items()
        }
    shown = [
        {
            "id": run.id,
            "name": run.name,
            "running": run.is_running,
            "gpus": jobs[run.job].gpus if run.job in jobs else 0,
        }
        for run in runs
    ]
    return JsonResponse(
        {"runs": shown, "metrics": curves, "omitted": max(0, len(names) + len(others) - MAX_CHARTS)}
    )


@page(AccessPolicy.SIGNED_IN)
def runs_csv(request: HttpRequest, user: User) -> HttpResponseBase:
    """Download the runs of a project that a filter finds, at most ``MAX_CSV_RUNS``."""
    project = selectors.get_visible_project(user, request.GET.get("project", ""))
    listed = [each.id for each in selectors.list_experiments(project)]
    experiment = request.GET.get("experiment", "")
    text = list_filter(
        request.GET.get("q", "").strip()[:500],
        user if "mine" in request.GET else None,
        running="running" in request.GET,
    )
    chosen = [experiment] if experiment in listed else listed
    runs = selectors.search_runs(project, chosen, filter_text=text, limit=MAX_CSV_RUNS).runs
    jobs = selectors.jobs_of_runs(user, runs)
    params = sorted({name for run in runs for name in run.params})
    metrics = sorted({name for run in runs for name in run.metrics})
    columns = ("run", "name", "status", "user", "started_at", "ended_at", "job", "gpu_hours")
    named = [*(f"params.{name}" for name in params), *(f"metrics.{name}" for name in metrics)]
    rows = (
        (
            run.id,
            run.name,
            run.status,
            run.user,
            run.started_at.isoformat(timespec="seconds") if run.started_at else "",
            run.ended_at.isoformat(timespec="seconds") if run.ended_at else "",
            run.job,
            f"{jobs[run.job].gpu_hours:.4f}" if run.job in jobs else "",
            *(run.params.get(name) for name in params),
            *(run.metrics.get(name) for name in metrics),
        )
        for run in runs
    )
    return csv_response(f"{project.name}-runs.csv", (*columns, *named), rows)


@page(AccessPolicy.SIGNED_IN)
def run(request: HttpRequest, user: User, project_id: str, run_id: str) -> HttpResponse:
    project = selectors.get_visible_project(user, project_id)
    found = selectors.get_run(project, run_id)
    folder = request.GET.get("path", "").strip("/")
    job = visible_jobs(user).filter(public_id=found.job).first() if found.job else None
    return render(
        request,
        "experiments/run.html",
        {
            "project": project,
            "run": found,
            "row": run_row(found, [], []),
            "job": job,
            "record": record_of(job) if job else None,
            "params": sorted(found.params.items()),
            "metrics": sorted(found.metrics.items()),
            "tags": sorted(found.tags.items()),
            "artifacts": selectors.list_artifacts(project, run_id, folder),
            "folder": folder,
            "parent": folder.rpartition("/")[0],
            "chart_query": _chart_query(project, [found]),
            "may_edit": can(user, Permission.SUBMIT, project),
        },
    )


@action(AccessPolicy.SIGNED_IN)
def edit_run(request: HttpRequest, user: User, project_id: str, run_id: str) -> HttpResponse:
    """Set the note, or set or remove a tag."""
    project = selectors.get_visible_project(user, project_id)
    with refusals_as_messages(request):
        if "note" in request.POST:
            do_set_note(user, project, run_id, request.POST["note"].strip())
        elif "remove" in request.POST:
            do_delete_tag(user, project, run_id, request.POST["remove"])
        else:
            given = posted_values(request, "tag", "value")
            do_set_tag(user, project, run_id, given["tag"], given["value"])
    return redirect("run", project_id, run_id)


@action(AccessPolicy.SIGNED_IN)
def tag_runs(request: HttpRequest, user: User, project_id: str) -> HttpResponse:
    """Set or remove a tag of the runs chosen in the list, and return to the list."""
    project = selectors.get_visible_project(user, project_id)
    runs, given = request.POST.getlist("run"), posted_values(request, "tag", "value")
    with refusals_as_messages(request):
        if "remove" in request.POST:
            count = do_delete_tag_of_runs(user, project, runs, given["tag"])
            text = ngettext(
                "The tag {tag} is removed from {count} run.",
                "The tag {tag} is removed from {count} runs.",
                count,
            )
        else:
            count = do_set_tag_of_runs(user, project, runs, given["tag"], given["value"])
            text = ngettext(
                "The tag {tag} is added to {count} run.", "The tag {tag} is added to {count} runs.", count
            )
        messages.success(request, text.format(tag=given["tag"], count=count))
    query = QueryDict(request.POST.get("query", "")[:4000]).urlencode()
    return redirect(f"{reverse('experiments')}?{query}")


@page(AccessPolicy.SIGNED_IN)
def artifact(request: HttpRequest, user: User, project_id: str, run_id: str) -> HttpResponseBase:
    """Return a file of a run as a download."""
    project = selectors.get_visible_project(user, project_id)
    path = request.GET.get("path", "")
    if artifact_path_problem(path, of_file=True):
        raise NotFound(_("There is no such file."))
    stored = selectors.artifact_path(project, selectors.get_run(project, run_id), path)
    answer = send(
        project.public_id,
        "GET",
        f"/api/2.0/mlflow-artifacts/artifacts/{stored}",
        headers=range_headers(request),
        timeout_s=ARTIFACT_TIMEOUT_S,
    )
    if answer.status not in ARTIFACT_STATUSES:
        answer.close()
        raise NotFound(_("There is no such file."))
    return artifact_response(request, answer, path.rpartition("/")[2])


@page(AccessPolicy.SIGNED_IN)
def job_runs(request: HttpRequest, user: User, public_id: str) -> HttpResponse:
    """Return the runs of a job as a part of its page."""
    job = get_job(user, public_id)
    context: dict[str, Any] = {"job": job, "project": job.project}
    try:
        runs = selectors.list_job_runs(job)
        _, metrics = common_names(runs)
        context |= {
            "rows": [run_row(each, [], metrics) for each in runs],
            "metrics": metrics,
            "chart_query": _chart_query(job.project, runs[:1]),
            "growing": any(each.is_running for each in runs),
        }
    except TrackingUnavailable as error:
        context["problem"] = error.message
    return render(request, "experiments/job_runs.html", context)
