"""My work: workspaces, jobs with their summaries, quota, free GPUs, and first steps."""

from __future__ import annotations

from typing import Any

from django.http import HttpRequest, HttpResponse

from portal.access import AccessPolicy
from portal.domain.states import JobKind
from portal.models import Environment, User
from portal.selectors.jobs.jobs import JobFilter, list_jobs
from portal.selectors.nodes import cluster_overview
from portal.selectors.projects.quota_usage import user_quota_usage
from portal.web.display.job_rows import JobRow, job_rows
from portal.web.display.quota_bars import QuotaBar
from portal.web.views import page, render_live

RECENT_JOBS = 8


@page(AccessPolicy.SIGNED_IN)
def home(request: HttpRequest, user: User) -> HttpResponse:
    living = list(list_jobs(user, JobFilter(live=True)).filter(owner=user).order_by("-id")[:40])
    past = list(list_jobs(user, JobFilter(live=False)).filter(owner=user).order_by("-id")[:RECENT_JOBS])
    rows = job_rows(user, living + past)
    live, ended = rows[: len(living)], rows[len(living) :]
    workspaces = [row for row in live if row.is_workspace]
    live_jobs = [row for row in live if not row.is_workspace]
    jobs = (live_jobs + ended)[: max(RECENT_JOBS, len(live_jobs))]
    strips = cluster_overview.free_capacity(user)
    shares = user_quota_usage(user)
    context = {
        "workspaces": workspaces,
        "jobs": jobs,
        "strips": strips,
        "free": sum(strip.free for strip in strips),
        "total": sum(strip.total for strip in strips),
        "quotas": _by_project(shares),
        "unreachable_jobs": [row for row in live if row.is_unreachable],
        "steps": first_steps(live + ended, user),
        "has_project": bool(shares) or user.is_admin or user.memberships.exists(),
    }
    return render_live(request, "home/page.html", "home/live.html", context)


def _by_project(shares: list[Any]) -> list[tuple[str, list[QuotaBar]]]:
    found: dict[str, list[QuotaBar]] = {}
    for share in shares:
        found.setdefault(share.project.name, []).append(QuotaBar(share, share.pool.name))
    return list(found.items())


def first_steps(rows: list[JobRow], user: User) -> list[tuple[bool, str, str]]:
    """Return the first steps of a new user: done or not, text, URL. Empty once all are done."""
    opened = any(row.is_workspace for row in rows)
    ran = any(row.job.kind == JobKind.TRAINING.value for row in rows)
    offered = Environment.objects.filter(enabled=True).exists()
    steps = [
        (user.has_usable_password(), "Set a password", "account"),
        (
            opened,
            "Start a notebook"
            if offered
            else "Start a notebook (an administrator adds an environment first)",
            "launch",
        ),
        (ran, "Run a batch job", "launch"),
    ]
    return [] if all(done for done, _, _ in steps) else steps
