"""REST: secrets of users and projects; values are write-only."""

from __future__ import annotations

from collections.abc import Callable

from django.http import HttpResponse
from django.urls import URLPattern, path
from rest_framework import serializers
from rest_framework.request import Request

from portal.access import Permission, require_permission, visible_secrets
from portal.api.framework.pagination import Order
from portal.api.framework.request_parsing import StrictCharField, StrictSerializer
from portal.api.framework.responses import ResponseSerializer
from portal.api.framework.views import SignedInView, operation
from portal.api.serializers.references import Reference
from portal.domain.projects.secrets import MAX_VALUE_BYTES
from portal.models import Project, User
from portal.selectors.projects.projects import get_project
from portal.services.accounts.tokens import Scope
from portal.services.projects.secrets import do_delete_secret, do_save_secret


class SecretValueBody(StrictSerializer):
    """The value of a secret."""

    value = StrictCharField(max_length=MAX_VALUE_BYTES, help_text="Write-only: no response returns it.")


class Secret(ResponseSerializer):
    """A secret, without its value."""

    id = serializers.CharField(source="public_id")
    name = serializers.CharField(help_text="Name by which jobs refer to it.")
    project = Reference(allow_null=True, help_text="null for a personal secret.")
    created_at = serializers.DateTimeField()
    changed_at = serializers.DateTimeField(help_text="When the value was last written.")
    changed_by = serializers.CharField()


def _secret_routes(
    prefix: str,
    name: str,
    owner_label: str,
    of: str,
    detail: str,
    scope: Scope,
    get_owner: Callable[..., User | Project],
) -> list[URLPattern]:
    """Return the routes of the secrets of the user, or of the project that the path names.

    ``get_owner`` gets the user and the keys in the path.
    """

    class SecretsView(SignedInView):
        @operation(
            f"{name}_list", f"List {owner_label} secrets", tag="secrets", scope=Scope.READ, response=[Secret]
        )
        def get(self, request: Request, **keys: str) -> HttpResponse:
            """Secrets by name, without values; those of a project for users who may run jobs in it."""
            owner = get_owner(self.user, **keys)
            if isinstance(owner, Project):
                require_permission(self.user, Permission.SUBMIT, owner)
                rows = visible_secrets(self.user).filter(project=owner)
            else:
                rows = visible_secrets(self.user).filter(owner=owner)
            return self.paginated_response(rows, Secret.represent, Order("name"))

    class SecretView(SignedInView):
        @operation(
            f"{name}_put",
            f"Write a secret{of}",
            tag="secrets",
            scope=scope,
            body=SecretValueBody,
            response=Secret,
            detail=detail,
        )
        def put(self, request: Request, secret: str, **keys: str) -> HttpResponse:
            row = do_save_secret(self.user, get_owner(self.user, **keys), secret, self.body["value"])
            return self.json_response(Secret.represent(row))

        @operation(
            f"{name}_remove", f"Delete a secret{of}", tag="secrets", scope=scope, response=None, status=204
        )
        def delete(self, request: Request, secret: str, **keys: str) -> HttpResponse:
            """Running jobs keep the value; new starts of jobs that name the secret fail."""
            do_delete_secret(self.user, get_owner(self.user, **keys), secret)
            return self.no_content()

    return [
        path(f"{prefix}secrets/", SecretsView.as_view()),
        path(f"{prefix}secrets/<slug:secret>/", SecretView.as_view()),
    ]


ROUTES = [
    *_secret_routes(
        "",
        "secrets",
        "personal",
        "",
        "Creates or replaces the secret of this name. Jobs get the new value with their next attempt.",
        Scope.ADMIN,
        lambda user: user,
    ),
    *_secret_routes(
        "projects/<slug:project>/",
        "project_secrets",
        "a project's",
        " of a project",
        "For managers of the project. All jobs of the project can use the secret.",
        Scope.PROJECTS,
        lambda user, project: get_project(user, project),
    ),
]
