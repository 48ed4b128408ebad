"""The tab of a workspace with its notebooks: choose one and run it as a batch job."""

from __future__ import annotations

import datetime as dt
from typing import Any
from urllib.parse import urlencode

from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.urls import reverse

from portal.access import AccessPolicy, Permission, can
from portal.models import NotebookListing, User
from portal.selectors.jobs.jobs import get_job
from portal.services.jobs.notebooks import (
    do_create_notebook_template,
    do_request_notebooks,
    get_listing,
    is_waiting,
)
from portal.web.jobs.job.overview import job_page_context
from portal.web.views import action, page, refusals_as_messages, render_live


@page(AccessPolicy.SIGNED_IN)
def notebooks(request: HttpRequest, user: User, public_id: str) -> HttpResponse:
    job = get_job(user, public_id)
    listing = get_listing(user, job)
    context = {
        "tab": "notebooks",
        "listing": listing,
        "waiting": is_waiting(listing),
        "notebooks": _rows(listing) if listing else [],
        "may_submit": can(user, Permission.SUBMIT, job.project),
    }
    whole = {} if request.headers.get("HX-Request") else job_page_context(user, job)
    return render_live(
        request, "jobs/job/notebooks.html", "jobs/job/notebooks_live.html", {"job": job} | whole | context
    )


def _rows(listing: NotebookListing) -> list[dict[str, Any]]:
    return [
        each | {"modified_at": dt.datetime.fromtimestamp(each["modified_s"], dt.UTC)}
        for each in listing.notebooks
    ]


@action(AccessPolicy.SIGNED_IN)
def list_notebooks(request: HttpRequest, user: User, public_id: str) -> HttpResponse:
    job = get_job(user, public_id)
    with refusals_as_messages(request):
        do_request_notebooks(user, job)
    return redirect("job-notebooks", public_id)


@action(AccessPolicy.SIGNED_IN)
def run_notebook(request: HttpRequest, user: User, public_id: str) -> HttpResponse:
    """Open the launch form with the batch job of a notebook."""
    job = get_job(user, public_id)
    target = reverse("job-notebooks", args=[public_id])
    with refusals_as_messages(request):
        template = do_create_notebook_template(user, job, request.POST.get("path", ""))
        query = {"template": template.public_id, "project": job.project.public_id}
        if job.pool:
            query["pool"] = job.pool.public_id
        target = f"{reverse('launch')}?{urlencode(query)}"
    return redirect(target)
