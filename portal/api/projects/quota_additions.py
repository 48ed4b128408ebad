"""REST: temporary additions to quotas."""

from __future__ import annotations

from typing import Any

from django.http import HttpResponse
from django.urls import path
from rest_framework import serializers
from rest_framework.request import Request

from portal.api.framework.request_parsing import (
    QueryBooleanField,
    ReasonBody,
    StrictIntegerField,
)
from portal.api.framework.row_actions import action_route
from portal.api.framework.views import AdminView, ListQuery, SignedInView, operation
from portal.api.serializers.user_requests import QuotaAdditionDetail
from portal.models import QuotaAddition, User
from portal.selectors.projects.projects import get_pool, get_project
from portal.selectors.projects.quota_additions import get_quota_addition, list_quota_additions
from portal.services.accounts.tokens import Scope
from portal.services.projects.projects import MAX_MILLI
from portal.services.projects.quota_additions import do_add_quota, do_end_quota_addition


class QuotaAdditionBody(ReasonBody):
    """GPUs to add to a quota between two times."""

    extra_milli = StrictIntegerField(
        min_value=1,
        max_value=MAX_MILLI,
        help_text="GPU milli to add to the guarantee, and to the limit if there is one.",
    )
    starts_at = serializers.DateTimeField(required=False, allow_null=True, help_text="null: from now on.")
    ends_at = serializers.DateTimeField()


class QuotaAdditionsQuery(ListQuery):
    """Filters of the list of additions."""

    ended = QueryBooleanField(required=False, allow_null=True, default=None)


def _represent(user: User, _row: object, row: QuotaAddition) -> dict[str, Any]:
    return QuotaAdditionDetail.represent(get_quota_addition(user, row.public_id))


class QuotaAdditionsView(SignedInView):
    @operation(
        "quota_additions_list",
        "List temporary additions to quotas",
        tag="quotas",
        scope=Scope.READ,
        query=QuotaAdditionsQuery,
        response=[QuotaAdditionDetail],
    )
    def get(self, request: Request) -> HttpResponse:
        rows = list_quota_additions(self.user, ended=self.query["ended"])
        return self.paginated_response(rows, QuotaAdditionDetail.represent)


class ProjectQuotaAdditionsView(AdminView):
    @operation(
        "project_quota_additions_create",
        "Add to a quota for a time",
        tag="quotas",
        scope=Scope.QUOTAS,
        body=QuotaAdditionBody,
        response=QuotaAdditionDetail,
        status=201,
        idempotent=True,
        detail="In force from the first scheduling cycle after its start until its end. Running jobs are not stopped "
        "at its end; the GPUs are then borrowed and may be reclaimed.",
    )
    def post(self, request: Request, project: str, pool: str) -> HttpResponse:
        def work() -> dict[str, Any]:
            row = do_add_quota(self.user, get_project(self.user, project), get_pool(pool), **self.body)
            return _represent(self.user, None, row)

        return self.idempotent_response(work)


ROUTES = [
    path("quota-additions/", QuotaAdditionsView.as_view()),
    path("projects/<slug:project>/quotas/<slug:pool>/additions/", ProjectQuotaAdditionsView.as_view()),
    action_route(
        "quota-additions/<slug:addition>/",
        get_quota_addition,
        "end",
        "quota_additions_end",
        "End an addition to a quota early",
        "",
        do_end_quota_addition,
        represent=_represent,
        response=QuotaAdditionDetail,
        tag="quotas",
        scope=Scope.QUOTAS,
        body=ReasonBody,
    ),
]
