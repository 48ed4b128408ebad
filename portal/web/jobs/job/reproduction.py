"""Code and packages of a job as files, the page of an exact rerun, and note and tags."""

from __future__ import annotations

import json
from typing import Any

from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.utils.translation import gettext as _

from portal.access import AccessPolicy, Permission, can
from portal.errors import NotFound
from portal.models import EnvironmentRecord, Job, User
from portal.selectors.jobs.jobs import get_job
from portal.services.jobs.annotations import do_annotate_job
from portal.services.jobs.reruns import checked_out_commit, do_rerun, find_drift, record_of
from portal.web.jobs.job.overview import job_page_context
from portal.web.views import action, form_page, page, refusals_as_messages

PACKAGES_FILE, DIFF_FILE, RECORD_FILE = "requirements.txt", "changes.diff", "environment.json"


@page(AccessPolicy.SIGNED_IN)
def environment_file(request: HttpRequest, user: User, public_id: str, name: str) -> HttpResponse:
    """Return a part of the record as a download."""
    job = get_job(user, public_id)
    record = record_of(job)
    if record is None:
        raise NotFound(_("Nothing was recorded of this job."))
    if name == PACKAGES_FILE:
        content = "".join(f"{line}\n" for line in record.packages)
    elif name == DIFF_FILE and can(user, Permission.CONTROL, job):
        content = record.git_diff
    elif name == RECORD_FILE:
        content = json.dumps(_as_json(user, job, record), indent=2, default=str) + "\n"
    else:
        raise NotFound(_("There is no such file."))
    return HttpResponse(
        content,
        content_type="text/plain; charset=utf-8",
        headers={"Content-Disposition": f'attachment; filename="{job.public_id}-{name}"'},
    )


def _as_json(user: User, job: Job, record: EnvironmentRecord) -> dict[str, Any]:
    """Return the record with the columns of its job, as REST does."""
    found = {field.name: getattr(record, field.name) for field in record._meta.fields}
    found |= {name: getattr(job, name) for name in ("image_digest", "launcher", "command", "seed")}
    return found | {
        "job": job.public_id,
        "git_diff": record.git_diff if can(user, Permission.CONTROL, job) else None,
    }


@form_page(AccessPolicy.SIGNED_IN)
def rerun(request: HttpRequest, user: User, public_id: str) -> HttpResponse:
    """Show what differs from the first run, and submit the job again."""
    job = get_job(user, public_id)
    if request.method == "POST":
        shown = ("job-rerun", job.public_id)
        with refusals_as_messages(request):
            fresh = do_rerun(user, job)[1]
            if fresh is not None:
                messages.success(
                    request,
                    _("{name} is submitted; it repeats {public_id}.").format(
                        name=fresh.name, public_id=job.public_id
                    ),
                )
                shown = ("job", fresh.public_id)
        return redirect(*shown)
    drift = find_drift(user, job)
    context = job_page_context(user, job) | {
        "tab": "rerun",
        "drift": drift,
        "is_blocked": any(each.blocking for each in drift),
        "record": record_of(job),
        "commit": checked_out_commit(job),
    }
    return render(request, "jobs/job/rerun.html", context)


@action(AccessPolicy.SIGNED_IN)
def annotate(request: HttpRequest, user: User, public_id: str) -> HttpResponse:
    job = get_job(user, public_id)
    with refusals_as_messages(request):
        tags = request.POST.get("tags")
        do_annotate_job(
            user, job, note=request.POST.get("note"), tags=None if tags is None else tags.split(",")
        )
    return redirect("job-run", public_id)
