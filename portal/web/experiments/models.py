"""The model registry: models of one or all projects, versions with stages and aliases, and where each comes from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

from django.contrib import messages
from django.http import HttpRequest, HttpResponse, QueryDict
from django.shortcuts import redirect, render
from django.urls import reverse
from django.utils.translation import gettext as _

from portal.access import AccessPolicy, Permission, can, visible_projects
from portal.domain.experiments.tracking import MODEL_STAGES
from portal.errors import NotFound
from portal.models import Project, Service, User
from portal.selectors.experiments import experiments as selectors
from portal.selectors.experiments.experiments import ModelVersion, ProjectModel, RegisteredModel, Run
from portal.selectors.serving.model_servers import ModelService, service_status, services_of_models
from portal.services.experiments.experiments import do_register_model, do_set_alias, do_set_stage
from portal.services.workspaces.access import service_origin
from portal.tracking.client import TrackingUnavailable
from portal.web.display.formatting import parse_whole_number
from portal.web.experiments.comparison import compare_runs
from portal.web.experiments.experiments import MAX_COMPARED, MAX_PROJECTS, common_names
from portal.web.views import action, page, posted_values, refusals_as_messages

PAGE_SIZE = 50
ALL_PROJECTS = "all"
"""Value of ``project`` for the models of all visible projects."""
MAX_METRICS = 2
"""Metrics shown as columns of the versions."""
STAGE_ICONS = {"Production": "running", "Staging": "starting", "Archived": "done", "None": "stopped"}


@page(AccessPolicy.SIGNED_IN)
def models(request: HttpRequest, user: User) -> HttpResponse:
    """The models of a project, or of all that the user may see; ``model_project`` is that of the chosen model."""
    projects = list(visible_projects(user).order_by("name"))
    named = request.GET.get("project", "")
    is_all = named == ALL_PROJECTS or (not named and len(projects) > 1)
    scope = [selectors.get_visible_project(user, named)] if named and not is_all else projects
    list_project = ALL_PROJECTS if is_all else "".join(each.public_id for each in scope)
    context: dict[str, Any] = {
        "projects": projects[:MAX_PROJECTS],
        "project": None if is_all or not scope else scope[0],
        "is_all": is_all,
        "list_project": list_project,
        "stages": MODEL_STAGES,
        "search": request.GET.get("q", "").strip(),
    }
    if scope:
        try:
            context |= _registry_context(user, scope, request.GET)
        except TrackingUnavailable as error:
            context["problem"] = error.message
    return render(request, "experiments/models.html", context)


@dataclass(frozen=True)
class VersionRow:
    """A version of a model: the run that logged it, values of the columns, and the services that serve it."""

    version: ModelVersion
    icon: str
    run: Run | None
    metrics: list[tuple[str, float | None]]
    served: list[ModelService]


@dataclass(frozen=True)
class ServiceCard:
    """A service of the model: state, address, and its versions that serve the model, the newest first."""

    service: Service
    symbol: tuple[str, str]
    url: str
    versions: list[ModelService]


@dataclass(frozen=True)
class ModelRow:
    """A model of the list with the services that serve it."""

    project: Project
    model: RegisteredModel
    cards: list[ServiceCard]
    is_chosen: bool


def _registry_context(user: User, scope: list[Project], query: QueryDict) -> dict[str, Any]:
    """Return the list, and the chosen model with its versions; the first of the list if none is named."""
    number, search = parse_whole_number(query.get("page", "")) or 1, query.get("q", "").strip()
    listed = selectors.list_models(scope, PAGE_SIZE, (number - 1) * PAGE_SIZE, search=search)
    if number > 1 and not listed.models:
        number, listed = 1, selectors.list_models(scope, PAGE_SIZE, search=search)
    chosen = _chosen_model(user, scope, listed.models, query)
    if chosen is None:
        return {"models": []}
    services = services_of_models(user, {row.project for row in [chosen, *listed.models]})
    rows = [
        ModelRow(*row, _cards(services.get(row.key, [])), is_chosen=row.key == chosen.key)
        for row in listed.models
    ]
    return _model_context(user, *chosen, services.get(chosen.key, []), query) | {
        "models": rows,
        "newer": _page_query(query, number - 1) if number > 1 else "",
        "older": _page_query(query, number + 1) if listed.has_more else "",
    }


def _page_query(query: QueryDict, number: int) -> str:
    changed = query.copy()
    changed["page"] = str(number)
    return f"?{changed.urlencode()}"


def _chosen_model(
    user: User, scope: list[Project], listed: list[ProjectModel], query: QueryDict
) -> ProjectModel | None:
    """Return the named model, which may be on another page of the list. Raise NotFound."""
    name = query.get("model", "")
    if not name:
        return listed[0] if listed else None
    owner = scope[0].public_id if len(scope) == 1 else query.get("model_project", "")
    for row in listed:
        if row.model.name == name and owner in ("", row.project.public_id):
            return row
    project = selectors.get_visible_project(user, owner)
    try:
        return ProjectModel(project, selectors.get_model(project, name))
    except NotFound as error:
        raise NotFound(_("There is no such model.")) from error


def _model_context(
    user: User, project: Project, chosen: RegisteredModel, mine: list[ModelService], query: QueryDict
) -> dict[str, Any]:
    version, stage = query.get("version", ""), query.get("stage", "")
    versions = selectors.list_versions(project, chosen)
    runs = selectors.runs_by_id(project, [each.run for each in versions if each.run])
    shown = next((each for each in versions if each.version == version), versions[0] if versions else None)
    metrics = common_names([runs[each.run] for each in versions if each.run in runs])[1][:MAX_METRICS]
    rows = [_version_row(each, runs.get(each.run), metrics, mine) for each in versions]
    compared = [each.run for each in versions if each.run in runs][:MAX_COMPARED]
    return {
        "project": project,
        "may_edit": can(user, Permission.SUBMIT, project),
        "model": chosen,
        "stages_used": [each for each in MODEL_STAGES if any(row.version.stage == each for row in rows)],
        "stage": stage,
        "count": len(rows),
        "metrics": metrics,
        "versions": [row for row in rows if stage in ("", row.version.stage)],
        "comparison": urlencode([("project", project.public_id), *(("run", each) for each in compared)])
        if len(compared) > 1
        else "",
        "cards": _cards(mine),
        **(_version_origin(user, project, shown, versions, runs, mine) if shown else {}),
    }


def _cards(served: list[ModelService]) -> list[ServiceCard]:
    """Return the services that serve a model, each once."""
    services = {each.service.pk: each.service for each in served}.values()
    return [
        ServiceCard(
            service,
            service_status(service),
            service_origin(service),
            [each for each in served if each.service.pk == service.pk],
        )
        for service in services
    ]


def _version_row(
    version: ModelVersion, run: Run | None, metrics: list[str], served: list[ModelService]
) -> VersionRow:
    return VersionRow(
        version,
        STAGE_ICONS.get(version.stage, "stopped"),
        run,
        [(name, run.metrics.get(name) if run else None) for name in metrics],
        [each for each in served if each.version.model_version == version.version],
    )


def _version_origin(
    user: User,
    project: Project,
    version: ModelVersion,
    versions: list[ModelVersion],
    runs: dict[str, Run],
    served: list[ModelService],
) -> dict[str, Any]:
    """Return the version with its run, and the job of that, as far as they exist and the user may see them."""
    run = runs.get(version.run) or _run_outside_list(project, version.run)
    found = selectors.jobs_of_runs(user, [run] if run else []).get(run.job if run else "")
    before = next((each for each in versions if int(each.version) < int(version.version)), None)
    earlier = runs.get(before.run) if before else None
    changed = None
    if run and earlier and before:
        names = [row.name for row in compare_runs([run, earlier], {}) if row.differs]
        changed = (before.version, names)
    return {
        "shown": version,
        "run": run,
        "origin": found,
        "changed": changed,
        "services": [each for each in served if each.version.model_version == version.version],
    }


def _run_outside_list(project: Project, run: str) -> Run | None:
    """Return a run that is in none of the listed experiments; None if there is none."""
    try:
        return selectors.get_run(project, run) if run else None
    except NotFound:
        return None


@action(AccessPolicy.SIGNED_IN)
def register_model(request: HttpRequest, user: User, project_id: str, run_id: str) -> HttpResponse:
    """Register an artifact of a run as a version of a model."""
    project = selectors.get_visible_project(user, project_id)
    given = posted_values(request, "path", "model")
    version = ""
    with refusals_as_messages(request):
        version = do_register_model(user, project, run_id, given["path"], given["model"])
        messages.success(
            request,
            _("Version {version} of {model} is registered.").format(version=version, model=given["model"]),
        )
    if not version:
        return redirect("run", project_id, run_id)
    shown = {"project": project.public_id, "model": given["model"], "version": version}
    return redirect(f"{reverse('models')}?{urlencode(shown)}")


@action(AccessPolicy.SIGNED_IN)
def change_version(request: HttpRequest, user: User, project_id: str) -> HttpResponse:
    """Set the stage of a version, or move an alias to it."""
    project = selectors.get_visible_project(user, project_id)
    given = posted_values(request, "model", "version", "stage", "alias", "list")
    with refusals_as_messages(request):
        if given["alias"]:
            do_set_alias(user, project, given["model"], given["version"], given["alias"])
        else:
            do_set_stage(user, project, given["model"], given["version"], given["stage"])
    shown = {"project": project.public_id, "model": given["model"], "version": given["version"]}
    if given["list"] == ALL_PROJECTS:
        shown |= {"project": ALL_PROJECTS, "model_project": project.public_id}
    return redirect(f"{reverse('models')}?{urlencode(shown)}")
