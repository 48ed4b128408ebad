"""REST: secrets of users and projects; values are write-only."""

from __future__ import annotations

from django.http import HttpResponse
from rest_framework.request import Request

from portal.access import AccessPolicy, Permission, access_policy, require_permission, visible_secrets
from portal.api.framework.pagination import Order
from portal.api.framework.request_parsing import StrictCharField, StrictSerializer
from portal.api.framework.views import ApiView, ListQuery, list_schema, operation
from portal.api.serializers.secrets import Secret
from portal.domain.secrets import MAX_VALUE_BYTES
from portal.selectors.projects.projects import get_project
from portal.services.accounts.tokens import Scope
from portal.services.projects.secrets import do_delete_secret, do_save_secret


class SecretValueBody(StrictSerializer):
    """The value of a secret."""

    value = StrictCharField(max_length=MAX_VALUE_BYTES, help_text="Write-only: no response returns it.")


@access_policy(AccessPolicy.SIGNED_IN)
class SecretsView(ApiView):
    @operation(
        "secrets_list",
        "List personal secrets",
        tag="people",
        scope=Scope.READ,
        query=ListQuery,
        response=list_schema(Secret),
    )
    def get(self, request: Request) -> HttpResponse:
        """Secrets of the user by name, without values."""
        return self.paginated_response(
            visible_secrets(self.user).filter(owner=self.user), Secret.represent, Order("name")
        )


@access_policy(AccessPolicy.SIGNED_IN)
class SecretView(ApiView):
    @operation(
        "secrets_put",
        "Write a secret",
        tag="people",
        scope=Scope.ADMIN,
        body=SecretValueBody,
        response=Secret,
        detail="Replaces a secret of that name. Jobs get the new value with their next attempt.",
    )
    def put(self, request: Request, secret: str) -> HttpResponse:
        """The secret, without its value."""
        row = do_save_secret(self.user, self.user, secret, self.body["value"])
        return self.json_response(Secret.represent(row))

    @operation(
        "secrets_remove",
        "Delete a secret",
        tag="people",
        scope=Scope.ADMIN,
        response=None,
        status=204,
    )
    def delete(self, request: Request, secret: str) -> HttpResponse:
        """Running jobs keep the value; new starts of jobs that name the secret fail."""
        do_delete_secret(self.user, self.user, secret)
        return self.no_content()


@access_policy(AccessPolicy.SIGNED_IN)
class ProjectSecretsView(ApiView):
    @operation(
        "project_secrets_list",
        "List a project's secrets",
        tag="projects",
        scope=Scope.READ,
        query=ListQuery,
        response=list_schema(Secret),
    )
    def get(self, request: Request, project: str) -> HttpResponse:
        """Secrets by name, without values; for users who may run jobs in the project."""
        row = get_project(self.user, project)
        require_permission(self.user, Permission.SUBMIT, row)
        return self.paginated_response(
            visible_secrets(self.user).filter(project=row), Secret.represent, Order("name")
        )


@access_policy(AccessPolicy.SIGNED_IN)
class ProjectSecretView(ApiView):
    @operation(
        "project_secrets_put",
        "Write a secret of a project",
        tag="projects",
        scope=Scope.PROJECTS,
        body=SecretValueBody,
        response=Secret,
        detail="For managers of the project; every job of the project may use it.",
    )
    def put(self, request: Request, project: str, secret: str) -> HttpResponse:
        """The secret, without its value."""
        row = do_save_secret(self.user, get_project(self.user, project), secret, self.body["value"])
        return self.json_response(Secret.represent(row))

    @operation(
        "project_secrets_remove",
        "Delete a secret of a project",
        tag="projects",
        scope=Scope.PROJECTS,
        response=None,
        status=204,
    )
    def delete(self, request: Request, project: str, secret: str) -> HttpResponse:
        """Running jobs keep the value; new starts of jobs that name the secret fail."""
        do_delete_secret(self.user, get_project(self.user, project), secret)
        return self.no_content()
