"""Serializers of volumes."""

from __future__ import annotations

from typing import Any

from rest_framework import serializers

from portal.api.serializers.references import Reference, reference, timestamp
from portal.domain.volumes import VolumeKind, VolumeScope
from portal.models import Volume as VolumeRow


class Volume(serializers.Serializer[Any]):
    """A directory that jobs mount."""

    id = serializers.CharField()
    name = serializers.CharField(help_text="Jobs ask by it.")
    kind = serializers.ChoiceField([kind.value for kind in VolumeKind])
    scope = serializers.ChoiceField(
        [reach.value for reach in VolumeScope],
        help_text="node: each node has its own content; shared: all the same.",
    )
    path = serializers.CharField(allow_blank=True, help_text="On the nodes; blank: their settings say where.")
    description = serializers.CharField(allow_blank=True)
    read_only = serializers.BooleanField()  # type: ignore[assignment]
    quota_mib = serializers.IntegerField(
        allow_null=True,
        help_text="What one folder may hold, where the file system sees to it; null: no limit.",
    )
    pool = Reference(allow_null=True, help_text="null: any.")
    nodes = Reference(many=True, help_text="Only these have it; empty: all.")
    projects = Reference(
        many=True, help_text="Only these, and those below them, may use it, of those you may see; empty: all."
    )
    created_at = serializers.DateTimeField()


def volume(row: VolumeRow) -> dict[str, Any]:
    keys = ("name", "kind", "scope", "path", "description", "read_only", "quota_mib")
    return {
        "id": row.public_id,
        **{key: getattr(row, key) for key in keys},
        "pool": reference(row.pool),
        "nodes": [reference(node) for node in row.nodes.all()],
        "projects": [reference(project) for project in row.projects.all()],
        "created_at": timestamp(row.created_at),
    }
