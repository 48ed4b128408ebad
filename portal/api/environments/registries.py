"""REST: registry logins, for administrators; passwords are write-only."""

from __future__ import annotations

from functools import partial

from django.http import HttpResponse
from rest_framework import serializers
from rest_framework.request import Request

from portal.api.framework.pagination import Order
from portal.api.framework.request_parsing import StrictCharField, StrictSerializer
from portal.api.framework.responses import ResponseSerializer
from portal.api.framework.views import AdminView, operation
from portal.models import RegistryLogin
from portal.services.accounts.tokens import Scope
from portal.services.environments.registries import (
    HOST_PATTERN,
    MAX_PASSWORD_BYTES,
    USERNAME_PATTERN,
    do_delete_login,
    do_save_login,
    get_login,
)

_admin = partial(operation, tag="cluster", scope=Scope.ADMIN)


class RegistryLoginBody(StrictSerializer):
    """The credentials of nodes at a registry."""

    host = StrictCharField(
        max_length=255,
        pattern=HOST_PATTERN,
        message="Enter the host as in image names, such as registry.example.org:5000.",
        help_text="As in image names, including the port.",
    )
    username = StrictCharField(
        max_length=255, pattern=USERNAME_PATTERN, message="A name without spaces and colons."
    )
    password = StrictCharField(max_length=MAX_PASSWORD_BYTES, help_text="Or a token. Write-only.")


class RegistryLoginDetail(ResponseSerializer):
    """A registry login without its password."""

    id = serializers.CharField(source="public_id")
    host = serializers.CharField(help_text="As in image names, including the port.")
    username = serializers.CharField()
    changed_at = serializers.DateTimeField()
    changed_by = serializers.CharField()


class RegistriesView(AdminView):
    @_admin("registries_list", "List logins to registries", response=[RegistryLoginDetail])
    def get(self, request: Request) -> HttpResponse:
        return self.paginated_response(
            RegistryLogin.objects.all(), RegistryLoginDetail.represent, Order("host")
        )

    @_admin(
        "registries_save",
        "Save the login of a registry",
        body=RegistryLoginBody,
        response=RegistryLoginDetail,
        detail="Replaces an existing login of this host. Nodes use it for the next image that they pull.",
    )
    def post(self, request: Request) -> HttpResponse:
        row = do_save_login(self.user, self.body["host"], self.body["username"], self.body["password"])
        return self.json_response(RegistryLoginDetail.represent(row))


class RegistryView(AdminView):
    @_admin("registries_remove", "Delete the login of a registry", response=None, status=204)
    def delete(self, request: Request, registry: str) -> HttpResponse:
        """Images that nodes have already pulled are kept."""
        do_delete_login(self.user, get_login(registry))
        return self.no_content()
