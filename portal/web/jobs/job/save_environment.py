"""The tab of a running job on which it is saved as an environment."""

from __future__ import annotations

from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.utils.translation import gettext as _

from portal.access import AccessPolicy, Permission, require_permission
from portal.errors import InvalidRequest
from portal.models import Job, User
from portal.selectors.jobs.jobs import get_job
from portal.services.workspaces.saved_images import (
    do_delete_saved_environment,
    do_save_environment_of,
    get_saved_environment,
    is_in_progress,
    list_saved_images,
    may_save,
    problem_of,
    save_limit_mib,
)
from portal.web.jobs.job.overview import job_page_context
from portal.web.views import action, page, refusals_as_messages, render_live


@page(AccessPolicy.SIGNED_IN)
def save_environment_page(request: HttpRequest, user: User, public_id: str) -> HttpResponse:
    job = get_job(user, public_id)
    require_permission(user, Permission.CONTROL, job)
    rows = list_saved_images(user, job)[:50]
    shown = [{"saved": row, "waiting": is_in_progress(row), "problem": problem_of(row)} for row in rows]
    context = {"job": job, "saved": shown, "waiting": any(each["waiting"] for each in shown)}
    if request.headers.get("HX-Request"):
        return render_live(
            request, "jobs/job/save_environment.html", "jobs/job/saved_environments.html", context
        )
    return _render(request, user, job, context)


def _render(
    request: HttpRequest, user: User, job: Job, context: dict[str, object], status: int = 200
) -> HttpResponse:
    form = {"may_save": may_save(user, job), "limit_mib": save_limit_mib(job), "tab": "save-environment"}
    return render(
        request, "jobs/job/save_environment.html", job_page_context(user, job) | form | context, status=status
    )


@action(AccessPolicy.SIGNED_IN)
def save_environment(request: HttpRequest, user: User, public_id: str) -> HttpResponse:
    job = get_job(user, public_id)
    values = {name: request.POST.get(name, "") for name in ("name", "purpose", "audience")}
    with refusals_as_messages(request):
        try:
            do_save_environment_of(
                user,
                job,
                name=values["name"].strip(),
                purpose=values["purpose"],
                for_project=values["audience"] == "project",
            )
        except InvalidRequest as error:
            return _render(request, user, job, {"values": values, "errors": error.fields}, 400)
    return redirect("job-save-environment", public_id)


@action(AccessPolicy.SIGNED_IN)
def delete_saved_environment(request: HttpRequest, user: User, public_id: str) -> HttpResponse:
    row = get_saved_environment(user, public_id)
    job = row.saved_image.task.attempt.job
    name = row.name
    do_delete_saved_environment(user, row)
    messages.success(request, _("{name} is not offered any more.").format(name=name))
    return redirect("job-save-environment", job.public_id)
