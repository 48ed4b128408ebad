"""Small pieces that many shapes share: names of rows, and times."""

from __future__ import annotations

import datetime as dt
from typing import Any

from rest_framework import serializers

from portal.models import User


class Reference(serializers.Serializer[Any]):
    """A row by its public id and its name."""

    id = serializers.CharField()
    name = serializers.CharField()


class UserReference(serializers.Serializer[Any]):
    """A person by public id and names."""

    id = serializers.CharField()
    username = serializers.CharField()
    full_name = serializers.CharField()


def timestamp(at: dt.datetime | None) -> str | None:
    """RFC 3339 in UTC, or null."""
    return at.astimezone(dt.UTC).isoformat().replace("+00:00", "Z") if at else None


def reference(row: Any) -> dict[str, str] | None:
    """A row by its public id and its name, or null."""
    return {"id": row.public_id, "name": row.name} if row is not None else None


def user_reference(user: User) -> dict[str, str]:
    """A person by public id and names."""
    return {"id": user.public_id, "username": user.username, "full_name": user.full_name}
