"""REST: quotas, edited under an entity tag so that nobody overwrites what they have not seen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from django.db.models import Model
from django.http import HttpResponse
from rest_framework.request import Request

from portal.access import Policy, policy, require_admin
from portal.api.bodies import Closed, Number, Text, Whole
from portal.api.cursors import NEWEST
from portal.api.route import PageQuery, Route, operation, page_of
from portal.api.shapes import projects as shapes
from portal.errors import Conflict, NotThere, Stale
from portal.models import NodePool, Project, Quota
from portal.selectors.projects import pool_for, project_for, quota_changes, quotas_for
from portal.services.projects import (
    MAX_MILLI,
    MAX_WEIGHT,
    MIN_WEIGHT,
    NO_QUOTA,
    QuotaNumbers,
    do_change_quota,
    do_undo_quota_change,
    quota_numbers,
)
from portal.services.tokens import Scope


class QuotasQuery(PageQuery):
    """Which quotas."""

    project = Text(required=False, max_length=63, default="", help_text="Id or name.")
    pool = Text(required=False, max_length=63, default="", help_text="Id or name.")


class QuotaBody(Closed):
    """The numbers of a quota; GPUs in thousandths."""

    guaranteed_milli = Whole(min_value=0, max_value=MAX_MILLI)
    limit_milli = Whole(min_value=0, max_value=MAX_MILLI, allow_null=True, help_text="null: no limit.")
    weight = Number(min_value=MIN_WEIGHT, max_value=MAX_WEIGHT)
    priority = Whole(min_value=-1000, max_value=1000)
    user_limit_milli = Whole(
        required=False,
        min_value=0,
        max_value=MAX_MILLI,
        allow_null=True,
        help_text="What one person may hold at once, here and in projects below; null: no limit. Left out, it stays.",
    )
    reason = Text(required=False, max_length=500, allow_blank=True, help_text="Why; kept in the history.")


class UndoBody(Closed):
    """Why the newest change is undone."""

    reason = Text(required=False, max_length=500, allow_blank=True, default="")


@dataclass(frozen=True)
class Place:
    """A project and a pool, and the quota between them when one was set."""

    project: Project
    pool: NodePool
    quota: Quota | None

    @property
    def etag(self) -> str:
        """The entity tag of what stands."""
        return self.quota.etag if self.quota else shapes.unset_etag(self.project, self.pool)

    def shown(self) -> dict[str, Any]:
        """What stands, set or default."""
        return shapes.quota(self.quota) if self.quota else shapes.quota_default(self.project, self.pool)


class QuotaDoor(Route):
    """What the routes of one quota share: finding it, and changing it under its entity tag."""

    def place(self, **where: str) -> Place:
        """The quota a route names: by its own id, or by project and pool."""
        if "quota" in where:
            row = quotas_for(self.person).filter(public_id=where["quota"]).first()
            if row is None:
                raise NotThere("There is no such quota.")
            return Place(row.project, row.pool, row)
        project = project_for(self.person, where["project"])
        pool = pool_for(where["pool"])
        return Place(project, pool, quotas_for(self.person).filter(project=project, pool=pool).first())

    def tagged(self, place: Place, status: int = 200) -> HttpResponse:
        """What stands, with its ETag."""
        return self.answer(place.shown(), status, {"ETag": place.etag})

    def matched(self, place: Place) -> int:
        """The version that If-Match names; PreconditionNeeded without it, Stale when it is another."""
        require_admin(self.person, "change quotas")
        if not self.if_match(place.etag):
            raise self.stale(place)
        return place.quota.version if place.quota else 0

    def stale(self, place: Place) -> Stale:
        """The refusal of an edit that is based on an older version, with what stands now."""
        return Stale(
            "Somebody else changed this quota while you were editing it.", facts={"current": place.shown()}
        )

    def changed(self, place: Place, numbers: dict[str, Any]) -> HttpResponse:
        """Sets the quota, if it is still what the editor saw."""
        version = self.matched(place)
        reason = numbers.pop("reason", "")
        kept = {"user_limit_milli": place.quota.user_limit_milli if place.quota else None}
        try:
            row = do_change_quota(
                self.person,
                place.project,
                place.pool,
                QuotaNumbers(**(kept | numbers)),
                version=version,
                reason=reason,
            )
        except Stale as lost:
            now = quotas_for(self.person).filter(project=place.project, pool=place.pool).first()
            raise self.stale(Place(place.project, place.pool, now)) from lost
        return self.tagged(Place(place.project, place.pool, row))

    def undone(self, place: Place) -> HttpResponse:
        """Puts back what stood before the newest change."""
        self.matched(place)
        newest = quota_changes(place.quota).first() if place.quota else None
        if newest is None:
            raise Conflict("There is no change to undo.", code="nothing_to_undo")
        row = do_undo_quota_change(self.person, newest, reason=self.body["reason"])
        return self.tagged(Place(place.project, place.pool, row))

    def patched(self, place: Place) -> HttpResponse:
        """Changes only the numbers that are given."""
        standing = quota_numbers(place.quota) if place.quota else NO_QUOTA
        return self.changed(place, {**standing, **self.body})


@policy(Policy.SIGNED_IN)
class QuotasRoute(Route):
    """Quotas that were set."""

    @operation(
        "quotas_list",
        "List quotas",
        tag="quotas",
        scope=Scope.READ,
        query=QuotasQuery,
        answer=page_of(shapes.QuotaOut),
        detail="Quotas of the projects you may see. Where none was set, defaults stand: nothing guaranteed, "
        "no limit, weight 1.",
    )
    def get(self, request: Request) -> HttpResponse:
        """Newest first."""
        rows = quotas_for(self.person, project=self.query["project"], pool=self.query["pool"])
        return self.page(rows, shapes.quota, NEWEST)


@policy(Policy.SIGNED_IN)
class ProjectQuotasRoute(Route):
    """A project's quota in every pool."""

    @operation(
        "project_quotas_list",
        "List a project's quotas, one for each pool",
        tag="quotas",
        scope=Scope.READ,
        query=PageQuery,
        answer=page_of(shapes.QuotaOut),
        refusals=[404],
    )
    def get(self, request: Request, project: str) -> HttpResponse:
        """Defaults where none was set."""
        found = project_for(self.person, project)
        rows = {row.pool_id: row for row in quotas_for(self.person).filter(project=found)}

        def one(pool: Model) -> dict[str, Any]:
            assert isinstance(pool, NodePool)  # noqa: S101
            return Place(found, pool, rows.get(pool.pk)).shown()

        return self.page(NodePool.objects.all(), one, NEWEST)


_READ: dict[str, Any] = {
    "tag": "quotas",
    "scope": Scope.READ,
    "answer": shapes.QuotaOut,
    "refusals": [404],
}
_WRITE: dict[str, Any] = {
    "tag": "quotas",
    "scope": Scope.QUOTAS,
    "answer": shapes.QuotaOut,
    "if_match": True,
    "refusals": [404],
    "detail": "Needs If-Match with the ETag you read. Effective at the next scheduling cycle; lowering it "
    "below what is used stops nothing, it only keeps more from starting.",
}


@policy(Policy.SIGNED_IN)
class QuotaRoute(QuotaDoor):
    """One quota that was set."""

    @operation("quotas_get", "Get a quota", **_READ)
    def get(self, request: Request, quota: str) -> HttpResponse:
        """With its ETag."""
        return self.tagged(self.place(quota=quota))

    @operation("quotas_put", "Set a quota", body=QuotaBody, **_WRITE)
    def put(self, request: Request, quota: str) -> HttpResponse:
        """All numbers."""
        return self.changed(self.place(quota=quota), self.body)

    @operation("quotas_patch", "Change a quota", body=QuotaBody, partial=True, **_WRITE)
    def patch(self, request: Request, quota: str) -> HttpResponse:
        """Only the numbers given."""
        return self.patched(self.place(quota=quota))


@policy(Policy.SIGNED_IN)
class ProjectQuotaRoute(QuotaDoor):
    """A project's quota in one pool, set or not."""

    @operation("project_quota_get", "Get a project's quota in a pool", **_READ)
    def get(self, request: Request, project: str, pool: str) -> HttpResponse:
        """With its ETag; defaults where none was set."""
        return self.tagged(self.place(project=project, pool=pool))

    @operation("project_quota_put", "Set a project's quota in a pool", body=QuotaBody, **_WRITE)
    def put(self, request: Request, project: str, pool: str) -> HttpResponse:
        """All numbers."""
        return self.changed(self.place(project=project, pool=pool), self.body)

    @operation(
        "project_quota_patch", "Change a project's quota in a pool", body=QuotaBody, partial=True, **_WRITE
    )
    def patch(self, request: Request, project: str, pool: str) -> HttpResponse:
        """Only the numbers given."""
        return self.patched(self.place(project=project, pool=pool))


@policy(Policy.SIGNED_IN)
class QuotaChangesRoute(QuotaDoor):
    """The history of a quota."""

    @operation(
        "quota_changes",
        "List a quota's changes",
        tag="quotas",
        scope=Scope.READ,
        query=PageQuery,
        answer=page_of(shapes.QuotaChangeOut),
        refusals=[404],
    )
    def get(self, request: Request, quota: str) -> HttpResponse:
        """Newest first; kept for ever."""
        found = self.place(quota=quota).quota
        if found is None:
            raise NotThere("There is no such quota.")
        return self.page(quota_changes(found), shapes.quota_change, NEWEST)


@policy(Policy.SIGNED_IN)
class QuotaUndoRoute(QuotaDoor):
    """Taking back the newest change."""

    @operation(
        "quota_undo", "Undo the newest change of a quota", body=UndoBody, **{**_WRITE, "refusals": [404, 409]}
    )
    def post(self, request: Request, quota: str) -> HttpResponse:
        """The quota as it stood before, as a change of its own."""
        return self.undone(self.place(quota=quota))
