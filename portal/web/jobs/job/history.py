"""Two tabs of a job: how it was scheduled, and who changed it."""

from __future__ import annotations

import json

from django.core.paginator import Paginator
from django.db.models import Q
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.utils import timezone

from portal.access import AccessPolicy, Permission, require_permission
from portal.domain.jobs.reasons import VerdictCode
from portal.domain.states import JobState
from portal.models import AuditEntry, Job, User
from portal.selectors.jobs.jobs import get_job, job_events
from portal.web.cluster.audit import changed_fields
from portal.web.display.job_rows import current_verdict, verdict_details, verdict_label
from portal.web.jobs.job.forecast_display import explained_revisions
from portal.web.jobs.job.overview import dedupe_events, job_page_context
from portal.web.views import page

PAGE_SIZE = 50
SCHEDULING_EVENTS = (
    "submitted", "verdict", "job_state", "attempt_state", "changed", "edited", "moved", "image_pull", "image_pulled",
    "resume", "continues", "shrinks",
)  # fmt: skip


@page(AccessPolicy.SIGNED_IN)
def scheduling(request: HttpRequest, user: User, public_id: str) -> HttpResponse:
    """Show the decisions about a job, newest first, and its start forecasts; ``q`` searches the decisions."""
    found = get_job(user, public_id)
    revisions = explained_revisions(user, found)
    verdict = current_verdict(found)
    search = request.GET.get("q", "").strip()
    decisions = job_events(found).filter(kind__in=SCHEDULING_EVENTS).order_by("-id")
    if search:
        by_label = [code.value for code in VerdictCode if search.lower() in verdict_label(code.value).lower()]
        decisions = decisions.filter(
            Q(message__icontains=search) | Q(reason__icontains=search) | Q(reason__in=by_label)
        )
    listed = Paginator(decisions, PAGE_SIZE).get_page(request.GET.get("page"))
    oldest_first = [move.forecast for move, _ in reversed(revisions)]
    columns = ("made_at", "p10_at", "p50_at", "p90_at")
    times = {
        name.removesuffix("_at"): [getattr(row, name).timestamp() for row in oldest_first] for name in columns
    }
    shown = {
        "tab": "scheduling",
        "revisions": revisions,
        "chart": json.dumps({"at": times.pop("made"), "until": _last_forecast_until(found), **times}),
        "search": search,
        "verdict": verdict if listed.number == 1 and not search else None,
        "verdict_details": verdict_details(verdict) if verdict else [],
        "page": listed,
        "events": [(event, verdict_details(event)) for event in dedupe_events(list(listed))],
    }
    return render(request, "jobs/job/scheduling.html", job_page_context(user, found) | shown)


def _last_forecast_until(job: Job) -> float | None:
    """Return until when its last forecast is valid, in seconds since 1970; None once it no longer waits."""
    return timezone.now().timestamp() if job.state == JobState.PENDING else None


@page(AccessPolicy.SIGNED_IN)
def audit(request: HttpRequest, user: User, public_id: str) -> HttpResponse:
    found = get_job(user, public_id)
    require_permission(user, Permission.CONTROL, found)
    entries = AuditEntry.objects.filter(object_kind="job", object_id=found.public_id).order_by("-id")
    listed = Paginator(entries, 50).get_page(request.GET.get("page"))
    rows = [(entry, changed_fields(entry)) for entry in listed]
    shown = {"tab": "audit", "page": listed, "rows": rows}
    return render(request, "jobs/job/audit.html", job_page_context(user, found) | shown)
