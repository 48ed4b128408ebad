"""References to rows, shared by many serializers."""

from __future__ import annotations

from typing import Any

from rest_framework import serializers

from portal.api.framework.responses import ResponseSerializer
from portal.api.framework.responses import timestamp as timestamp
from portal.models import User


class Reference(ResponseSerializer):
    """Public id and name of a row."""

    id = serializers.CharField(source="public_id")
    name = serializers.CharField()


class UserReference(ResponseSerializer):
    """Public id and names of a user."""

    id = serializers.CharField(source="public_id")
    username = serializers.CharField()
    full_name = serializers.CharField()


def reference(row: Any) -> dict[str, Any] | None:
    return Reference.represent(row) if row is not None else None


def user_reference(user: User) -> dict[str, Any]:
    return UserReference.represent(user)
