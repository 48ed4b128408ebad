"""Small pieces that many shapes share: names of rows, and times."""

from __future__ import annotations

import datetime as dt
from typing import Any

from rest_framework import serializers

from portal.models import User


class Named(serializers.Serializer[Any]):
    """A row by its public id and its name."""

    id = serializers.CharField()
    name = serializers.CharField()


class PersonName(serializers.Serializer[Any]):
    """A person by public id and names."""

    id = serializers.CharField()
    username = serializers.CharField()
    full_name = serializers.CharField()


def when(at: dt.datetime | None) -> str | None:
    """RFC 3339 in UTC, or null."""
    return at.astimezone(dt.UTC).isoformat().replace("+00:00", "Z") if at else None


def named(row: Any) -> dict[str, str] | None:
    """A row by its public id and its name, or null."""
    return {"id": row.public_id, "name": row.name} if row is not None else None


def person_name(user: User) -> dict[str, str]:
    """A person by public id and names."""
    return {"id": user.public_id, "username": user.username, "full_name": user.full_name}
