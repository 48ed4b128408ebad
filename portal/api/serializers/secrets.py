"""Serializers of secrets, without their values."""

from __future__ import annotations

from rest_framework import serializers

from portal.api.framework.responses import ResponseSerializer
from portal.api.serializers.references import Reference


class Secret(ResponseSerializer):
    """A secret, without its value."""

    id = serializers.CharField(source="public_id")
    name = serializers.CharField(help_text="Jobs refer to it by this name.")
    project = Reference(allow_null=True, help_text="null: a personal secret.")
    created_at = serializers.DateTimeField()
    changed_at = serializers.DateTimeField(help_text="When the value was last written.")
    changed_by = serializers.CharField()
