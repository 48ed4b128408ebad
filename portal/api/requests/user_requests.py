"""REST: requests of users for quota, time or access, and their answers."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

from django.http import HttpResponse
from django.urls import path
from rest_framework import serializers
from rest_framework.request import Request

from portal.access import visible_projects
from portal.api.framework.request_parsing import (
    NonBlankCharField,
    QueryBooleanField,
    StrictCharField,
    StrictIntegerField,
    StrictSerializer,
)
from portal.api.framework.row_actions import action_route
from portal.api.framework.views import ListQuery, SignedInView, operation
from portal.api.jobs.job_requests import get_referenced_row
from portal.api.serializers.user_requests import RequestContext, RequestDetail, RequestSummary
from portal.domain.jobs.job_spec import MAX_TIME_LIMIT_S
from portal.domain.requests.user_requests import REQUESTABLE_ROLES, RequestKind
from portal.domain.states import Role
from portal.errors import InvalidRequest
from portal.models import NodePool, User, UserRequest
from portal.selectors.jobs.jobs import get_job, visible_job_ids
from portal.selectors.projects.quota_effect import read_quota_effect
from portal.selectors.requests.user_requests import get_request, list_requests, request_efficiencies
from portal.services.accounts.tokens import Scope
from portal.services.jobs.time_limits import MIN_EXTENSION_S, do_request_extension, prepare_extension
from portal.services.projects.projects import MAX_MILLI
from portal.services.requests.user_requests import (
    do_answer_request,
    do_request_environment,
    do_request_project_role,
    do_request_quota,
    do_withdraw_request,
    prepare_quota_request,
)
from portal.valkey import rate_limits

_operation = partial(operation, tag="requests")


class RequestsQuery(ListQuery):
    """Filters of the list of requests."""

    open = QueryBooleanField(
        required=False,
        allow_null=True,
        default=None,
        help_text="true: only open requests; false: only others.",
    )
    kind = serializers.ChoiceField(
        [kind.value for kind in RequestKind],
        required=False,
        allow_blank=True,
        default="",
        help_text="Blank: all.",
    )
    mine = QueryBooleanField(
        required=False, allow_null=True, default=None, help_text="true: only your own; false: only others'."
    )


class RequestBody(StrictSerializer):
    """A request. More time is requested with `jobs/{job}/extend/`."""

    kind = serializers.ChoiceField(
        [kind.value for kind in (RequestKind.QUOTA, RequestKind.PROJECT, RequestKind.ENVIRONMENT)]
    )
    project = StrictCharField(
        max_length=63, help_text="Id or name. To join a project, its name: it need not be visible to you."
    )
    reason = NonBlankCharField(max_length=500)
    pool = StrictCharField(required=False, max_length=63, help_text="Id or name; for more quota.")
    extra_milli = StrictIntegerField(
        required=False,
        min_value=1,
        max_value=MAX_MILLI,
        help_text="GPU milli to add to the guarantee, and to the limit if there is one; for more quota.",
    )
    starts_at = serializers.DateTimeField(required=False, allow_null=True, help_text="null: from now on.")
    ends_at = serializers.DateTimeField(required=False, allow_null=True, help_text="null: permanent.")
    role = serializers.ChoiceField(
        [role.value for role in REQUESTABLE_ROLES], required=False, help_text="To join a project."
    )
    environment = StrictCharField(required=False, max_length=63, help_text="Name; to use an environment.")


_FIELDS = {
    RequestKind.QUOTA: {"pool", "extra_milli", "starts_at", "ends_at"},
    RequestKind.PROJECT: {"role"},
    RequestKind.ENVIRONMENT: {"environment"},
}
"""The fields of each kind; times are optional."""


class ExtensionRequestBody(StrictSerializer):
    """A request to extend the time limit."""

    extra_s = StrictIntegerField(min_value=MIN_EXTENSION_S, max_value=MAX_TIME_LIMIT_S)
    reason = StrictCharField(required=False, allow_blank=True, default="", max_length=500)


class AnswerBody(StrictSerializer):
    """The answer to a request."""

    answer = StrictCharField(required=False, allow_blank=True, default="", max_length=500)


def represent_request(user: User, row: UserRequest) -> dict[str, Any]:
    """Return the request; jobs and projects that the user may not see are not named."""
    seen = visible_job_ids(user, [each["job"] for each in row.delays])
    efficiency = request_efficiencies(user, [row]).get(row.pk)
    return RequestDetail.represent(row, RequestContext(seen, read_quota_effect(user, row.effect), efficiency))


def _represent_result(user: User, _row: object, asked: UserRequest) -> dict[str, Any]:
    return represent_request(user, get_request(user, asked.public_id))


class RequestsView(SignedInView):
    @_operation(
        "requests_list",
        "List requests",
        scope=Scope.READ,
        query=RequestsQuery,
        response=[RequestSummary],
        detail="Your own requests, those about projects that you manage, and requests for more time of jobs that "
        "you may see. Administrators see all.",
    )
    def get(self, request: Request) -> HttpResponse:
        rows = list_requests(
            self.user, is_open=self.query["open"], kind=self.query["kind"], mine=self.query["mine"]
        )
        return self.paginated_response(rows, RequestSummary.represent)

    @_operation(
        "requests_create",
        "Make a request",
        scope=Scope.REQUESTS,
        body=RequestBody,
        response=RequestDetail,
        status=201,
        rate=rate_limits.JOB_SUBMITS,
        idempotent=True,
        error_statuses=[409],
        detail="Members of a project request more quota, for a time or permanently, and the use of a restricted "
        "environment; administrators answer. Everybody requests a role in a project; its managers answer.",
    )
    def post(self, request: Request) -> HttpResponse:

        @cache
        def make() -> Callable[[], UserRequest]:
            return _prepare_request(self.user, self.body)

        return self.idempotent_response(lambda: _represent_result(self.user, None, make()()), precheck=make)


def _prepare_request(user: User, body: dict[str, Any]) -> Callable[[], UserRequest]:
    """Return what makes the request. Must not run in a transaction, because the scheduler simulates a quota."""
    kind, reason = RequestKind(body["kind"]), body["reason"]
    given = {name: body[name] for name in body if name not in ("kind", "project", "reason")}
    required = _FIELDS[kind] - {"starts_at", "ends_at"}
    wrong = dict.fromkeys(given.keys() - _FIELDS[kind], f"Not for requests of the kind {kind}.")
    wrong |= dict.fromkeys(required - given.keys(), f"Required for the kind {kind}.")
    if wrong:
        raise InvalidRequest(fields=wrong)
    if kind is RequestKind.PROJECT:
        return partial(do_request_project_role, user, body["project"], Role(given["role"]), reason=reason)
    project = get_referenced_row(visible_projects(user), body["project"], "project")
    if kind is RequestKind.ENVIRONMENT:
        return partial(do_request_environment, user, project, given["environment"], reason=reason)
    pool = get_referenced_row(NodePool.objects.all(), given.pop("pool"), "pool")
    return partial(do_request_quota, prepare_quota_request(user, project, pool, reason=reason, **given))


class RequestView(SignedInView):
    @_operation("requests_get", "Get a request", scope=Scope.READ, response=RequestDetail)
    def get(self, request: Request, request_id: str) -> HttpResponse:
        return self.json_response(represent_request(self.user, get_request(self.user, request_id)))


_action = partial(
    action_route,
    base=SignedInView,
    represent=_represent_result,
    response=RequestDetail,
    idempotent=False,
    error_statuses=[409],
)
_answer = partial(
    _action, "requests/<slug:request_id>/", get_request, tag="requests", scope=Scope.REQUESTS, body=AnswerBody
)
ROUTES = [
    path("requests/", RequestsView.as_view()),
    path("requests/<slug:request_id>/", RequestView.as_view()),
    _action(
        "jobs/<slug:job>/",
        get_job,
        "extend",
        "jobs_extend",
        "Request an extension of the time limit",
        "Approved at once if the scheduler confirms that no job is delayed even if the job uses all of the added "
        "time. Otherwise the request is open: managers of the project answer it if it delays only jobs of the "
        "project; administrators answer all others.",
        do_request_extension,
        prepare=prepare_extension,
        idempotent=True,
        tag="jobs",
        scope=Scope.JOBS,
        scope_by_job_kind=True,
        body=ExtensionRequestBody,
        rate=rate_limits.JOB_SUBMITS,
    ),
    _answer(
        "approve",
        "requests_approve",
        "Approve a request",
        "What is requested is done at once. 409 if the request is answered already.",
        partial(do_answer_request, approve=True),
    ),
    _answer("deny", "requests_deny", "Deny a request", "", partial(do_answer_request, approve=False)),
    _action(
        "requests/<slug:request_id>/",
        get_request,
        "withdraw",
        "requests_withdraw",
        "Withdraw an own request",
        "",
        do_withdraw_request,
        tag="requests",
        scope=Scope.REQUESTS,
    ),
]
