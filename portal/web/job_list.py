"""The job list: filters in the URL, search, cursor pagination, and cancelling several jobs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from django.contrib import messages
from django.http import HttpRequest, HttpResponse, QueryDict
from django.shortcuts import redirect

from portal.access import AccessPolicy, visible_jobs, visible_projects
from portal.domain.states import TERMINAL_JOB_STATES, JobKind, JobState
from portal.domain.tensorboard import MAX_JOBS
from portal.errors import Conflict, FairwayError
from portal.models import Job, User
from portal.selectors.jobs.jobs import JobFilter, get_job, list_jobs
from portal.services.jobs.submission import do_cancel_job
from portal.services.jobs.tensorboard import do_open_tensorboard
from portal.web.display.formatting import plural
from portal.web.display.job_rows import job_rows
from portal.web.views import action, page, refusals_as_messages, render_live

PAGE_SIZE = 50
MAX_BULK_CANCEL = 200

VIEWS: dict[str, tuple[str, tuple[JobState, ...], bool | None]] = {
    "": ("All", (), None),
    "live": ("Active", (), True),
    "running": ("Running", (JobState.RUNNING,), None),
    "waiting": ("Waiting", (JobState.PENDING,), None),
    "failed": ("Failed", (JobState.FAILED, JobState.TIMEOUT), None),
    "ended": ("Ended", (), False),
}
KINDS = {"workspace": "Workspaces", "training": "Training"}


@dataclass(frozen=True)
class JobListFilters:
    """Filters in the URL; unknown values are ignored."""

    state: str = ""
    kind: str = ""
    project: str = ""
    owner: str = ""
    search: str = ""
    tag: str = ""

    @classmethod
    def read(cls, query: QueryDict) -> JobListFilters:
        state, kind = query.get("state", ""), query.get("kind", "")
        return cls(
            state=state if state in VIEWS else "",
            kind=kind if kind in KINDS else "",
            project=query.get("project", "")[:63],
            owner=query.get("owner", "")[:63],
            search=query.get("q", "").strip()[:100],
            tag=query.get("tag", "").strip()[:50],
        )

    def to_selector(self) -> JobFilter:
        _, states, live = VIEWS[self.state]
        return JobFilter(
            states=states,
            kinds=(JobKind(self.kind),) if self.kind else (),
            project=self.project,
            owner=self.owner,
            search=self.search,
            tag=self.tag,
            live=live,
        )

    def descriptions(self) -> list[str]:
        """Active filters as text for the empty state: state is failed, project is nlp."""
        pairs = [
            ("state", VIEWS[self.state][0].lower() if self.state else ""),
            ("kind", self.kind),
            ("project", self.project),
            ("person", self.owner),
            ("tag", self.tag),
        ]
        found = [f"{name} is {value}" for name, value in pairs if value]
        return found + ([f"name contains “{self.search}”"] if self.search else [])


@page(AccessPolicy.SIGNED_IN)
def jobs(request: HttpRequest, user: User) -> HttpResponse:
    filters = JobListFilters.read(request.GET)
    listed, older, newer = _page(list_jobs(user, filters.to_selector()), user, request.GET)
    context: dict[str, Any] = {
        "rows": job_rows(user, listed),
        "filters": filters,
        "views": [(key, name) for key, (name, _, _) in VIEWS.items()],
        "kinds": KINDS.items(),
        "projects": list(visible_projects(user).order_by("name").values_list("name", flat=True)[:200]),
        "older": older,
        "newer": newer,
    }
    return render_live(request, "jobs/page.html", "jobs/list.html", context)


def _page(rows: Any, user: User, query: QueryDict) -> tuple[list[Job], str, str]:
    """Return one page by cursor, newest first, and the queries of the older and the newer page.

    A cursor is the id of a visible job; any other value is ignored.
    """
    after, before = query.get("after", ""), query.get("before", "")
    edge = (
        visible_jobs(user).filter(public_id=after or before).values_list("pk", flat=True).first()
        if after or before
        else None
    )
    if edge is not None and before:
        found = list(rows.filter(pk__gt=edge).order_by("id")[: PAGE_SIZE + 1])
        more_newer, page = len(found) > PAGE_SIZE, found[:PAGE_SIZE][::-1]
        more_older = True
    else:
        rows = rows.filter(pk__lt=edge) if edge is not None else rows
        found = list(rows.order_by("-id")[: PAGE_SIZE + 1])
        more_older, page = len(found) > PAGE_SIZE, found[:PAGE_SIZE]
        more_newer = edge is not None
    if not page:
        return [], "", ""

    def to(key: str, job: Job) -> str:
        params = query.copy()
        for name in ("after", "before"):
            params.pop(name, None)
        params[key] = job.public_id
        return f"?{params.urlencode()}"

    return page, to("after", page[-1]) if more_older else "", to("before", page[0]) if more_newer else ""


@action(AccessPolicy.SIGNED_IN)
def bulk_cancel(request: HttpRequest, user: User) -> HttpResponse:
    """Cancel the chosen jobs that the user may cancel; report how many, and why not the others."""
    stopped, refused = 0, []
    for public_id in request.POST.getlist("job")[:MAX_BULK_CANCEL]:
        try:
            job = get_job(user, public_id)
            if job.state in TERMINAL_JOB_STATES:
                raise Conflict("It has ended.")
            do_cancel_job(user, job)
            stopped += 1
        except FairwayError as refusal:
            refused.append(f"{public_id}: {refusal.message}")
    if stopped:
        messages.success(request, f"Stopped {plural(stopped, 'job')}.")
    for message in refused[:5]:
        messages.error(request, message)
    back = request.POST.get("back", "")
    return redirect(back if back.startswith("/jobs/") and "//" not in back else "jobs")


@action(AccessPolicy.SIGNED_IN)
def open_tensorboard(request: HttpRequest, user: User) -> HttpResponse:
    """Open TensorBoard on the chosen jobs, and show its workspace."""
    chosen = [get_job(user, public_id) for public_id in request.POST.getlist("job")[: MAX_JOBS + 1]]
    shown = ("job", chosen[0].public_id) if len(chosen) == 1 else ("jobs",)
    with refusals_as_messages(request):
        shown = ("job", do_open_tensorboard(user, chosen).public_id)
    return redirect(*shown)
