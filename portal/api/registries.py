"""REST: logins to registries, for administrators. A password goes in and never comes out."""

from __future__ import annotations

from typing import Any

from django.db.models import Model
from django.http import HttpResponse
from rest_framework import serializers
from rest_framework.request import Request

from portal.access import Policy, policy
from portal.api.bodies import Closed, Text
from portal.api.cursors import Order
from portal.api.route import PageQuery, Route, operation, page_of
from portal.api.shapes.words import when
from portal.models import RegistryLogin
from portal.services.registries import (
    HOST_PATTERN,
    MAX_PASSWORD_BYTES,
    USERNAME_PATTERN,
    do_remove_login,
    do_save_login,
    login_of,
)
from portal.services.tokens import Scope


class LoginBody(Closed):
    """Who nodes say they are at a registry."""

    host = Text(
        max_length=255,
        pattern=HOST_PATTERN,
        message="Give its host as images name it, such as registry.example.org:5000.",
        help_text="As images name it, port included.",
    )
    username = Text(max_length=255, pattern=USERNAME_PATTERN, message="A name without spaces and colons.")
    password = Text(max_length=MAX_PASSWORD_BYTES, help_text="Or a token. Written once; no answer tells it.")


class Login(serializers.Serializer[Any]):
    """The login of a registry, without its password."""

    id = serializers.CharField()
    host = serializers.CharField(help_text="As images name it, port included.")
    username = serializers.CharField()
    changed_at = serializers.DateTimeField()
    changed_by = serializers.CharField()


@policy(Policy.ADMIN)
class RegistriesRoute(Route):
    """The logins that nodes use when they bring an image."""

    @operation(
        "registries_list",
        "List logins to registries",
        tag="cluster",
        scope=Scope.ADMIN,
        query=PageQuery,
        answer=page_of(Login),
    )
    def get(self, request: Request) -> HttpResponse:
        """By host, without passwords."""
        return self.page(RegistryLogin.objects.all(), _told, Order("host"))

    @operation(
        "registries_save",
        "Keep the login of a registry",
        tag="cluster",
        scope=Scope.ADMIN,
        body=LoginBody,
        answer=Login,
        detail="Over the one of that host, if there is one. Nodes use it for the next image that they bring.",
    )
    def post(self, request: Request) -> HttpResponse:
        """The login, without its password."""
        row = do_save_login(self.person, self.body["host"], self.body["username"], self.body["password"])
        return self.answer(_told(row))


@policy(Policy.ADMIN)
class RegistryRoute(Route):
    """The login of one registry."""

    @operation(
        "registries_remove",
        "Forget the login of a registry",
        tag="cluster",
        scope=Scope.ADMIN,
        answer=None,
        status=204,
        refusals=[404],
    )
    def delete(self, request: Request, registry: str) -> HttpResponse:
        """Images that nodes have brought already stay there."""
        do_remove_login(self.person, login_of(registry))
        return self.done()


def _told(row: Model) -> dict[str, Any]:
    assert isinstance(row, RegistryLogin)  # noqa: S101
    return {
        "id": row.public_id,
        "host": row.host,
        "username": row.username,
        "changed_at": when(row.changed_at),
        "changed_by": row.changed_by,
    }
