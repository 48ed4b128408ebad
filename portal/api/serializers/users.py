"""Serializers of the current user and their tokens."""

from __future__ import annotations

from dataclasses import dataclass

from rest_framework import serializers

from portal.api.framework.responses import ResponseSerializer
from portal.api.serializers.references import Reference
from portal.domain.states import Role
from portal.models import ApiToken, Project, User
from portal.services.accounts.tokens import Scope

SCOPES = [scope.value for scope in Scope]
ROLES = [role.value for role in Role]


@dataclass(frozen=True)
class Authentication:
    """What the current authentication of a user permits: the context of ``CurrentUser``."""

    projects: list[Project]
    roles: dict[int, Role]
    token: ApiToken | None


class UserProject(Reference):
    """A project and the effective role in it."""

    role = serializers.ChoiceField(ROLES, allow_null=True)

    @staticmethod
    def get_role(row: Project, context: Authentication) -> Role | None:
        return context.roles.get(row.pk)


class CurrentUser(ResponseSerializer):
    """The current user."""

    id = serializers.CharField(source="public_id")
    username = serializers.CharField()
    full_name = serializers.CharField()
    email = serializers.CharField()
    is_admin = serializers.BooleanField()
    uid = serializers.IntegerField()
    gid = serializers.IntegerField()
    timezone = serializers.CharField()
    projects = UserProject(many=True, source="context.projects")
    scopes = serializers.ListField(child=serializers.ChoiceField(SCOPES))
    token = serializers.CharField(
        allow_null=True,
        source="context.token.public_id",
        help_text="Id of the token of this request; null for a session.",
    )

    @staticmethod
    def get_scopes(row: User, context: Authentication) -> list[str]:
        return context.token.scopes if context.token else SCOPES


class Token(ResponseSerializer):
    """A token without its secret."""

    id = serializers.CharField(source="public_id")
    name = serializers.CharField()
    scopes = serializers.ListField(child=serializers.ChoiceField(SCOPES))
    created_at = serializers.DateTimeField()
    expires_at = serializers.DateTimeField()
    last_used_at = serializers.DateTimeField(allow_null=True)
    revoked_at = serializers.DateTimeField(allow_null=True)


class NewToken(Token):
    """A new token with its text, which no other response contains."""

    token = serializers.CharField(source="context")
