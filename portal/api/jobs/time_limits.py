"""REST: requests to extend the time limit of running jobs, and decisions on them."""

from __future__ import annotations

from typing import Any

from django.http import HttpResponse
from rest_framework.request import Request

from portal.access import AccessPolicy, access_policy
from portal.api.framework.request_parsing import (
    QueryBooleanField,
    StrictCharField,
    StrictIntegerField,
    StrictSerializer,
)
from portal.api.framework.views import ApiView, ListQuery, list_schema, operation
from portal.api.serializers import jobs as representations
from portal.domain.job_spec import MAX_TIME_LIMIT_S
from portal.models import TimeLimitExtension
from portal.selectors.jobs.jobs import get_job, visible_job_ids
from portal.selectors.jobs.time_limits import get_extension, list_extensions
from portal.services.accounts.tokens import Scope
from portal.services.jobs.time_limits import MIN_EXTENSION_S, do_decide_extension, do_request_extension
from portal.valkey import rate_limits


class ExtensionRequestBody(StrictSerializer):
    """A request for more time."""

    extra_s = StrictIntegerField(min_value=MIN_EXTENSION_S, max_value=MAX_TIME_LIMIT_S)
    reason = StrictCharField(required=False, allow_blank=True, default="", max_length=500)


class ExtensionDecisionBody(StrictSerializer):
    """A decision on a request."""

    answer = StrictCharField(required=False, allow_blank=True, default="", max_length=500)


class ExtensionsQuery(ListQuery):
    """Filters of the list of requests."""

    waiting = QueryBooleanField(
        required=False,
        allow_null=True,
        default=None,
        help_text="true: nobody has decided yet; false: the others.",
    )


class BaseExtensionView(ApiView):
    """Base of extension routes."""

    def serialize(self, row: TimeLimitExtension) -> dict[str, Any]:
        """Return the request; delayed jobs are named only to users who may see them."""
        seen = visible_job_ids(self.user, [each["job"] for each in row.delays])
        return representations.ExtensionDetail.represent(row, seen)

    def decision_response(self, public_id: str, *, grant: bool) -> HttpResponse:
        row = get_extension(self.user, public_id)
        self.require_scope_of(row.job)
        do_decide_extension(self.user, row, grant=grant, answer=self.body["answer"])
        return self.json_response(self.serialize(get_extension(self.user, public_id)))


@access_policy(AccessPolicy.SIGNED_IN)
class JobExtendView(BaseExtensionView):
    @operation(
        "jobs_extend",
        "Ask for more time",
        tag="jobs",
        scope=Scope.JOBS,
        scope_by_job_kind=True,
        body=ExtensionRequestBody,
        response=representations.ExtensionDetail,
        rate=rate_limits.JOB_SUBMITS,
        error_statuses=[404, 409],
        detail="Granted at once when the scheduler says that it delays nobody, counted as if the job used all of it. "
        "Else the request waits: managers of the project decide when it delays jobs of the project only, "
        "administrators on all others.",
    )
    def post(self, request: Request, job: str) -> HttpResponse:
        """The request, granted or pending."""
        row = get_job(self.user, job)
        self.require_scope_of(row)
        asked = do_request_extension(self.user, row, self.body["extra_s"], self.body["reason"])
        return self.json_response(self.serialize(get_extension(self.user, asked.public_id)))


@access_policy(AccessPolicy.SIGNED_IN)
class ExtensionsView(BaseExtensionView):
    @operation(
        "extensions_list",
        "List requests for more time",
        tag="jobs",
        scope=Scope.READ,
        query=ExtensionsQuery,
        response=list_schema(representations.ExtensionSummary),
    )
    def get(self, request: Request) -> HttpResponse:
        """Requests, newest first."""
        rows = list_extensions(self.user, pending_only=self.query["waiting"])
        return self.paginated_response(rows, representations.ExtensionSummary.represent)


@access_policy(AccessPolicy.SIGNED_IN)
class ExtensionView(BaseExtensionView):
    @operation(
        "extensions_get",
        "Get a request for more time",
        tag="jobs",
        scope=Scope.READ,
        response=representations.ExtensionDetail,
        error_statuses=[404],
    )
    def get(self, request: Request, extension: str) -> HttpResponse:
        """The request and its decision."""
        return self.json_response(self.serialize(get_extension(self.user, extension)))


_DECIDE: dict[str, Any] = {
    "tag": "jobs",
    "scope": Scope.JOBS,
    "scope_by_job_kind": True,
    "body": ExtensionDecisionBody,
    "response": representations.ExtensionDetail,
    "error_statuses": [404, 409],
}


@access_policy(AccessPolicy.SIGNED_IN)
class ExtensionGrantView(BaseExtensionView):
    @operation("extensions_grant", "Grant more time", **_DECIDE)
    def post(self, request: Request, extension: str) -> HttpResponse:
        """The granted request; the job's limit has grown."""
        return self.decision_response(extension, grant=True)


@access_policy(AccessPolicy.SIGNED_IN)
class ExtensionRefuseView(BaseExtensionView):
    @operation("extensions_refuse", "Refuse more time", **_DECIDE)
    def post(self, request: Request, extension: str) -> HttpResponse:
        """The refused request; the job's limit is unchanged."""
        return self.decision_response(extension, grant=False)
