"""REST: quotas, changed under an entity tag so that no edit overwrites an unseen one."""

from __future__ import annotations

from functools import partial
from typing import Any

from django.http import HttpResponse
from django.urls import URLPattern, path
from rest_framework.request import Request

from portal.access import require_admin
from portal.api.framework.request_parsing import (
    StrictCharField,
    StrictFloatField,
    StrictIntegerField,
    StrictSerializer,
)
from portal.api.framework.views import ListQuery, SignedInView, operation
from portal.api.serializers.projects import QuotaChangeDetail, QuotaDetail
from portal.errors import Conflict, NotFound, PreconditionFailed
from portal.models import NodePool, Project, Quota, User
from portal.selectors.projects.projects import get_pool, get_project, list_quota_changes, list_quotas
from portal.services.accounts.tokens import Scope
from portal.services.projects.projects import (
    MAX_MILLI,
    MAX_WEIGHT,
    MIN_WEIGHT,
    QuotaValues,
    do_change_quota,
    do_undo_quota_change,
    quota_values,
)

_read = partial(operation, tag="quotas", scope=Scope.READ)


class QuotasQuery(ListQuery):
    """Filters of the quota list."""

    project = StrictCharField(required=False, max_length=63, default="", help_text="Id or name.")
    pool = StrictCharField(required=False, max_length=63, default="", help_text="Id or name.")


class QuotaBody(StrictSerializer):
    """The values of a quota; GPUs in thousandths (milli)."""

    guaranteed_milli = StrictIntegerField(min_value=0, max_value=MAX_MILLI)
    limit_milli = StrictIntegerField(
        min_value=0, max_value=MAX_MILLI, allow_null=True, help_text="null if unlimited."
    )
    weight = StrictFloatField(min_value=MIN_WEIGHT, max_value=MAX_WEIGHT)
    priority = StrictIntegerField(min_value=-1000, max_value=1000)
    user_limit_milli = StrictIntegerField(
        required=False,
        min_value=0,
        max_value=MAX_MILLI,
        allow_null=True,
        help_text="GPU milli that one user may hold at once in the project and its descendants; null if unlimited. "
        "If omitted, it does not change.",
    )
    reason = StrictCharField(
        required=False,
        max_length=500,
        allow_blank=True,
        help_text="Reason of the change; kept in its history.",
    )


class UndoBody(StrictSerializer):
    """The reason for undoing the newest change."""

    reason = StrictCharField(required=False, max_length=500, allow_blank=True, default="")


def current_quota(user: User, project: Project, pool: NodePool) -> Quota:
    """Return the quota of a project in a pool; where none was set, an unsaved one with the defaults."""
    found = list_quotas(user).filter(project=project, pool=pool).first()
    return found or default_quota(project, pool)


def default_quota(project: Project, pool: NodePool) -> Quota:
    public_id = f"{project.public_id}.{pool.public_id}"  # for its entity tag
    return Quota(public_id=public_id, project=project, pool=pool, version=0)


class BaseQuotaView(SignedInView):
    """Base of routes of one quota: lookup, and changes under an entity tag."""

    def get_quota(self, **where: str) -> Quota:
        """Return the quota that the path names by its id, or by project and pool."""
        if "quota" not in where:
            return current_quota(self.user, get_project(self.user, where["project"]), get_pool(where["pool"]))
        row = list_quotas(self.user).filter(public_id=where["quota"]).first()
        if row is None:
            raise NotFound("There is no such quota.")
        return row

    def etag_response(self, row: Quota) -> HttpResponse:
        """Return the quota with its ETag."""
        return self.json_response(QuotaDetail.represent(row), headers={"ETag": row.etag})

    def check_etag(self, row: Quota) -> None:
        """Raise PreconditionRequired without If-Match, PreconditionFailed if it is outdated."""
        require_admin(self.user, "change quotas")
        if not self.if_match(row.etag):
            raise self.stale_error(row)

    def stale_error(self, row: Quota) -> PreconditionFailed:
        """Return the refusal of an edit of an outdated version, with the current quota."""
        return PreconditionFailed(
            "Another user changed this quota while you were editing it.",
            details={"current": QuotaDetail.represent(row)},
        )

    def set_quota(self, row: Quota, numbers: dict[str, Any]) -> HttpResponse:
        """Set the quota if its version is the one in If-Match."""
        self.check_etag(row)
        reason = numbers.pop("reason", "")
        values = QuotaValues(**({"user_limit_milli": row.user_limit_milli} | numbers))
        try:
            changed = do_change_quota(
                self.user, row.project, row.pool, values, version=row.version, reason=reason
            )
        except PreconditionFailed as error:
            raise self.stale_error(current_quota(self.user, row.project, row.pool)) from error
        return self.etag_response(changed)


class QuotasView(SignedInView):
    @_read(
        "quotas_list",
        "List quotas",
        query=QuotasQuery,
        response=[QuotaDetail],
        detail="Quotas of projects that are visible to you. The default where no quota was set: no guarantee, no "
        "limit, weight 1.",
    )
    def get(self, request: Request) -> HttpResponse:
        rows = list_quotas(self.user, project=self.query["project"], pool=self.query["pool"])
        return self.paginated_response(rows, QuotaDetail.represent)


class ProjectQuotasView(SignedInView):
    @_read("project_quotas_list", "List the quotas of a project, one per pool", response=[QuotaDetail])
    def get(self, request: Request, project: str) -> HttpResponse:
        """A quota for every pool; defaults where none was set."""
        found = get_project(self.user, project)
        rows = {row.pool_id: row for row in list_quotas(self.user).filter(project=found)}
        return self.paginated_response(
            NodePool.objects.all(),
            lambda pool: QuotaDetail.represent(rows.get(pool.pk) or default_quota(found, pool)),
        )


_WRITE: dict[str, Any] = {
    "tag": "quotas",
    "scope": Scope.QUOTAS,
    "response": QuotaDetail,
    "if_match": True,
    "detail": "Requires If-Match with the ETag that was read. Effective from the next scheduling cycle on. A quota "
    "below the current usage stops no running jobs; it only prevents new starts.",
}


def _quota_route(route: str, name: str, what: str) -> URLPattern:
    """Return the route of the quota that the path names."""

    class QuotaView(BaseQuotaView):
        @_read(f"{name}_get", f"Get {what}", response=QuotaDetail)
        def get(self, request: Request, **keys: str) -> HttpResponse:
            return self.etag_response(self.get_quota(**keys))

        @operation(f"{name}_put", f"Set {what}", body=QuotaBody, **_WRITE)
        def put(self, request: Request, **keys: str) -> HttpResponse:
            return self.set_quota(self.get_quota(**keys), self.body)

        @operation(f"{name}_patch", f"Change {what}", body=QuotaBody, partial=True, **_WRITE)
        def patch(self, request: Request, **keys: str) -> HttpResponse:
            """Change only the given values."""
            row = self.get_quota(**keys)
            return self.set_quota(row, {**quota_values(row), **self.body})

    return path(route, QuotaView.as_view())


class QuotaChangesView(BaseQuotaView):
    @_read("quota_changes", "List the changes of a quota", response=[QuotaChangeDetail])
    def get(self, request: Request, quota: str) -> HttpResponse:
        """Changes, newest first; they are never deleted."""
        changes = list_quota_changes(self.get_quota(quota=quota))
        return self.paginated_response(changes, QuotaChangeDetail.represent)


class QuotaUndoView(BaseQuotaView):
    @operation(
        "quota_undo", "Undo the newest change of a quota", body=UndoBody, error_statuses=[409], **_WRITE
    )
    def post(self, request: Request, quota: str) -> HttpResponse:
        """The restored quota; the undo is a change of its own."""
        row = self.get_quota(quota=quota)
        self.check_etag(row)
        newest = list_quota_changes(row).first()
        if newest is None:
            raise Conflict("There is no change to undo.", code="nothing_to_undo")
        return self.etag_response(do_undo_quota_change(self.user, newest, reason=self.body["reason"]))


ROUTES = [
    path("projects/<slug:project>/quotas/", ProjectQuotasView.as_view()),
    _quota_route(
        "projects/<slug:project>/quotas/<slug:pool>/", "project_quota", "a project's quota in a pool"
    ),
    path("quotas/", QuotasView.as_view()),
    _quota_route("quotas/<slug:quota>/", "quotas", "a quota"),
    path("quotas/<slug:quota>/changes/", QuotaChangesView.as_view()),
    path("quotas/<slug:quota>/undo/", QuotaUndoView.as_view()),
]
