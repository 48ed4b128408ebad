"""What stands around every page: the places to go, how much is free, and whether any GPU is only pretended."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from django.db.models import Count, Q
from django.http import HttpRequest
from django.urls import reverse
from django.utils.functional import SimpleLazyObject

from portal.access import visible_jobs
from portal.models import Gpu, Job, User
from portal.selectors.alarms import open_alarms
from portal.selectors.cluster import TAKES_WORK
from portal.selectors.restored import restored
from portal.selectors.scheduler import alarm
from portal.words.states import JOB_LIVE, Desired, JobState, NodeState


@dataclass(frozen=True)
class Place:
    """One entry of the side bar. ``key`` follows ``g``; ``count`` names a figure of ``Figures``."""

    name: str
    view: str
    icon: str
    key: str
    count: str = ""
    here: tuple[str, ...] = ()
    admin: bool = False
    tab: bool = False

    @property
    def url(self) -> str:
        """Where it leads."""
        return reverse(self.view)


PLACES: dict[str, tuple[Place, ...]] = {
    "Work": (
        Place("Home", "home", "home", "h", tab=True),
        Place("Launch", "launch", "launch", "l", tab=True),
        Place(
            "Jobs",
            "jobs",
            "jobs",
            "j",
            count="jobs",
            here=("job", "job-logs", "job-metrics", "job-run"),
            tab=True,
        ),
    ),
    "Cluster": (
        Place(
            "Cluster",
            "cluster",
            "cluster",
            "c",
            count="free",
            here=(
                "node",
                "add-node",
                "node-check",
                "test-node",
                "set-labels",
                "topologies",
                "save-topology",
                "restored",
                "restored-fence",
                "restored-keep",
                "restored-stop",
            ),
            tab=True,
        ),
        Place("Queue", "queue", "queue", "q", count="waiting"),
        Place("Calendar", "calendar", "calendar", "r", here=("save-reservation",)),
        Place("Scheduler", "scheduler", "flask", "d", admin=True),
        Place("Alarms", "alarms", "s-warning", "w", count="alarms", admin=True),
        Place(
            "Environments", "environments", "model", "e", here=("environment", "registries", "save-registry")
        ),
        Place("Volumes", "volumes", "data", "v", here=("save-volume",)),
    ),
    "Sharing": (
        Place("Quotas", "quotas", "quota", "s", here=("save-quotas",), tab=True),
        Place(
            "Projects",
            "projects",
            "project",
            "p",
            here=("project", "add-project", "set-member", "invite-into"),
        ),
        Place("Requests", "requests", "inbox", "x", here=("decide-extension", "cut-excuse")),
        Place("Policy", "policy", "gear", "k", here=("save-policy",)),
        Place("People", "people", "people", "u", here=("invite", "change-person"), admin=True),
        Place("Audit", "audit", "report", "a", admin=True),
    ),
}
"""The side bar, group by group. A page adds itself here (docs/recipes.md, "Add a page")."""


@dataclass(frozen=True)
class Figures:
    """Figures beside the entries, read only when a whole page is drawn."""

    gpus: int
    free: int
    simulated: int
    my_live_jobs: int
    waiting: int
    alarms: int = 0
    """About GPUs, that nobody has acknowledged; administrators alone are told."""

    def beside(self, name: str) -> str:
        """The figure under this name as text, empty when it says nothing."""
        if name == "jobs":
            return str(self.my_live_jobs) if self.my_live_jobs else ""
        if name == "waiting":
            return str(self.waiting) if self.waiting else ""
        if name == "alarms":
            return str(self.alarms) if self.alarms else ""
        if name == "free":
            return f"{self.free} free" if self.gpus else ""
        return ""


def frame(request: HttpRequest) -> dict[str, Any]:
    """Context of every template; the queries run only where the frame is drawn."""
    person = getattr(request, "user", None)
    user = person if isinstance(person, User) else None
    return {"frame": SimpleLazyObject(lambda: _frame(request, user))}


def _frame(request: HttpRequest, user: User | None) -> dict[str, Any]:
    if user is None:
        return {"groups": [], "tabs": [], "simulated": 0}
    figures = get_figures(user)
    match = request.resolver_match
    here = (match.view_name if match else "") or ""
    groups = [
        (title, [_shown(place, here, figures) for place in places if user.is_admin or not place.admin])
        for title, places in PLACES.items()
    ]
    groups = [(title, rows) for title, rows in groups if rows]
    tabs = [row for _, rows in groups for row in rows if row["place"].tab]
    return {
        "groups": groups,
        "tabs": tabs[:5],
        "simulated": figures.simulated,
        "gpus": figures.gpus,
        "restored": restored() if user.is_admin else None,
        "alarm": alarm() if user.is_admin else None,
    }


def _shown(place: Place, here: str, figures: Figures) -> dict[str, Any]:
    return {
        "place": place,
        "current": here == place.view or here in place.here,
        "figure": figures.beside(place.count),
    }


def get_figures(user: User) -> Figures:
    """Three queries: the GPUs of the cluster, the person's own live jobs, all that wait; for admins alarms, too."""
    gpus = (
        Gpu.objects.filter(present=True)
        .exclude(node__state=NodeState.RETIRED.value)
        .aggregate(
            all=Count("pk"),
            free=Count("pk", filter=TAKES_WORK & Q(used_milli=0)),
            simulated=Count("pk", filter=Q(simulated=True)),
        )
    )
    live = visible_jobs(user).filter(owner=user, state__in=[state.value for state in JOB_LIVE]).count()
    waiting = Job.objects.filter(state=JobState.PENDING.value, desired=Desired.RUN.value).count()
    alarms = open_alarms() if user.is_admin else 0
    return Figures(gpus["all"], gpus["free"], gpus["simulated"], live, waiting, alarms)
