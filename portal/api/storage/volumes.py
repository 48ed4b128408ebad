"""REST: volumes."""

from __future__ import annotations

from functools import partial
from typing import Any

from django.db.models import QuerySet
from django.http import HttpResponse
from rest_framework import serializers
from rest_framework.request import Request

from portal.access import require_admin, visible_nodes, visible_projects
from portal.api.framework.pagination import Order
from portal.api.framework.request_parsing import (
    NameField,
    ReasonBody,
    StrictBooleanField,
    StrictCharField,
    StrictIntegerField,
)
from portal.api.framework.responses import ResponseSerializer
from portal.api.framework.views import SignedInView, operation
from portal.api.jobs.affected_jobs import AffectedJobsFields, parse_job_choice
from portal.api.serializers.references import Reference, UserReference
from portal.domain.storage.volumes import VolumeKind, VolumeScope
from portal.errors import InvalidRequest
from portal.models import NodePool
from portal.selectors.lookup import get_rows_by_key
from portal.selectors.storage.volumes import get_volume, list_usage, list_volumes
from portal.services.accounts.tokens import Scope
from portal.services.storage.volumes import MAX_QUOTA_MIB, VolumeInput, do_delete_volume, do_save_volume

_admin = partial(operation, tag="cluster", scope=Scope.ADMIN)
_read = partial(operation, tag="cluster", scope=Scope.READ)


class VolumeFields(ReasonBody):
    """The changeable fields of a volume; omitted fields become empty."""

    scope = serializers.ChoiceField([reach.value for reach in VolumeScope], required=False, default="node")
    path = StrictCharField(required=False, default="", allow_blank=True, max_length=500)
    description = StrictCharField(required=False, default="", allow_blank=True, max_length=500)
    read_only = StrictBooleanField(required=False, default=False)  # type: ignore[assignment]
    quota_mib = StrictIntegerField(
        required=False, allow_null=True, default=None, min_value=1, max_value=MAX_QUOTA_MIB
    )
    pool = StrictCharField(
        required=False, allow_null=True, default=None, max_length=63, help_text="Id or name."
    )
    nodes = serializers.ListField(
        child=StrictCharField(max_length=63), required=False, default=list, max_length=1000
    )
    projects = serializers.ListField(
        child=StrictCharField(max_length=63), required=False, default=list, max_length=1000
    )


class VolumeChangeBody(VolumeFields, AffectedJobsFields):
    """A change of a volume."""


class VolumeBody(VolumeFields):
    """A new volume."""

    name = NameField()
    kind = serializers.ChoiceField([kind.value for kind in VolumeKind])


class Volume(ResponseSerializer):
    """A directory that jobs mount."""

    id = serializers.CharField(source="public_id")
    name = serializers.CharField(help_text="Name by which jobs request it.")
    kind = serializers.ChoiceField([kind.value for kind in VolumeKind])
    scope = serializers.ChoiceField(
        [reach.value for reach in VolumeScope],
        help_text="node: each node has its own content; shared: all nodes have the same content.",
    )
    path = serializers.CharField(
        allow_blank=True, help_text="Path on the nodes; blank for the path in the settings of each node."
    )
    description = serializers.CharField(allow_blank=True)
    read_only = serializers.BooleanField()  # type: ignore[assignment]
    quota_mib = serializers.IntegerField(
        allow_null=True,
        help_text="Limit per folder, where the file system enforces it; null if unlimited.",
    )
    pool = Reference(allow_null=True, help_text="Only nodes of this pool have it; null for all pools.")
    nodes = Reference(many=True, help_text="Only these nodes have it; empty for all.")
    projects = Reference(
        many=True, help_text="Visible projects that may use it, with their descendants; empty for all."
    )
    created_at = serializers.DateTimeField()


class VolumeUsage(ResponseSerializer):
    """The usage of the folder of a user or a project, as a node measured it last."""

    volume = Reference(allow_null=True, help_text="Null for the homes on the disk of the node.")
    owner = UserReference(allow_null=True, help_text="The user whose home it is.")
    project = Reference(allow_null=True, help_text="The project whose folder it is.")
    node = Reference(help_text="The node that measured it.")
    used_mib = serializers.IntegerField(help_text="0 until it is measured.")
    files = serializers.IntegerField(help_text="Files and folders.")
    limit_mib = serializers.IntegerField(allow_null=True, help_text="Null if unlimited.")
    enforced = serializers.BooleanField(help_text="The file system enforces the limit.")
    measured_at = serializers.DateTimeField(allow_null=True, help_text="Null until it is measured.")
    problem = serializers.CharField(
        allow_blank=True, help_text="Why the latest measurement has no numbers, or too low ones."
    )


class _BaseVolumeView(SignedInView):
    def build_input(self, name: str, kind: str) -> VolumeInput:
        """Return the input of the service, with names resolved to rows."""
        require_admin(self.user, "change volumes")
        body = self.body
        pools = self._get_rows("pool", NodePool.objects.all(), [body["pool"]] if body["pool"] else [])
        return VolumeInput(
            name=name,
            kind=VolumeKind(kind),
            scope=VolumeScope(body["scope"]),
            path=body["path"],
            description=body["description"],
            read_only=body["read_only"],
            quota_mib=body["quota_mib"],
            pool=pools[0] if pools else None,
            nodes=self._get_rows("nodes", visible_nodes(self.user), body["nodes"]),
            projects=self._get_rows("projects", visible_projects(self.user), body["projects"]),
        )

    @staticmethod
    def _get_rows(field: str, rows: QuerySet[Any], keys: list[str]) -> list[Any]:
        found, unknown = get_rows_by_key(rows, keys)
        if unknown is not None:
            raise InvalidRequest(fields={field: f"There is no {field.removesuffix('s')} called {unknown}."})
        return found


class VolumesView(_BaseVolumeView):
    @_read("volumes_list", "List volumes", response=[Volume])
    def get(self, request: Request) -> HttpResponse:
        return self.paginated_response(list_volumes(self.user), Volume.represent, Order("name"))

    @_admin(
        "volumes_create",
        "Declare a volume",
        body=VolumeBody,
        response=Volume,
        status=201,
        idempotent=True,
        detail="A node mounts only paths that its own settings allow (`allowed_mount_roots`).",
    )
    def post(self, request: Request) -> HttpResponse:
        def work() -> dict[str, Any]:
            words = self.build_input(self.body["name"], self.body["kind"])
            return Volume.represent(do_save_volume(self.user, words, reason=self.body["reason"]))

        return self.idempotent_response(work)


class VolumeView(_BaseVolumeView):
    @_read("volumes_get", "Get a volume", response=Volume)
    def get(self, request: Request, volume: str) -> HttpResponse:
        """A volume by id or name."""
        return self.json_response(Volume.represent(get_volume(self.user, volume)))

    @_admin(
        "volumes_put",
        "Change a volume",
        body=VolumeChangeBody,
        response=Volume,
        detail="Name and kind do not change. Running jobs keep the volume as it was at their start. Jobs of projects "
        "that lose access are held, cancelled or stopped, according to `queued_jobs` and `running_jobs`.",
    )
    def put(self, request: Request, volume: str) -> HttpResponse:
        row = get_volume(self.user, volume)
        words = self.build_input(row.name, row.kind)
        saved = do_save_volume(
            self.user, words, row, reason=self.body["reason"], choice=parse_job_choice(self.body)
        )
        return self.json_response(Volume.represent(saved))

    @_admin(
        "volumes_remove",
        "Delete a volume",
        response=None,
        status=204,
        error_statuses=[409],
        detail="Its files are kept. Rejected with `volume_in_use` while active jobs use it.",
    )
    def delete(self, request: Request, volume: str) -> HttpResponse:
        do_delete_volume(self.user, get_volume(self.user, volume))
        return self.no_content()


class StorageUsageView(SignedInView):
    @_read(
        "storage_usage_list",
        "List the usage of homes and project folders",
        response=[VolumeUsage],
        detail="Your homes and the folders of your projects, largest first; all for administrators. Nodes measure "
        "them every `storage_usage_interval_s`.",
    )
    def get(self, request: Request) -> HttpResponse:
        return self.paginated_response(
            list_usage(self.user), VolumeUsage.represent, Order("used_mib", descending=True)
        )
