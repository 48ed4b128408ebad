"""The frame of every page: navigation, free GPUs, and whether any GPU is simulated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from django.db.models import Count, Q, QuerySet, Subquery
from django.http import HttpRequest
from django.urls import reverse
from django.utils.functional import SimpleLazyObject
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, gettext_noop

from portal.access import own_notices, visible_jobs
from portal.domain.states import LIVE_JOB_STATES, DesiredState, GpuState, JobState
from portal.models import Gpu, Job, User
from portal.selectors.cluster.recovery import recovery_status
from portal.selectors.nodes.alerts import open_alert_count
from portal.selectors.nodes.gpu_states import COUNTED_GPU, with_state
from portal.selectors.scheduling.cycles import scheduler_alert

if TYPE_CHECKING:
    from django.utils.functional import _StrOrPromise as StrOrPromise


@dataclass(frozen=True)
class NavItem:
    """An entry of the sidebar. ``key`` is pressed after ``g``; ``counter`` names the number beside it."""

    name: StrOrPromise
    view: str
    icon: str
    key: str
    counter: str = ""
    help: str = ""
    active_views: tuple[str, ...] = ()
    admin_only: bool = False
    in_tab_bar: bool = False

    @property
    def url(self) -> str:
        return reverse(self.view)


NAVIGATION: dict[str, tuple[NavItem, ...]] = {
    gettext_noop("Work"): (
        NavItem(gettext_lazy("Home"), "home", "home", "h", help="jobs", in_tab_bar=True),
        NavItem(gettext_lazy("Launch"), "launch", "launch", "l", help="jobs", in_tab_bar=True),
        NavItem(
            gettext_lazy("Jobs"),
            "jobs",
            "jobs",
            "j",
            help="scheduling#verdicts",
            counter="jobs",
            active_views=(
                "job",
                "job-logs",
                "job-metrics",
                "job-checkpoints",
                "job-ranks",
                "job-run",
                "job-files",
                "job-scheduling",
                "job-audit",
                "job-help",
                "job-rerun",
                "job-notebooks",
                "job-save-environment",
                "job-shares",
                "job-switch",
                "job-change",
                "jobs-bulk",
                "bulk-operation",
            ),
            in_tab_bar=True,
        ),
        NavItem(
            gettext_lazy("Templates"),
            "templates",
            "copy",
            "n",
            help="templates",
            active_views=("new-template", "edit-template"),
        ),
        NavItem(
            gettext_lazy("Schedules"), "schedules", "again", "b", help="schedules", active_views=("schedule",)
        ),
    ),
    gettext_noop("Training"): (
        NavItem(
            gettext_lazy("Experiments"),
            "experiments",
            "flask",
            "m",
            help="experiments",
            active_views=("run",),
        ),
        NavItem(
            gettext_lazy("Sweeps"),
            "sweeps",
            "sweep",
            "y",
            help="sweeps",
            active_views=("sweep", "import-sweep"),
        ),
        NavItem(
            gettext_lazy("Pipeline plans"),
            "plans",
            "tool",
            "t",
            help="pipeline-plans",
            active_views=("plan", "create-plan", "create-profile"),
        ),
    ),
    gettext_noop("Models and data"): (
        NavItem(gettext_lazy("Models"), "models", "model", "o", help="experiments#pages"),
        NavItem(
            gettext_lazy("Services"), "services", "open", "i", help="services", active_views=("service",)
        ),
        NavItem(
            gettext_lazy("Data sets"),
            "data-sets",
            "data",
            "3",
            help="jobs#data-sets",
            active_views=("data-set", "new-data-set", "delete-data-set", "delete-data-set-version"),
        ),
    ),
    gettext_noop("Cluster"): (
        NavItem(
            gettext_lazy("Cluster"),
            "cluster",
            "cluster",
            "c",
            help="nodes",
            counter="free",
            active_views=(
                "node",
                "add-node",
                "enrol-node",
                "node-host-key",
                "drain-node",
                "node-operation",
                "test-node",
                "set-labels",
                "topologies",
                "save-topology",
                "recovery",
                "recovery-fence",
                "recovery-adopt",
                "recovery-stop",
            ),
            in_tab_bar=True,
        ),
        NavItem(gettext_lazy("Queue"), "queue", "queue", "q", help="scheduling#order", counter="waiting"),
        NavItem(
            gettext_lazy("Calendar"),
            "calendar",
            "calendar",
            "r",
            help="scheduling#reserved-nodes",
            active_views=("save-reservation",),
        ),
        NavItem(
            gettext_lazy("Scheduler"),
            "scheduler",
            "flask",
            "d",
            help="scheduling#when-a-cycle-runs",
            admin_only=True,
        ),
        NavItem(
            gettext_lazy("Alerts"),
            "alerts",
            "s-warning",
            "w",
            help="nodes#when-a-node-is-quarantined",
            counter="alerts",
            admin_only=True,
        ),
        NavItem(
            gettext_lazy("Environments"),
            "environments",
            "model",
            "e",
            help="jobs#code-and-packages",
            active_views=("environment", "registries", "save-registry"),
        ),
        NavItem(
            gettext_lazy("Failure rules"),
            "failure-rules",
            "s-failed",
            "f",
            help="jobs#failures",
            active_views=("save-failure-rule",),
            admin_only=True,
        ),
        NavItem(
            gettext_lazy("Announcements"),
            "announcements",
            "inbox",
            "1",
            help="operations#announcements",
            active_views=("announce",),
            admin_only=True,
        ),
        NavItem(
            gettext_lazy("Volumes"),
            "volumes",
            "data",
            "v",
            help="nodes#volumes",
            active_views=("save-volume",),
        ),
    ),
    gettext_noop("Sharing"): (
        NavItem(
            gettext_lazy("Quotas"),
            "quotas",
            "quota",
            "s",
            help="scheduling#quota-of-a-project-in-a-pool",
            active_views=("save-quotas", "add-quota"),
        ),
        NavItem(gettext_lazy("Reports"), "usage", "report", "z", help="checkpoints#lost-work"),
        NavItem(
            gettext_lazy("Projects"),
            "projects",
            "project",
            "p",
            help="jobs#rights-of-the-owner",
            active_views=("project", "add-project", "set-member", "invite-into", "project-webhooks"),
        ),
        NavItem(
            gettext_lazy("Requests"),
            "approvals",
            "inbox",
            "x",
            help="requests",
            active_views=("make-request", "revoke-exemption"),
        ),
        NavItem(
            gettext_lazy("Scheduling policy"),
            "policy",
            "gear",
            "k",
            help="policy",
            active_views=("save-policy", "cluster-webhooks"),
        ),
        NavItem(
            gettext_lazy("Users"),
            "users",
            "users",
            "u",
            help="operations#users",
            active_views=("invite", "change-user", "confirm-user-change"),
            admin_only=True,
        ),
        NavItem(
            gettext_lazy("Audit"), "audit", "report", "a", help="operations#the-audit-trail", admin_only=True
        ),
    ),
}
"""The sidebar by group. New pages are added here (docs/recipes.md, "Add a page")."""


def navigation_context(request: HttpRequest) -> dict[str, Any]:
    """Return the context of every template; the queries run only where the frame is rendered."""
    account = getattr(request, "user", None)
    user = account if isinstance(account, User) else None
    return {"navigation": SimpleLazyObject(lambda: _build_navigation(request, user))}


def _build_navigation(request: HttpRequest, user: User | None) -> dict[str, Any]:
    if user is None:
        return {"groups": [], "tabs": [], "more": [], "simulated": 0}
    gpus = with_state(Gpu.objects.filter(COUNTED_GPU)).aggregate(
        all=Count("pk"),
        free=Count("pk", filter=Q(state=GpuState.FREE.value)),
        simulated=Count("pk", filter=Q(simulated=True)),
    )
    counters = _counters(user)
    unread = counters.pop("unread")
    counters |= {"free": _("{free} free").format(free=gpus["free"]) if gpus["all"] else ""}
    match = request.resolver_match
    here = (match.view_name if match else "") or ""
    groups: list[tuple[str, list[dict[str, Any]]]] = [
        (
            _(title),
            [
                {
                    "item": item,
                    "current": here == item.view or here in item.active_views,
                    "counter": counters.get(item.counter) or "",
                }
                for item in items
                if user.is_admin or not item.admin_only
            ],
        )
        for title, items in NAVIGATION.items()
    ]
    rows = [row for group in groups for row in group[1]]
    return {
        "groups": groups,
        "help": next((row["item"].help for row in rows if row["current"]), ""),
        "tabs": [row for row in rows if row["item"].in_tab_bar],
        "more": [
            (title, shown)
            for title, entries in groups
            if (shown := [row for row in entries if not row["item"].in_tab_bar])
        ],
        "in_more": any(row["current"] and not row["item"].in_tab_bar for row in rows),
        "simulated": gpus["simulated"],
        "gpus": gpus["all"],
        "unread": unread,
        "recovery": recovery_status() if user.is_admin else None,
        "scheduler_alert": scheduler_alert() if user.is_admin else None,
    }


def _counters(user: User) -> dict[str, int | str]:
    """Return the user's live jobs and unread notices, pending jobs of all, and for administrators open alerts."""
    live = visible_jobs(user).filter(owner=user, state__in=[state.value for state in LIVE_JOB_STATES])
    waiting = Job.objects.filter(state=JobState.PENDING.value, desired_state=DesiredState.RUN.value)
    unread = own_notices(user).filter(in_inbox=True, read_at__isnull=True)
    both = User.objects.filter(pk=user.pk).values_list(_count(live, "owner"), _count(unread, "recipient"))
    live_count, unread_count = both.get()
    return {
        "jobs": live_count or 0,
        "unread": unread_count or 0,
        "waiting": waiting.count(),
        "alerts": open_alert_count() if user.is_admin else 0,
    }


def _count(rows: QuerySet[Any], user_column: str) -> Subquery:
    """Return the number of rows, all of one user, as a part of another query; null for none."""
    return Subquery(rows.order_by().values(user_column).annotate(count=Count("pk")).values("count"))
