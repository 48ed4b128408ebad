"""REST: quotas, changed under an entity tag so that no edit overwrites an unseen one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from django.db.models import Model
from django.http import HttpResponse
from rest_framework.request import Request

from portal.access import AccessPolicy, access_policy, require_admin
from portal.api.framework.pagination import NEWEST
from portal.api.framework.request_parsing import (
    StrictCharField,
    StrictFloatField,
    StrictIntegerField,
    StrictSerializer,
)
from portal.api.framework.views import ApiView, ListQuery, list_schema, operation
from portal.api.serializers import projects as representations
from portal.errors import Conflict, NotFound, PreconditionFailed
from portal.models import NodePool, Project, Quota
from portal.selectors.projects.projects import get_pool, get_project, list_quota_changes, list_quotas
from portal.services.accounts.tokens import Scope
from portal.services.projects.projects import (
    DEFAULT_QUOTA_VALUES,
    MAX_MILLI,
    MAX_WEIGHT,
    MIN_WEIGHT,
    QuotaValues,
    do_change_quota,
    do_undo_quota_change,
    quota_values,
)


class QuotasQuery(ListQuery):
    """Filters of the quota list."""

    project = StrictCharField(required=False, max_length=63, default="", help_text="Id or name.")
    pool = StrictCharField(required=False, max_length=63, default="", help_text="Id or name.")


class QuotaBody(StrictSerializer):
    """The values of a quota; GPUs in thousandths."""

    guaranteed_milli = StrictIntegerField(min_value=0, max_value=MAX_MILLI)
    limit_milli = StrictIntegerField(
        min_value=0, max_value=MAX_MILLI, allow_null=True, help_text="null: no limit."
    )
    weight = StrictFloatField(min_value=MIN_WEIGHT, max_value=MAX_WEIGHT)
    priority = StrictIntegerField(min_value=-1000, max_value=1000)
    user_limit_milli = StrictIntegerField(
        required=False,
        min_value=0,
        max_value=MAX_MILLI,
        allow_null=True,
        help_text="What one person may hold at once, here and in projects below; null: no limit. Left out, it stays.",
    )
    reason = StrictCharField(
        required=False, max_length=500, allow_blank=True, help_text="Why; kept in the history."
    )


class UndoBody(StrictSerializer):
    """The reason for undoing the newest change."""

    reason = StrictCharField(required=False, max_length=500, allow_blank=True, default="")


@dataclass(frozen=True)
class QuotaTarget:
    """A project and a pool, with their quota if one was set."""

    project: Project
    pool: NodePool
    quota: Quota | None

    @property
    def etag(self) -> str:
        """The entity tag of the current quota."""
        return self.quota.etag if self.quota else representations.unset_etag(self.project, self.pool)

    def representation(self) -> dict[str, Any]:
        """The current quota, set or default."""
        return (
            representations.quota(self.quota)
            if self.quota
            else representations.default_quota(self.project, self.pool)
        )


class BaseQuotaView(ApiView):
    """Base of routes of one quota: lookup, and changes under an entity tag."""

    def get_target(self, **where: str) -> QuotaTarget:
        """Return the quota that the path names by its id, or by project and pool."""
        if "quota" in where:
            row = list_quotas(self.user).filter(public_id=where["quota"]).first()
            if row is None:
                raise NotFound("There is no such quota.")
            return QuotaTarget(row.project, row.pool, row)
        project = get_project(self.user, where["project"])
        pool = get_pool(where["pool"])
        return QuotaTarget(project, pool, list_quotas(self.user).filter(project=project, pool=pool).first())

    def etag_response(self, target: QuotaTarget, status: int = 200) -> HttpResponse:
        """Return the current quota with its ETag."""
        return self.json_response(target.representation(), status, {"ETag": target.etag})

    def check_etag(self, target: QuotaTarget) -> int:
        """Return the version in If-Match. Raise PreconditionRequired or, if outdated, PreconditionFailed."""
        require_admin(self.user, "change quotas")
        if not self.if_match(target.etag):
            raise self.stale_error(target)
        return target.quota.version if target.quota else 0

    def stale_error(self, target: QuotaTarget) -> PreconditionFailed:
        """Return the refusal of an edit of an outdated version, with the current quota."""
        return PreconditionFailed(
            "Another user changed this quota while you were editing it.",
            details={"current": target.representation()},
        )

    def set_quota(self, target: QuotaTarget, numbers: dict[str, Any]) -> HttpResponse:
        """Set the quota if its version is the one in If-Match."""
        version = self.check_etag(target)
        reason = numbers.pop("reason", "")
        kept = {"user_limit_milli": target.quota.user_limit_milli if target.quota else None}
        try:
            row = do_change_quota(
                self.user,
                target.project,
                target.pool,
                QuotaValues(**(kept | numbers)),
                version=version,
                reason=reason,
            )
        except PreconditionFailed as lost:
            now = list_quotas(self.user).filter(project=target.project, pool=target.pool).first()
            raise self.stale_error(QuotaTarget(target.project, target.pool, now)) from lost
        return self.etag_response(QuotaTarget(target.project, target.pool, row))

    def undo_change(self, target: QuotaTarget) -> HttpResponse:
        """Restore the values before the newest change."""
        self.check_etag(target)
        newest = list_quota_changes(target.quota).first() if target.quota else None
        if newest is None:
            raise Conflict("There is no change to undo.", code="nothing_to_undo")
        row = do_undo_quota_change(self.user, newest, reason=self.body["reason"])
        return self.etag_response(QuotaTarget(target.project, target.pool, row))

    def patch_quota(self, target: QuotaTarget) -> HttpResponse:
        """Change only the given values."""
        standing = quota_values(target.quota) if target.quota else DEFAULT_QUOTA_VALUES
        return self.set_quota(target, {**standing, **self.body})


@access_policy(AccessPolicy.SIGNED_IN)
class QuotasView(ApiView):
    @operation(
        "quotas_list",
        "List quotas",
        tag="quotas",
        scope=Scope.READ,
        query=QuotasQuery,
        response=list_schema(representations.QuotaDetail),
        detail="Quotas of the projects you may see. Where none was set, defaults stand: nothing guaranteed, "
        "no limit, weight 1.",
    )
    def get(self, request: Request) -> HttpResponse:
        """Quotas that were set, newest first."""
        rows = list_quotas(self.user, project=self.query["project"], pool=self.query["pool"])
        return self.paginated_response(rows, representations.quota, NEWEST)


@access_policy(AccessPolicy.SIGNED_IN)
class ProjectQuotasView(ApiView):
    @operation(
        "project_quotas_list",
        "List a project's quotas, one for each pool",
        tag="quotas",
        scope=Scope.READ,
        query=ListQuery,
        response=list_schema(representations.QuotaDetail),
        error_statuses=[404],
    )
    def get(self, request: Request, project: str) -> HttpResponse:
        """A quota for every pool; defaults where none was set."""
        found = get_project(self.user, project)
        rows = {row.pool_id: row for row in list_quotas(self.user).filter(project=found)}

        def one(pool: Model) -> dict[str, Any]:
            assert isinstance(pool, NodePool)  # noqa: S101
            return QuotaTarget(found, pool, rows.get(pool.pk)).representation()

        return self.paginated_response(NodePool.objects.all(), one, NEWEST)


_READ: dict[str, Any] = {
    "tag": "quotas",
    "scope": Scope.READ,
    "response": representations.QuotaDetail,
    "error_statuses": [404],
}
_WRITE: dict[str, Any] = {
    "tag": "quotas",
    "scope": Scope.QUOTAS,
    "response": representations.QuotaDetail,
    "if_match": True,
    "error_statuses": [404],
    "detail": "Needs If-Match with the ETag you read. Effective at the next scheduling cycle; lowering it "
    "below what is used stops nothing, it only keeps more from starting.",
}


@access_policy(AccessPolicy.SIGNED_IN)
class QuotaView(BaseQuotaView):
    @operation("quotas_get", "Get a quota", **_READ)
    def get(self, request: Request, quota: str) -> HttpResponse:
        """The quota with its ETag."""
        return self.etag_response(self.get_target(quota=quota))

    @operation("quotas_put", "Set a quota", body=QuotaBody, **_WRITE)
    def put(self, request: Request, quota: str) -> HttpResponse:
        """All values are required."""
        return self.set_quota(self.get_target(quota=quota), self.body)

    @operation("quotas_patch", "Change a quota", body=QuotaBody, partial=True, **_WRITE)
    def patch(self, request: Request, quota: str) -> HttpResponse:
        """Changes the given values."""
        return self.patch_quota(self.get_target(quota=quota))


@access_policy(AccessPolicy.SIGNED_IN)
class ProjectQuotaView(BaseQuotaView):
    @operation("project_quota_get", "Get a project's quota in a pool", **_READ)
    def get(self, request: Request, project: str, pool: str) -> HttpResponse:
        """The quota with its ETag; defaults where none was set."""
        return self.etag_response(self.get_target(project=project, pool=pool))

    @operation("project_quota_put", "Set a project's quota in a pool", body=QuotaBody, **_WRITE)
    def put(self, request: Request, project: str, pool: str) -> HttpResponse:
        """All values are required."""
        return self.set_quota(self.get_target(project=project, pool=pool), self.body)

    @operation(
        "project_quota_patch", "Change a project's quota in a pool", body=QuotaBody, partial=True, **_WRITE
    )
    def patch(self, request: Request, project: str, pool: str) -> HttpResponse:
        """Changes the given values."""
        return self.patch_quota(self.get_target(project=project, pool=pool))


@access_policy(AccessPolicy.SIGNED_IN)
class QuotaChangesView(BaseQuotaView):
    @operation(
        "quota_changes",
        "List a quota's changes",
        tag="quotas",
        scope=Scope.READ,
        query=ListQuery,
        response=list_schema(representations.QuotaChangeDetail),
        error_statuses=[404],
    )
    def get(self, request: Request, quota: str) -> HttpResponse:
        """Changes, newest first; they are never deleted."""
        found = self.get_target(quota=quota).quota
        if found is None:
            raise NotFound("There is no such quota.")
        return self.paginated_response(list_quota_changes(found), representations.quota_change, NEWEST)


@access_policy(AccessPolicy.SIGNED_IN)
class QuotaUndoView(BaseQuotaView):
    @operation(
        "quota_undo",
        "Undo the newest change of a quota",
        body=UndoBody,
        **{**_WRITE, "error_statuses": [404, 409]},
    )
    def post(self, request: Request, quota: str) -> HttpResponse:
        """The restored quota; the undo is a change of its own."""
        return self.undo_change(self.get_target(quota=quota))
