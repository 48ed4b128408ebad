"""The tab of a job with its checkpoints, its attempts with the work they lost, and its rules for restarts."""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass

from django.contrib import messages
from django.core.paginator import Paginator
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.utils import timezone
from django.utils.translation import gettext as _

from portal.access import AccessPolicy
from portal.domain.jobs.checkpoints import DEFAULT_CHECKPOINT_DIR
from portal.domain.states import AttemptState
from portal.models import Attempt, User
from portal.selectors.jobs.checkpoints import (
    LossNow,
    attempt_observation,
    get_checkpoint,
    job_checkpoints,
    kept_because,
    last_checkpoint,
    loss_now,
    next_checkpoint_at,
    resume_choice,
    start_span_s,
)
from portal.selectors.jobs.jobs import get_job
from portal.selectors.jobs.phases import run_time_s
from portal.selectors.jobs.progress import attempt_progress
from portal.services.jobs.checkpoints import do_check_checkpoints, do_pin_checkpoint
from portal.services.jobs.submission import do_resume_from_checkpoint
from portal.web.display.formatting import duration
from portal.web.display.job_rows import ATTEMPT_ICONS, state_label
from portal.web.jobs.job.overview import job_page_context
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
    saved = last_checkpoint(last) if last else None
    loss = loss_now(found, last, saved.at if saved else None)
    next_at = next_checkpoint_at(rows, last)
    lost = [each.work.lost_gpu_s for each in context["attempts"] if hasattr(each, "work") and each.work]
    return render(
        request,
        "jobs/job/checkpoints.html",
        context
        | {
            "tab": "checkpoints",
            "checkpoints": [(row, reasons[row.name]) for row in shown],
            "shown": shown,
            "count": len(rows),
            "total_mib": sum(row.size_bytes for row in rows) / 2**20,
            "folder": f"{found.checkpoint_dir or DEFAULT_CHECKPOINT_DIR}/{found.public_id}",
            "loss": loss,
            "next_at": next_at,
            "next_percent": _passed_percent(loss, next_at),
            "start_text": _start_text(context["attempts"]),
            "choice": resume_choice(rows, request.GET.get("from", ""), found, last),
            "may_check": last is not None
            and last.state == AttemptState.RUNNING
            and last.checkpoint_at is not None,
            "attempt_lines": [_attempt_line(each) for each in context["attempts"]],
            "lost_gpu_s": sum(lost),
            "observation": attempt_observation(last) if last else None,
            "excluded_nodes": list(found.avoid_nodes.order_by("name").values_list("name", flat=True)),
        },
    )


def _passed_percent(loss: LossNow | None, next_at: dt.datetime | None) -> int | None:
    """Return which part of the time between the last and the next checkpoint has passed, at most 100."""
    if loss is None or next_at is None or next_at <= loss.since:
        return None
    return min(100, round(100 * ((timezone.now() - loss.since) / (next_at - loss.since))))


def _start_text(attempts: list[Attempt]) -> tuple[str, str] | None:
    """Return how long the starts of a job took: shortest and longest, blank where these are alike."""
    span = start_span_s(attempts)
    if span is None:
        return None
    low, high = duration(span[0]), duration(span[1])
    return low, high if high != low else ""


@dataclass(frozen=True)
class AttemptLine:
    """An attempt as a row: where and how long it ran, and its steps."""

    attempt: Attempt
    icon: str
    label: str
    nodes: list[str]
    ran_text: str
    steps: tuple[float, float] | None
    """Its first and last reported step."""


def _attempt_line(attempt: Attempt) -> AttemptLine:
    state = AttemptState(attempt.state)
    nodes = sorted({task.node.name for task in attempt.task_rows.all()})
    ran_s = run_time_s(attempt)
    progress = attempt_progress(attempt)
    return AttemptLine(
        attempt,
        ATTEMPT_ICONS.get(state, "stopped"),
        state_label(state.value),
        nodes,
        duration(ran_s) if ran_s is not None else "",
        (progress.start_units, progress.completed_units) if progress else None,
    )


@action(AccessPolicy.SIGNED_IN)
def check(request: HttpRequest, user: User, public_id: str) -> HttpResponse:
    """List and check the checkpoints of a running job again."""
    job = get_job(user, public_id)
    with refusals_as_messages(request):
        do_check_checkpoints(user, job)
        messages.success(request, _("The node of the job lists and checks its checkpoints again."))
    return redirect("job-checkpoints", public_id)


@action(AccessPolicy.SIGNED_IN)
def pin(request: HttpRequest, user: User, public_id: str) -> HttpResponse:
    row = get_checkpoint(user, public_id)
    with refusals_as_messages(request):
        do_pin_checkpoint(user, row, request.POST.get("pinned") == "1")
    return redirect("job-checkpoints", row.job.public_id)


@action(AccessPolicy.SIGNED_IN)
def resume(request: HttpRequest, user: User, public_id: str) -> HttpResponse:
    """Submit a new job that starts from the checkpoint, beside the one that saved it or in its place."""
    row = get_checkpoint(user, public_id)
    shown = ("job-checkpoints", row.job.public_id)
    with refusals_as_messages(request):
        job = do_resume_from_checkpoint(user, row, in_place=request.POST.get("in_place") == "1")
        messages.success(
            request,
            _("{name} is submitted and starts from {row_name}.").format(name=job.name, row_name=row.name),
        )
        shown = ("job", job.public_id)
    return redirect(*shown)
