"""The tab of a job with its checkpoints, its attempts with the work they lost, and its rules for restarts."""

from __future__ import annotations

from django.contrib import messages
from django.core.paginator import Paginator
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.utils.translation import gettext as _

from portal.access import AccessPolicy
from portal.domain.checkpoints import DEFAULT_CHECKPOINT_DIR
from portal.models import User
from portal.selectors.jobs.checkpoints import (
    attempt_observation,
    get_checkpoint,
    job_checkpoints,
    kept_because,
    loss_now,
)
from portal.selectors.jobs.jobs import get_job
from portal.services.jobs.checkpoints import do_pin_checkpoint
from portal.services.jobs.submission import do_resume_from_checkpoint
from portal.services.lifecycle.work_ledger import last_saved_at
from portal.web.job.overview import job_page_context
from portal.web.views import action, page, refusals_as_messages

ROWS_PER_PAGE = 50


@page(AccessPolicy.SIGNED_IN)
def checkpoints(request: HttpRequest, user: User, public_id: str) -> HttpResponse:
    found = get_job(user, public_id)
    context = job_page_context(user, found)
    rows = list(job_checkpoints(found))
    reasons = kept_because(found, rows)
    shown = Paginator(rows, ROWS_PER_PAGE).get_page(request.GET.get("page"))
    last = context["last"]
    lost = [each.work.lost_gpu_s for each in context["attempts"] if hasattr(each, "work") and each.work]
    return render(
        request,
        "job/checkpoints.html",
        context
        | {
            "tab": "checkpoints",
            "checkpoints": [(row, reasons[row.name]) for row in shown],
            "shown": shown,
            "count": len(rows),
            "total_mib": sum(row.size_bytes for row in rows) / 2**20,
            "folder": f"{found.checkpoint_dir or DEFAULT_CHECKPOINT_DIR}/{found.public_id}",
            "loss": loss_now(found, last, last_saved_at(last) if last else None),
            "lost_gpu_s": sum(lost),
            "observation": attempt_observation(last) if last else None,
            "excluded_nodes": list(found.avoid_nodes.order_by("name").values_list("name", flat=True)),
        },
    )


@action(AccessPolicy.SIGNED_IN)
def pin(request: HttpRequest, user: User, public_id: str) -> HttpResponse:
    row = get_checkpoint(user, public_id)
    with refusals_as_messages(request):
        do_pin_checkpoint(user, row, request.POST.get("pinned") == "1")
    return redirect("job-checkpoints", row.job.public_id)


@action(AccessPolicy.SIGNED_IN)
def resume(request: HttpRequest, user: User, public_id: str) -> HttpResponse:
    """Submit a new job that starts from the checkpoint."""
    row = get_checkpoint(user, public_id)
    shown = ("job-checkpoints", row.job.public_id)
    with refusals_as_messages(request):
        job = do_resume_from_checkpoint(user, row)
        messages.success(
            request,
            _("{name} is submitted and starts from {row_name}.").format(name=job.name, row_name=row.name),
        )
        shown = ("job", job.public_id)
    return redirect(*shown)
