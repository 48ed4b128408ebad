"""Requests for quota, time and access with their answers, and exemptions of idle workspaces."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from django.contrib import messages
from django.core.paginator import Paginator
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from portal.access import (
    AccessPolicy,
    Permission,
    answerable_requests,
    project_ids,
    require_permission,
    visible_projects,
)
from portal.domain.requests.user_requests import REQUESTABLE_ROLES, RequestKind
from portal.domain.states import Role
from portal.errors import Conflict, FairwayError, InvalidRequest
from portal.models import NodePool, Project, User, UserRequest
from portal.selectors.jobs.idle import active_exemptions
from portal.selectors.jobs.jobs import visible_job_ids
from portal.selectors.projects.quota_effect import read_quota_effect
from portal.selectors.requests.user_requests import (
    RequestEfficiency,
    get_request,
    list_requests,
    request_efficiencies,
)
from portal.services.requests.user_requests import (
    do_answer_request,
    do_replay_request,
    do_request_environment,
    do_request_project_role,
    do_request_quota,
    do_withdraw_request,
    prepare_quota_request,
    simulate_requested_quota,
    who_answers,
)
from portal.web.display.formatting import time_zone
from portal.web.parsing import parse_gpu_milli, parse_local_time
from portal.web.projects.quotas import render_replay
from portal.web.views import action, page, posted_values, refusals_as_messages, render_form

OPEN_PER_PAGE, CLOSED_PER_PAGE = 50, 20
MAX_EXEMPTIONS = 200
FORM_FIELDS = ("project", "pool", "gpus", "starts_at", "ends_at", "role", "environment", "reason")
FORM_KINDS = {
    RequestKind.QUOTA: gettext_lazy("Quota"),
    RequestKind.PROJECT: gettext_lazy("Project"),
    RequestKind.ENVIRONMENT: gettext_lazy("Environment"),
}


@dataclass(frozen=True)
class RequestRow:
    """An open request as its reader may see it."""

    row: UserRequest
    may_answer: bool
    is_own: bool
    delays: list[tuple[str, float | None]]
    """Delayed jobs visible to the reader, with seconds; None if unknown."""
    efficiency: RequestEfficiency | None
    """Of a request of quota that the reader may answer."""

    @property
    def hidden_delay_count(self) -> int:
        """Number of delayed jobs invisible to the reader."""
        return self.row.delayed_count - len(self.delays)

    @property
    def who_answers(self) -> str:
        return who_answers(self.row)


@page(AccessPolicy.SIGNED_IN)
def approvals(request: HttpRequest, user: User) -> HttpResponse:
    """List open requests, answered ones and current exemptions, with a form for a new request."""
    values = {name: request.GET.get(name, "") for name in ("project", "pool")}
    return _page(request, user, request.GET.get("new", ""), values)


@action(AccessPolicy.SIGNED_IN)
def make_request(request: HttpRequest, user: User) -> HttpResponse:
    values = posted_values(request, "kind", *FORM_FIELDS)
    try:
        asked = _make_request(user, values)
    except (InvalidRequest, Conflict) as error:
        return _page(request, user, values["kind"], values, error)
    messages.success(request, _("Requested from the {who_answers}.").format(who_answers=who_answers(asked)))
    return redirect("approvals")


@action(AccessPolicy.SIGNED_IN)
def answer_request(request: HttpRequest, user: User, public_id: str) -> HttpResponse:
    asked = get_request(user, public_id)
    approve = request.POST.get("approve") == "1"
    with refusals_as_messages(request):
        done = do_answer_request(user, asked, approve=approve, answer=request.POST.get("answer", ""))
        messages.success(
            request,
            _("The request of {username} is {state}.").format(
                username=done.requested_by.username, state=_(done.state)
            ),
        )
    return redirect("approvals")


@action(AccessPolicy.SIGNED_IN)
def withdraw_request(request: HttpRequest, user: User, public_id: str) -> HttpResponse:
    asked = get_request(user, public_id)
    with refusals_as_messages(request):
        do_withdraw_request(user, asked)
        messages.success(request, _("The request is withdrawn."))
    return redirect("approvals")


@action(AccessPolicy.SIGNED_IN)
def request_effect(request: HttpRequest, user: User, public_id: str) -> HttpResponse:
    """Simulate the effect of requested quota on the present queue, for those who answer."""
    asked = get_request(user, public_id)
    require_permission(user, Permission.CHANGE, asked)
    answer = simulate_requested_quota(asked) if asked.kind == RequestKind.QUOTA else None
    return render(request, "projects/quota_effect.html", {"effect": read_quota_effect(user, answer)})


@action(AccessPolicy.SIGNED_IN)
def replay_request(request: HttpRequest, user: User, public_id: str) -> HttpResponse:
    """Replay the jobs of the last 30 days with the requested quota, for those who answer."""
    asked = get_request(user, public_id)
    return render_replay(request, user, lambda: do_replay_request(user, asked))


def managed_projects(user: User) -> set[int] | None:
    """Return primary keys of the projects that the user manages; None: all, for administrators."""
    return None if user.is_admin else project_ids(user, Role.MANAGER)


# -- internal --------------------------------------------------------------------------------------


def _make_request(user: User, values: dict[str, str]) -> UserRequest:
    """Make the request of the posted form. Raise InvalidRequest by field."""
    reason = values["reason"]
    if values["kind"] == RequestKind.PROJECT:
        role = values["role"]
        if role not in set(REQUESTABLE_ROLES):
            raise InvalidRequest(fields={"role": _("Choose a role.")})
        return do_request_project_role(user, values["project"], Role(role), reason=reason)
    project = _requestable_projects(user).filter(public_id=values["project"]).first()
    if project is None:
        raise InvalidRequest(fields={"project": _("Choose a project.")})
    if values["kind"] == RequestKind.ENVIRONMENT:
        return do_request_environment(user, project, values["environment"], reason=reason)
    pool = NodePool.objects.filter(public_id=values["pool"]).first()
    if pool is None:
        raise InvalidRequest(fields={"pool": _("Choose a pool.")})
    zone = time_zone(user.timezone)
    starts_at, ends_at = (
        parse_local_time(values[name], name, zone) if values[name] else None
        for name in ("starts_at", "ends_at")
    )
    try:
        return do_request_quota(
            prepare_quota_request(
                user,
                project,
                pool,
                parse_gpu_milli(values["gpus"], "gpus"),
                starts_at=starts_at,
                ends_at=ends_at,
                reason=reason,
            )
        )
    except InvalidRequest as error:
        fields = {"gpus" if name == "extra_milli" else name: text for name, text in error.fields.items()}
        raise InvalidRequest(fields=fields) from error


def _requestable_projects(user: User) -> Any:
    """Return the projects for which the user may request quota and environments."""
    rows = visible_projects(user).filter(archived_at__isnull=True)
    return rows if user.is_admin else rows.filter(pk__in=project_ids(user, Role.MEMBER))


def _page(
    request: HttpRequest,
    user: User,
    form: str,
    values: dict[str, str],
    refusal: FairwayError | None = None,
) -> HttpResponse:
    open_page = Paginator(list_requests(user, is_open=True), OPEN_PER_PAGE).get_page(request.GET.get("open"))
    open_rows = list(open_page)
    answerable = answerable_requests(user, open_rows)
    visible = visible_job_ids(user, {one["job"] for row in open_rows for one in row.delays})
    efficiencies = request_efficiencies(user, [row for row in open_rows if row.pk in answerable])
    requests = [
        RequestRow(
            row,
            row.pk in answerable,
            row.requested_by_id == user.pk,
            [(one["job"], one["by_s"]) for one in row.delays if one["job"] in visible],
            efficiencies.get(row.pk),
        )
        for row in open_rows
    ]
    managed = managed_projects(user)
    form = form if form in set(FORM_KINDS) else RequestKind.QUOTA.value
    projects: list[Project] = []
    if form != RequestKind.PROJECT:
        projects = list(_requestable_projects(user).order_by("name"))
    context = {
        "requests": requests,
        "open_page": open_page,
        "page": Paginator(list_requests(user, is_open=False), CLOSED_PER_PAGE).get_page(
            request.GET.get("page")
        ),
        "exemptions": [
            (row, managed is None or row.job.project_id in managed)
            for row in active_exemptions(user)[:MAX_EXEMPTIONS]
        ],
        "form": form,
        "forms": FORM_KINDS.items(),
        "projects": projects,
        "pools": NodePool.objects.order_by("name") if form == RequestKind.QUOTA else (),
        "roles": REQUESTABLE_ROLES,
    }
    return render_form(request, "requests/page.html", context, values, refusal)
