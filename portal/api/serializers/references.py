"""Serializers shared by many others: references to rows, and times."""

from __future__ import annotations

import datetime as dt
from typing import Any

from rest_framework import serializers

from portal.models import User


class Reference(serializers.Serializer[Any]):
    """Public id and name of a row."""

    id = serializers.CharField()
    name = serializers.CharField()


class UserReference(serializers.Serializer[Any]):
    """Public id and names of a user."""

    id = serializers.CharField()
    username = serializers.CharField()
    full_name = serializers.CharField()


def timestamp(at: dt.datetime | None) -> str | None:
    """Return RFC 3339 in UTC, or null."""
    return at.astimezone(dt.UTC).isoformat().replace("+00:00", "Z") if at else None


def reference(row: Any) -> dict[str, str] | None:
    return {"id": row.public_id, "name": row.name} if row is not None else None


def user_reference(user: User) -> dict[str, str]:
    return {"id": user.public_id, "username": user.username, "full_name": user.full_name}
