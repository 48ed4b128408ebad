"""REST: volumes, the folders that jobs name."""

from __future__ import annotations

from typing import Any

from django.db.models import QuerySet
from django.http import HttpResponse
from rest_framework import serializers
from rest_framework.request import Request

from portal.access import Policy, policy, require_admin, visible_nodes, visible_projects
from portal.api.bodies import Closed, Name, Text, Whole, YesNo
from portal.api.cursors import Order
from portal.api.job_choice import JobChoiceFields, choice_of
from portal.api.route import PageQuery, Route, operation, page_of
from portal.api.shapes import volumes as shapes
from portal.errors import Invalid
from portal.models import NodePool
from portal.selectors.volumes import named_rows, volume_for, volumes_for
from portal.services.tokens import Scope
from portal.services.volumes import MOST_QUOTA_MIB, VolumeWords, do_remove_volume, do_save_volume
from portal.words.volumes import Reach, VolumeKind


class VolumeFields(Closed):
    """What can be changed of a volume; what is left out is nothing."""

    reach = serializers.ChoiceField([reach.value for reach in Reach], required=False, default="node")
    path = Text(required=False, default="", allow_blank=True, max_length=500)
    description = Text(required=False, default="", allow_blank=True, max_length=500)
    read_only = YesNo(required=False, default=False)  # type: ignore[assignment]
    quota_mib = Whole(required=False, allow_null=True, default=None, min_value=1, max_value=MOST_QUOTA_MIB)
    pool = Text(required=False, allow_null=True, default=None, max_length=63, help_text="Id or name.")
    nodes = serializers.ListField(child=Text(max_length=63), required=False, default=list, max_length=1000)
    projects = serializers.ListField(child=Text(max_length=63), required=False, default=list, max_length=1000)
    reason = Text(required=False, default="", allow_blank=True, max_length=500)


class ChangeBody(VolumeFields, JobChoiceFields):
    """A change of a volume."""


class VolumeBody(VolumeFields):
    """A new volume."""

    name = Name()
    kind = serializers.ChoiceField([kind.value for kind in VolumeKind])


class _VolumeRoute(Route):
    def words(self, name: str, kind: str) -> VolumeWords:
        """What the body says, with rows for names."""
        require_admin(self.person, "change volumes")
        body = self.body
        pools = self._rows("pool", NodePool.objects.all(), [body["pool"]] if body["pool"] else [])
        return VolumeWords(
            name=name,
            kind=VolumeKind(kind),
            reach=Reach(body["reach"]),
            path=body["path"],
            description=body["description"],
            read_only=body["read_only"],
            quota_mib=body["quota_mib"],
            pool=pools[0] if pools else None,
            nodes=self._rows("nodes", visible_nodes(self.person), body["nodes"]),
            projects=self._rows("projects", visible_projects(self.person), body["projects"]),
        )

    @staticmethod
    def _rows(field: str, rows: QuerySet[Any], keys: list[str]) -> list[Any]:
        found, unknown = named_rows(rows, keys)
        if unknown is not None:
            raise Invalid(fields={field: f"There is no {field.removesuffix('s')} called {unknown}."})
        return found


@policy(Policy.SIGNED_IN)
class VolumesRoute(_VolumeRoute):
    """All volumes that the person's projects may use."""

    @operation(
        "volumes_list",
        "List volumes",
        tag="cluster",
        scope=Scope.READ,
        query=PageQuery,
        answer=page_of(shapes.Volume),
    )
    def get(self, request: Request) -> HttpResponse:
        """By name."""
        return self.page(volumes_for(self.person), shapes.volume, Order("name"))

    @operation(
        "volumes_create",
        "Declare a volume",
        tag="cluster",
        scope=Scope.ADMIN,
        body=VolumeBody,
        answer=shapes.Volume,
        status=201,
        idempotent=True,
        detail="A node shows only what its own settings lend (`path_roots`).",
    )
    def post(self, request: Request) -> HttpResponse:
        """The new volume."""

        def work() -> dict[str, Any]:
            words = self.words(self.body["name"], self.body["kind"])
            return shapes.volume(do_save_volume(self.person, words, reason=self.body["reason"]))

        return self.once(work)


@policy(Policy.SIGNED_IN)
class VolumeRoute(_VolumeRoute):
    """One volume."""

    @operation(
        "volumes_get",
        "Get a volume",
        tag="cluster",
        scope=Scope.READ,
        answer=shapes.Volume,
        refusals=[404],
    )
    def get(self, request: Request, volume: str) -> HttpResponse:
        """By id or name."""
        return self.answer(shapes.volume(volume_for(self.person, volume)))

    @operation(
        "volumes_put",
        "Change a volume",
        tag="cluster",
        scope=Scope.ADMIN,
        body=ChangeBody,
        answer=shapes.Volume,
        refusals=[404],
        detail="Name and kind stay. What runs keeps what it was started with. Jobs of projects that it is closed to "
        "are held, or cancelled or stopped, as `queued_jobs` and `running_jobs` say.",
    )
    def put(self, request: Request, volume: str) -> HttpResponse:
        """The volume as it stands then."""
        row = volume_for(self.person, volume)
        words = self.words(row.name, row.kind)
        saved = do_save_volume(
            self.person, words, row, reason=self.body["reason"], choice=choice_of(self.body)
        )
        return self.answer(shapes.volume(saved))

    @operation(
        "volumes_remove",
        "Forget a volume",
        tag="cluster",
        scope=Scope.ADMIN,
        answer=None,
        status=204,
        refusals=[404, 409],
        detail="Its files stay. Refused with `volume_in_use` while jobs that have not ended name it.",
    )
    def delete(self, request: Request, volume: str) -> HttpResponse:
        """Nothing."""
        do_remove_volume(self.person, volume_for(self.person, volume))
        return self.done()
