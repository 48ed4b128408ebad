"""References to rows, shared by many serializers."""

from __future__ import annotations

from rest_framework import serializers

from portal.api.framework.responses import ResponseSerializer


class Reference(ResponseSerializer):
    """Public id and name of a row."""

    id = serializers.CharField(source="public_id")
    name = serializers.CharField()


class UserReference(ResponseSerializer):
    """Public id and names of a user."""

    id = serializers.CharField(source="public_id")
    username = serializers.CharField()
    full_name = serializers.CharField()
