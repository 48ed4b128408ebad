"""REST: requests to extend the time limit of running jobs, and decisions on them."""

from __future__ import annotations

from functools import partial
from typing import Any

from django.http import HttpResponse
from django.urls import path
from rest_framework.request import Request

from portal.api.framework.request_parsing import (
    QueryBooleanField,
    StrictCharField,
    StrictIntegerField,
    StrictSerializer,
)
from portal.api.framework.row_actions import action_route
from portal.api.framework.views import ListQuery, SignedInView, operation
from portal.api.serializers.time_limits import ExtensionDetail, ExtensionSummary
from portal.domain.job_spec import MAX_TIME_LIMIT_S
from portal.models import TimeLimitExtension, User
from portal.selectors.jobs.jobs import get_job, visible_job_ids
from portal.selectors.jobs.time_limits import get_extension, list_extensions
from portal.services.accounts.tokens import Scope
from portal.services.jobs.time_limits import MIN_EXTENSION_S, do_decide_extension, do_request_extension
from portal.valkey import rate_limits

_read = partial(operation, tag="jobs", scope=Scope.READ)


class ExtensionRequestBody(StrictSerializer):
    """A request to extend the time limit."""

    extra_s = StrictIntegerField(min_value=MIN_EXTENSION_S, max_value=MAX_TIME_LIMIT_S)
    reason = StrictCharField(required=False, allow_blank=True, default="", max_length=500)


class ExtensionDecisionBody(StrictSerializer):
    """A decision on an extension request."""

    answer = StrictCharField(required=False, allow_blank=True, default="", max_length=500)


class ExtensionsQuery(ListQuery):
    """Filters of the list of requests."""

    waiting = QueryBooleanField(
        required=False,
        allow_null=True,
        default=None,
        help_text="true: only pending requests; false: only others.",
    )


def represent_extension(user: User, row: TimeLimitExtension) -> dict[str, Any]:
    """Return the request; delayed jobs are named only to users who may see them."""
    seen = visible_job_ids(user, [each["job"] for each in row.delays])
    return ExtensionDetail.represent(row, seen)


def _represent_result(user: User, _row: object, extension: TimeLimitExtension) -> dict[str, Any]:
    return represent_extension(user, get_extension(user, extension.public_id))


class ExtensionsView(SignedInView):
    @_read("extensions_list", "List extension requests", query=ExtensionsQuery, response=[ExtensionSummary])
    def get(self, request: Request) -> HttpResponse:
        rows = list_extensions(self.user, pending_only=self.query["waiting"])
        return self.paginated_response(rows, ExtensionSummary.represent)


class ExtensionView(SignedInView):
    @_read("extensions_get", "Get an extension request", response=ExtensionDetail)
    def get(self, request: Request, extension: str) -> HttpResponse:
        return self.json_response(represent_extension(self.user, get_extension(self.user, extension)))


_action = partial(
    action_route,
    base=SignedInView,
    tag="jobs",
    scope=Scope.JOBS,
    scope_by_job_kind=True,
    represent=_represent_result,
    response=ExtensionDetail,
    idempotent=False,
    error_statuses=[409],
)
_decide = partial(_action, "extensions/<slug:extension>/", get_extension, body=ExtensionDecisionBody)
ROUTES = [
    path("extensions/", ExtensionsView.as_view()),
    path("extensions/<slug:extension>/", ExtensionView.as_view()),
    _action(
        "jobs/<slug:job>/",
        get_job,
        "extend",
        "jobs_extend",
        "Request an extension of the time limit",
        "Granted at once if the scheduler confirms that no job is delayed even if the job uses all of the added "
        "time. Otherwise the request is pending: managers of the project decide if it delays only jobs of the "
        "project; administrators decide all others.",
        do_request_extension,
        body=ExtensionRequestBody,
        rate=rate_limits.JOB_SUBMITS,
    ),
    _decide(
        "grant",
        "extensions_grant",
        "Grant an extension request",
        "",
        partial(do_decide_extension, grant=True),
    ),
    _decide(
        "refuse",
        "extensions_refuse",
        "Refuse an extension request",
        "",
        partial(do_decide_extension, grant=False),
    ),
]
