"""My work: workspaces, jobs with their summaries, quota, free GPUs, announcements, and first steps."""

from __future__ import annotations

from dataclasses import dataclass

from django.http import HttpRequest, HttpResponse
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from portal.access import AccessPolicy
from portal.domain.states import JobKind
from portal.models import Environment, Project, User
from portal.selectors.cluster import cluster_overview
from portal.selectors.cluster.cluster_overview import GpuModelSummary
from portal.selectors.cluster.portal_alerts import portal_health
from portal.selectors.jobs.jobs import JobFilter, list_jobs
from portal.selectors.nodes.metric_series import RecentGpuUse, recent_gpu_use
from portal.selectors.notices.announcements import MAX_SHOWN, current_announcements
from portal.selectors.projects.quota_usage import QuotaUsage, user_quota_usage
from portal.web.display.formatting import gpu_amount
from portal.web.display.job_rows import JobRow, job_rows
from portal.web.display.quota_bars import QuotaBar
from portal.web.views import page, render_live

RECENT_JOBS = 8
ENDED_JOBS = 20
SPARK_WIDTH, SPARK_HEIGHT = 120, 36
TABS = {"recent": gettext_lazy("Recent"), "active": gettext_lazy("Active"), "ended": gettext_lazy("Ended")}


@dataclass(frozen=True)
class WorkspaceCard:
    row: JobRow
    use: RecentGpuUse | None

    @property
    def spark_points(self) -> str:
        """The use of its GPUs as points of an SVG line; blank with fewer than two minutes."""
        points = self.use.points if self.use else []
        if len(points) < 2:
            return ""
        return " ".join(
            f"{SPARK_WIDTH - age * SPARK_WIDTH / 30:.0f},{SPARK_HEIGHT - 1 - percent / 100 * (SPARK_HEIGHT - 2):.1f}"
            for age, percent in points
        )

    @property
    def may_extend(self) -> bool:
        return self.row.may_control and self.row.deadline is not None and self.row.ready


@dataclass(frozen=True)
class ProjectQuota:
    """A project's bar in one pool, with what its user could start now."""

    bar: QuotaBar
    startable: str


@page(AccessPolicy.SIGNED_IN)
def home(request: HttpRequest, user: User) -> HttpResponse:
    tab = request.GET.get("show", "")
    tab = tab if tab in TABS else "recent"
    living = list(list_jobs(user, JobFilter(live=True)).filter(owner=user).order_by("-id")[:40])
    ended_count = ENDED_JOBS if tab == "ended" else RECENT_JOBS
    past = list(list_jobs(user, JobFilter(live=False)).filter(owner=user).order_by("-id")[:ended_count])
    rows = job_rows(user, living + past)
    live, ended = rows[: len(living)], rows[len(living) :]
    workspaces = [row for row in live if row.is_workspace]
    live_jobs = [row for row in live if not row.is_workspace]
    recent = (live_jobs + ended)[: max(RECENT_JOBS, len(live_jobs))]
    use = recent_gpu_use(row.attempt for row in workspaces if row.attempt)
    shares = user_quota_usage(user)
    strips = cluster_overview.free_capacity(user, shares)
    context = {
        "cards": [WorkspaceCard(row, use.get(row.attempt.pk) if row.attempt else None) for row in workspaces],
        "jobs": {"recent": recent, "active": live_jobs, "ended": ended}[tab],
        "tab": tab,
        "tabs": [(name, label, len(live_jobs) if name == "active" else None) for name, label in TABS.items()],
        "strips": strips,
        "free": sum(strip.free for strip in strips),
        "total": sum(strip.total for strip in strips),
        "quotas": project_quotas(shares, strips),
        "portal_alerts": portal_health().alerts if user.is_admin else [],
        "announcements": current_announcements()[:MAX_SHOWN],
        "unreachable_jobs": [row for row in live if row.is_unreachable],
        "steps": first_steps(live + ended, user),
        "has_project": bool(shares) or user.is_admin or user.memberships.exists(),
    }
    return render_live(request, "home/page.html", "home/live.html", context)


def project_quotas(
    shares: list[QuotaUsage], strips: list[GpuModelSummary]
) -> list[tuple[Project, list[ProjectQuota]]]:
    """Return the pools of each project, with its name only in the first of them."""
    free: dict[int, int] = {}
    for strip in strips:
        for pool, count in strip.free_by_pool.items():
            free[pool] = free.get(pool, 0) + count
    found: dict[Project, list[ProjectQuota]] = {}
    for share in shares:
        bar = QuotaBar(share, share.pool.name)
        found.setdefault(share.project, []).append(
            ProjectQuota(bar, _startable_text(share, free.get(share.pool.pk, 0)))
        )
    return list(found.items())


def _startable_text(share: QuotaUsage, free_gpus: int) -> str:
    left = share.startable_milli
    if left is not None and left < 1000 * free_gpus:
        text = (
            _("{gpus} could start now, within the limit of a project above.")
            if share.bound_by_ancestor
            else _("{gpus} could start now, within the limit.")
        )
        return text.format(gpus=gpu_amount(left))
    return (
        _("{free_gpus} could start now.").format(free_gpus=free_gpus)
        if free_gpus
        else _("None could start now: no GPU is free.")
    )


def first_steps(rows: list[JobRow], user: User) -> list[tuple[bool, str, str]]:
    """Return the first steps of a new user: done or not, text, URL. Empty once all are done."""
    opened = any(row.is_workspace for row in rows)
    ran = any(row.job.kind == JobKind.TRAINING.value for row in rows)
    offered = Environment.objects.filter(enabled=True).exists()
    steps = [
        (user.has_usable_password(), _("Set a password"), "account"),
        (
            opened,
            _("Start a notebook")
            if offered
            else _("Start a notebook (an administrator adds an environment first)"),
            "launch",
        ),
        (ran, _("Run a batch job"), "launch"),
    ]
    return [] if all(done for done, _, _ in steps) else steps
