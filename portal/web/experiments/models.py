"""The model registry: models of a project, versions with stages and aliases, and where each comes from."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlencode

from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.urls import reverse
from django.utils.translation import gettext as _

from portal.access import AccessPolicy, Permission, can, visible_jobs, visible_projects
from portal.domain.tracking import MODEL_STAGES
from portal.errors import NotFound
from portal.models import Project, User
from portal.selectors import experiments as selectors
from portal.selectors.experiments import ModelVersion, RegisteredModel, Run
from portal.selectors.services import services_of_model
from portal.services.experiments import do_register_model, do_set_alias, do_set_stage
from portal.tracking.client import TrackingUnavailable
from portal.web.experiments.experiments import MAX_PROJECTS, default_project
from portal.web.views import action, page, posted_values, refusals_as_messages

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
                user, project, request.GET.get("model", ""), request.GET.get("version", "")
            )
        except TrackingUnavailable as away:
            context["problem"] = away.message
    return render(request, "experiments/models.html", context)


def _registry_context(user: User, project: Project, model: str, version: str) -> dict[str, Any]:
    listed = selectors.list_models(project)
    chosen = next(
        (each for each in listed if each.name == model), listed[0] if listed and not model else None
    )
    if chosen is None:
        if model:
            raise NotFound(_("There is no such model."))
        return {"models": listed}
    versions = selectors.list_versions(project, chosen)
    shown = next((each for each in versions if each.version == version), versions[0] if versions else None)
    return {
        "models": listed,
        "model": chosen,
        "versions": [(each, STAGE_ICONS.get(each.stage, "stopped")) for each in versions],
        **(_version_origin(user, project, chosen, shown) if shown else {}),
    }


def _version_origin(
    user: User, project: Project, model: RegisteredModel, version: ModelVersion
) -> dict[str, Any]:
    """Return the version with its run and the job of that, as far as they exist and the user may see them."""
    run: Run | None = None
    if version.run:
        try:
            run = selectors.get_run(project, version.run)
        except NotFound:
            run = None
    job = visible_jobs(user).filter(public_id=run.job).first() if run and run.job else None
    deployed = services_of_model(user, project, model.name, version.version)
    return {"shown": version, "run": run, "job": job, "services": deployed}


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
