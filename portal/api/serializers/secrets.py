"""Serializers of secrets, without their values."""

from __future__ import annotations

from typing import Any

from rest_framework import serializers

from portal.api.serializers.references import Reference, reference, timestamp
from portal.models import Secret as SecretRow


class Secret(serializers.Serializer[Any]):
    """A secret, without its value."""

    id = serializers.CharField()
    name = serializers.CharField(help_text="Jobs ask by it.")
    project = Reference(allow_null=True, help_text="null: one's own.")
    created_at = serializers.DateTimeField()
    changed_at = serializers.DateTimeField(help_text="When its value was last written.")
    changed_by = serializers.CharField()


def secret(row: SecretRow) -> dict[str, Any]:
    return {
        "id": row.public_id,
        "name": row.name,
        "project": reference(row.project),
        "created_at": timestamp(row.created_at),
        "changed_at": timestamp(row.changed_at),
        "changed_by": row.changed_by,
    }
