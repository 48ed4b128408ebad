"""The job list: filters, order and columns in the URL, saved views, groups of sweeps, and actions on several jobs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from django.contrib import messages
from django.db.models import Q, QuerySet
from django.http import HttpRequest, HttpResponse, QueryDict
from django.http.response import HttpResponseBase
from django.shortcuts import redirect, render
from django.urls import reverse
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, gettext_noop

from portal.access import AccessPolicy, project_ids, visible_job_views, visible_jobs, visible_projects
from portal.domain.jobs.job_spec import job_fields
from portal.domain.jobs.tensorboard import MAX_JOBS
from portal.domain.states import JobKind, JobState, Role
from portal.errors import FairwayError, InvalidRequest
from portal.models import BulkOperation, Job, SavedJobView, User
from portal.models.jobs.jobs import total_gpus
from portal.selectors.jobs.jobs import (
    ROW_RELATIONS,
    JobFilter,
    count_by_state,
    get_job,
    list_jobs,
    one_row_per_sweep,
)
from portal.services.jobs.bulk import (
    BULK_ACTIONS,
    MAX_CHOSEN_JOBS,
    advance_in_request,
    bulk_results,
    check_bulk,
    start_bulk,
)
from portal.services.jobs.tensorboard import do_open_tensorboard
from portal.services.jobs.views import do_delete_view, do_save_view
from portal.web.display.csv_download import csv_response
from portal.web.display.job_rows import STATE_DISPLAY, JobRow, current_verdict, job_rows
from portal.web.parsing import parse_integer
from portal.web.views import action, find_row, page, posted_values, refusals_as_messages, render_live

PAGE_SIZE = 50
OPEN_SWEEP_SIZE = 50
"""Number of jobs shown below an open sweep; the list of its jobs has all."""
MAX_SHOWN_VIEWS = 100

VIEWS: dict[str, tuple[str, tuple[JobState, ...], bool | None]] = {
    "": (gettext_noop("All"), (), None),
    "live": (gettext_noop("Active"), (), True),
    "running": (gettext_noop("Running"), (JobState.RUNNING,), None),
    "waiting": (gettext_noop("Waiting"), (JobState.PENDING,), None),
    "failed": (gettext_noop("Failed"), (JobState.FAILED, JobState.TIMEOUT), None),
    "ended": (gettext_noop("Ended"), (), False),
}
KINDS = {"workspace": gettext_lazy("Workspaces"), "training": gettext_lazy("Training")}
ORDERS = {
    "": (gettext_lazy("Newest first"), "-pk"),
    "oldest": (gettext_lazy("Oldest first"), "pk"),
    "name": (gettext_lazy("By name"), "name"),
    "priority": (gettext_lazy("Highest priority"), "-priority"),
    "gpus": (gettext_lazy("Most GPUs"), "-gpus"),
}
"""Label and column; the row number decides between equal values."""
COLUMNS = {
    "project": gettext_lazy("Project"),
    "gpus": "GPUs",
    "time": gettext_lazy("Time"),
    "submitted": gettext_lazy("Submitted"),
    "priority": gettext_lazy("Priority"),
    "pool": gettext_lazy("Pool"),
    "environment": gettext_lazy("Environment"),
    "attempts": gettext_lazy("Attempts"),
    "exit": gettext_lazy("Exit code"),
}
DEFAULT_COLUMNS = ("project", "gpus", "time")
CSV_COLUMNS = (
    "id", "name", "kind", "state", "project", "owner", "pool", "environment", "gpus", "priority", "time_limit_s",
    "submitted_at", "started_at", "ended_at", "attempts", "exit_code", "message",
)  # fmt: skip


@dataclass(frozen=True)
class JobListFilters:
    """Filters in the URL; unknown values are ignored."""

    state: str = ""
    kind: str = ""
    project: str = ""
    owner: str = ""
    search: str = ""
    tag: str = ""
    sweep: str = ""
    sort: str = ""
    columns: tuple[str, ...] = DEFAULT_COLUMNS
    ungrouped: bool = False

    @classmethod
    def read(cls, query: QueryDict) -> JobListFilters:
        state, kind, sort = (query.get(name, "") for name in ("state", "kind", "sort"))
        chosen = tuple(name for name in COLUMNS if name in query.getlist("col"))
        return cls(
            state=state if state in VIEWS else "",
            kind=kind if kind in KINDS else "",
            project=query.get("project", "")[:63],
            owner=query.get("owner", "")[:63],
            search=query.get("q", "").strip()[:100],
            tag=query.get("tag", "").strip()[:50],
            sweep=query.get("sweep", "")[:16],
            sort=sort if sort in ORDERS else "",
            columns=chosen or DEFAULT_COLUMNS,
            ungrouped=query.get("group") == "0",
        )

    def to_selector(self) -> JobFilter:
        states, live = VIEWS[self.state][1:]
        return JobFilter(
            states=states,
            kinds=(JobKind(self.kind),) if self.kind else (),
            project=self.project,
            owner=self.owner,
            search=self.search,
            tag=self.tag,
            sweep=self.sweep,
            live=live,
        )

    def descriptions(self) -> list[str]:
        """Active filters as text for the empty state: state is failed, project is nlp."""
        pairs = [
            (_("state"), _(VIEWS[self.state][0]).lower() if self.state else ""),
            (_("kind"), _(self.kind)),
            (_("project"), self.project),
            (_("person"), self.owner),
            (_("tag"), self.tag),
            (_("sweep"), self.sweep),
        ]
        found = [_("{name} is {value}").format(name=name, value=value) for name, value in pairs if value]
        return found + ([_("name contains “{search}”").format(search=self.search)] if self.search else [])


@dataclass(frozen=True)
class SweepGroup:
    """The jobs of a sweep that match the filters: one row stands for all of them."""

    name: str
    public_id: str
    total: int
    states: list[tuple[str, str]]
    """Icon, and text such as 3 running."""
    toggle: str
    """Query that opens or closes it."""
    is_open: bool


@page(AccessPolicy.SIGNED_IN)
def jobs(request: HttpRequest, user: User) -> HttpResponse:
    filters = JobListFilters.read(request.GET)
    matching = list_jobs(user, filters.to_selector())
    single = filters.ungrouped or filters.sweep or filters.search
    grouped = not single and filters.sort in ("", "oldest")  # other orders are of single jobs
    rows = one_row_per_sweep(matching) if grouped else matching
    listed, older, newer = _page(rows, filters.sort, user, request.GET)
    found = job_rows(user, listed)
    context: dict[str, Any] = {
        "rows": _with_groups(user, found, matching, request.GET) if grouped else found,
        "filters": filters,
        "views": [(key, _(view[0])) for key, view in VIEWS.items()],
        "kinds": KINDS.items(),
        "orders": [(key, name) for key, (name, _) in ORDERS.items()],
        "columns": COLUMNS.items(),
        "saved": _saved_views(user),
        "query_string": request.GET.urlencode(),
        "projects": list(visible_projects(user).order_by("name").values_list("name", flat=True)[:200]),
        "bulk_operationions": [(name, _(name.capitalize())) for name in BULK_ACTIONS],
        "older": older,
        "newer": newer,
    }
    return render_live(request, "jobs/page.html", "jobs/list.html", context)


def _page(rows: QuerySet[Job], sort: str, user: User, query: QueryDict) -> tuple[list[Job], str, str]:
    """Return one page by cursor, and the queries of the next and the previous page.

    A cursor is the id of a visible job; any other value is ignored.
    """
    column = ORDERS[sort][1]
    descending, name = column.startswith("-"), column.lstrip("-")
    after, before = query.get("after", ""), query.get("before", "")
    edges = visible_jobs(user).filter(public_id=after or before).annotate(gpus=total_gpus())
    edge = edges.values_list(name, "pk").first() if after or before else None
    backwards = bool(edge and not after)
    rows = rows.annotate(gpus=total_gpus()) if name == "gpus" else rows
    if edge is not None:
        rows = rows.filter(_beyond(name, edge, below=descending != backwards))
    sign = "-" if descending != backwards else ""
    order = (f"{sign}{name}", f"{sign}pk")
    chosen = list(rows.order_by(*order).values_list("pk", flat=True)[: PAGE_SIZE + 1])
    found = list(Job.objects.select_related(*ROW_RELATIONS, "trial__sweep").filter(pk__in=chosen))
    found.sort(key=lambda job: chosen.index(job.pk))
    more, page = len(found) > PAGE_SIZE, found[:PAGE_SIZE]
    if backwards:
        page.reverse()
    if not page:
        return [], "", ""
    has_next, has_previous = (True, more) if backwards else (more, edge is not None)
    return (
        page,
        _query(query, after=page[-1].public_id) if has_next else "",
        _query(query, before=page[0].public_id) if has_previous else "",
    )


def _beyond(name: str, edge: tuple[Any, int], *, below: bool) -> Q:
    """Return the condition for rows beyond the edge, a value of the column and a row number."""
    than = "lt" if below else "gt"
    if name == "pk":
        return Q(**{f"pk__{than}": edge[1]})
    return Q(**{f"{name}__{than}": edge[0]}) | Q(**{name: edge[0], f"pk__{than}": edge[1]})


def _query(query: QueryDict, **changes: str) -> str:
    """Return the query with other values; at the first page, unless they name another."""
    params = query.copy()
    for name in ("after", "before", *changes):
        params.pop(name, None)
    params.update({name: value for name, value in changes.items() if value})
    return f"?{params.urlencode()}"


def _with_groups(user: User, rows: list[JobRow], matching: QuerySet[Job], query: QueryDict) -> list[JobRow]:
    """Give the rows that stand for a sweep their group, and insert the jobs of the open one."""
    sweeps = {row.job.pk: row.job.trial.sweep for row in rows if hasattr(row.job, "trial")}
    counts = count_by_state(matching, {sweep.pk for sweep in sweeps.values()})
    position = {name: query.get(name, "") for name in ("after", "before")}
    listed: list[JobRow] = []
    for row in rows:
        listed.append(row)
        sweep = sweeps.get(row.job.pk)
        states = counts.get(sweep.pk, {}) if sweep else {}
        if sweep is None or sum(states.values()) < 2:
            continue
        is_open = sweep.public_id == query.get("open")
        row.group = SweepGroup(
            sweep.name,
            sweep.public_id,
            sum(states.values()),
            [
                (icon, f"{states[state]} {_(label).lower()}")
                for state, (icon, label) in STATE_DISPLAY.items()
                if state in states
            ],
            _query(query, open="" if is_open else sweep.public_id, **position),
            is_open,
        )
        if is_open:
            members = matching.filter(trial__sweep=sweep).order_by("-pk")[:OPEN_SWEEP_SIZE]
            listed += [replace(each, is_member=True) for each in job_rows(user, members)]
    return listed


@page(AccessPolicy.SIGNED_IN)
def jobs_csv(request: HttpRequest, user: User) -> HttpResponseBase:
    """Download all jobs that match the filters, newest first."""
    rows = list_jobs(user, JobListFilters.read(request.GET).to_selector()).order_by("-pk")
    return csv_response("jobs.csv", CSV_COLUMNS, _csv_rows(rows))


def _csv_rows(rows: QuerySet[Job]) -> Iterator[tuple[object, ...]]:
    for job in rows.iterator(chunk_size=1000):
        verdict = current_verdict(job) if job.state == JobState.PENDING else None
        times = (at and at.isoformat() for at in (job.submitted_at, job.started_at, job.ended_at))
        yield (
            job.public_id, job.name, job.kind, job.state, job.project.name, job.owner.username,
            job.pool.name if job.pool else "", job.environment.name, job.total_milli / 1000, job.priority,
            job.time_limit_s, *times, job.attempt_count, job.exit_code, verdict.message if verdict else job.message,
        )  # fmt: skip


def _saved_views(user: User) -> list[tuple[SavedJobView, bool]]:
    """Return the user's views and those of their projects, each with whether they may delete it."""
    shown = Q(owner=user) | Q(project_id__in=project_ids(user))
    rows = visible_job_views(user).filter(shown).select_related("owner", "project")[:MAX_SHOWN_VIEWS]
    managed = project_ids(user, Role.MANAGER)
    return [(row, row.owner_id == user.pk or user.is_admin or row.project_id in managed) for row in rows]


@action(AccessPolicy.SIGNED_IN)
def save_view(request: HttpRequest, user: User) -> HttpResponse:
    values = posted_values(request, "name", "query", "project")
    query = _query(QueryDict(values["query"].lstrip("?")[:2000]), open="")
    rows = visible_projects(user)
    project = (
        find_row(rows, _("There is no such project."), name=values["project"]) if values["project"] else None
    )
    with refusals_as_messages(request):
        view = do_save_view(user, name=values["name"], query=query, project=project)
        messages.success(request, _("The view {name} is saved.").format(name=view.name))
    return redirect(f"{reverse('jobs')}{query}")


@action(AccessPolicy.SIGNED_IN)
def delete_view(request: HttpRequest, user: User, public_id: str) -> HttpResponse:
    view = find_row(visible_job_views(user), _("There is no such view."), public_id=public_id)
    with refusals_as_messages(request):
        do_delete_view(user, view)
        messages.success(request, _("The view {name} is deleted.").format(name=view.name))
    return redirect("jobs")


@action(AccessPolicy.SIGNED_IN)
def bulk(request: HttpRequest, user: User) -> HttpResponse:
    """Show which of the chosen jobs the action can change; once confirmed, change them and show the results."""
    name, back = request.POST.get("action", ""), request.POST.get("back", "")
    back = back if back.startswith("/jobs/") and "//" not in back else reverse("jobs")
    if name not in BULK_ACTIONS:
        raise InvalidRequest(_("There is no such action."))
    chosen = list(dict.fromkeys(request.POST.getlist("job")))
    if not chosen or len(chosen) > MAX_CHOSEN_JOBS:
        messages.error(request, _("Choose 1 to {max_bulk_jobs} jobs.").format(max_bulk_jobs=MAX_CHOSEN_JOBS))
        return redirect(back)
    found = {job.public_id: job for job in list_jobs(user).filter(public_id__in=chosen)}
    jobs, rule = [found[one] for one in chosen if one in found], BULK_ACTIONS[name]
    context: dict[str, Any] = {"action": name, "rule": rule, "back": back}
    status, is_confirmed = 200, request.POST.get("confirmed") == "1"
    results = check_bulk(user, jobs, name)
    if is_confirmed and any(each.changed for each in results):
        try:
            operation = advance_in_request(
                start_bulk(user, jobs, name, _bulk_value(request, user, rule.parameter))
            )
        except FairwayError as error:
            context["problem"], status = error.message, error.status
        else:
            if operation.finished_at is None:
                return redirect("bulk-operation", operation.public_id)
            results, context["is_done"] = bulk_results(operation), True
    elif is_confirmed:
        context["is_done"] = True
    if rule.parameter == "project":
        context["projects"] = visible_projects(user).filter(archived_at__isnull=True).order_by("name")
    context["selected"], context["missing"] = len(chosen), len(chosen) - len(jobs)
    context["changed"] = [each for each in results if each.changed]
    context["refused"] = [each for each in results if not each.changed]
    return render(request, "jobs/bulk.html", context, status=status)


@page(AccessPolicy.SIGNED_IN)
def bulk_operation(request: HttpRequest, user: User, public_id: str) -> HttpResponse:
    """Show the progress of a bulk operation that continues after its request, and which jobs were refused."""
    rows = BulkOperation.objects.select_related("user").filter(user=user)
    operation = find_row(rows, _("There is no such bulk operation."), public_id=public_id)
    context: dict[str, Any] = {
        "operation": operation,
        "rule": BULK_ACTIONS[operation.action],
        "total": len(operation.jobs),
        "done": len(operation.results),
        "changed": sum(not refusal for _, refusal in operation.results.values()),
        "refused": [each for each in bulk_results(operation) if not each.changed],
    }
    return render_live(request, "jobs/bulk_operation.html", "jobs/bulk_operation_live.html", context)


def _bulk_value(request: HttpRequest, user: User, parameter: str) -> Any:
    if parameter == "project":
        return find_row(
            visible_projects(user), _("Choose a project."), public_id=request.POST.get("project", "")
        )
    if parameter == "priority":
        value = parse_integer(request.POST.get("priority", ""), "priority")
        if fault := job_fields()["priority"].error_of(value):
            raise InvalidRequest(fields={"priority": fault})
        return value
    return None


@action(AccessPolicy.SIGNED_IN)
def open_tensorboard(request: HttpRequest, user: User) -> HttpResponse:
    """Open TensorBoard on the chosen jobs, and show its workspace."""
    chosen = [get_job(user, public_id) for public_id in request.POST.getlist("job")[: MAX_JOBS + 1]]
    shown = ("job", chosen[0].public_id) if len(chosen) == 1 else ("jobs",)
    with refusals_as_messages(request):
        shown = ("job", do_open_tensorboard(user, chosen).public_id)
    return redirect(*shown)
