"""The model registry: models of a project, versions with stages and aliases, and where each comes from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.urls import reverse
from django.utils.translation import gettext as _

from portal.access import AccessPolicy, Permission, can, visible_projects
from portal.domain.tracking import MODEL_STAGES
from portal.errors import NotFound
from portal.models import Project, Service, User
from portal.selectors import experiments as selectors
from portal.selectors.experiments import ModelVersion, Run
from portal.selectors.services import ModelService, service_status, services_of_models
from portal.services.experiments import do_register_model, do_set_alias, do_set_stage
from portal.services.workspaces.access import service_origin
from portal.tracking.client import TrackingUnavailable
from portal.web.experiments.comparison import compare_runs
from portal.web.experiments.experiments import MAX_COMPARED, MAX_PROJECTS, common_names, default_project
from portal.web.views import action, page, posted_values, refusals_as_messages

MAX_METRICS = 2
"""Metrics shown as columns of the versions."""
STAGE_ICONS = {"Production": "running", "Staging": "starting", "Archived": "done", "None": "stopped"}


@page(AccessPolicy.SIGNED_IN)
def models(request: HttpRequest, user: User) -> HttpResponse:
    projects = list(visible_projects(user).order_by("name")[:MAX_PROJECTS])
    named = request.GET.get("project", "")
    project = selectors.get_visible_project(user, named) if named else default_project(user, projects)
    context: dict[str, Any] = {"projects": projects, "project": project, "stages": MODEL_STAGES}
    if project is not None:
        context["may_edit"] = can(user, Permission.SUBMIT, project)
        try:
            context |= _registry_context(
                user,
                project,
                request.GET.get("model", ""),
                request.GET.get("version", ""),
                request.GET.get("stage", ""),
            )
        except TrackingUnavailable as away:
            context["problem"] = away.message
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


def _registry_context(user: User, project: Project, model: str, version: str, stage: str) -> dict[str, Any]:
    listed = selectors.list_models(project)
    chosen = next(
        (each for each in listed if each.name == model), listed[0] if listed and not model else None
    )
    if chosen is None:
        if model:
            raise NotFound(_("There is no such model."))
        return {"models": []}
    services = services_of_models(user, project)
    mine = services.get(chosen.name, [])
    versions = selectors.list_versions(project, chosen)
    runs = selectors.runs_by_id(project, [each.run for each in versions if each.run])
    shown = next((each for each in versions if each.version == version), versions[0] if versions else None)
    metrics = common_names([runs[each.run] for each in versions if each.run in runs])[1][:MAX_METRICS]
    rows = [_version_row(each, runs.get(each.run), metrics, mine) for each in versions]
    compared = [each.run for each in versions if each.run in runs][:MAX_COMPARED]
    return {
        "models": [(each, _cards(services.get(each.name, []))) for each in listed],
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
    given = posted_values(request, "model", "version", "stage", "alias")
    with refusals_as_messages(request):
        if given["alias"]:
            do_set_alias(user, project, given["model"], given["version"], given["alias"])
        else:
            do_set_stage(user, project, given["model"], given["version"], given["stage"])
    shown = {"project": project.public_id, "model": given["model"], "version": given["version"]}
    return redirect(f"{reverse('models')}?{urlencode(shown)}")
