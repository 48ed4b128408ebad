"""Serializers of the current user and their tokens."""

from __future__ import annotations

from typing import Any

from rest_framework import serializers

from portal.api.serializers.references import Reference, reference, timestamp
from portal.domain.states import Role
from portal.models import ApiToken, Project, User
from portal.services.accounts.tokens import Scope

SCOPES = [scope.value for scope in Scope]
ROLES = [role.value for role in Role]


class UserProject(Reference):
    """A project and the effective role in it."""

    role = serializers.ChoiceField(ROLES, allow_null=True)


class CurrentUser(serializers.Serializer[Any]):
    """The current user."""

    id = serializers.CharField()
    username = serializers.CharField()
    full_name = serializers.CharField()
    email = serializers.CharField()
    is_admin = serializers.BooleanField()
    uid = serializers.IntegerField()
    gid = serializers.IntegerField()
    timezone = serializers.CharField()
    projects = UserProject(many=True)
    scopes = serializers.ListField(child=serializers.ChoiceField(SCOPES))
    token = serializers.CharField(allow_null=True, help_text="Id of the token in use; null for a session.")


class Token(serializers.Serializer[Any]):
    """A token without its secret."""

    id = serializers.CharField()
    name = serializers.CharField()
    scopes = serializers.ListField(child=serializers.ChoiceField(SCOPES))
    created_at = serializers.DateTimeField()
    expires_at = serializers.DateTimeField()
    last_used_at = serializers.DateTimeField(allow_null=True)
    revoked_at = serializers.DateTimeField(allow_null=True)


class NewToken(Token):
    """A token with its text, which is shown only once."""

    token = serializers.CharField()


def current_user(
    user: User, projects: list[Project], roles: dict[int, Role], token: ApiToken | None
) -> dict[str, Any]:
    """Return the user, their projects, and what this authentication permits."""
    return {
        "id": user.public_id,
        "username": user.username,
        "full_name": user.full_name,
        "email": user.email,
        "is_admin": user.is_admin,
        "uid": user.uid,
        "gid": user.gid,
        "timezone": user.timezone,
        "projects": [{**(reference(row) or {}), "role": roles.get(row.pk)} for row in projects],
        "scopes": token.scopes if token else SCOPES,
        "token": token.public_id if token else None,
    }


def token(row: ApiToken) -> dict[str, Any]:
    return {
        "id": row.public_id,
        "name": row.name,
        "scopes": row.scopes,
        "created_at": timestamp(row.created_at),
        "expires_at": timestamp(row.expires_at),
        "last_used_at": timestamp(row.last_used_at),
        "revoked_at": timestamp(row.revoked_at),
    }
