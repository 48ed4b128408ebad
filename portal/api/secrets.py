"""REST: secrets of people and projects. A value goes in and never comes out."""

from __future__ import annotations

from django.http import HttpResponse
from rest_framework.request import Request

from portal.access import Policy, Verb, policy, require, visible_secrets
from portal.api.bodies import Closed, Text
from portal.api.cursors import Order
from portal.api.route import PageQuery, Route, operation, page_of
from portal.api.shapes import secrets as shapes
from portal.selectors.projects import project_for
from portal.services.secrets import do_remove_secret, do_save_secret
from portal.services.tokens import Scope
from portal.words.secrets import MAX_VALUE_BYTES


class ValueBody(Closed):
    """What a secret holds."""

    value = Text(max_length=MAX_VALUE_BYTES, help_text="Written once; no answer ever tells it.")


@policy(Policy.SIGNED_IN)
class SecretsRoute(Route):
    """One's own secrets."""

    @operation(
        "secrets_list",
        "List one's own secrets",
        tag="people",
        scope=Scope.READ,
        query=PageQuery,
        answer=page_of(shapes.Secret),
    )
    def get(self, request: Request) -> HttpResponse:
        """By name, without values."""
        return self.page(visible_secrets(self.person).filter(owner=self.person), shapes.secret, Order("name"))


@policy(Policy.SIGNED_IN)
class SecretRoute(Route):
    """One of one's own secrets."""

    @operation(
        "secrets_put",
        "Write a secret",
        tag="people",
        scope=Scope.ADMIN,
        body=ValueBody,
        answer=shapes.Secret,
        detail="Over the one of that name, if there is one. Jobs get the new value with their next attempt.",
    )
    def put(self, request: Request, secret: str) -> HttpResponse:
        """The secret, without its value."""
        return self.answer(
            shapes.secret(do_save_secret(self.person, self.person, secret, self.body["value"]))
        )

    @operation(
        "secrets_remove",
        "Forget a secret",
        tag="people",
        scope=Scope.ADMIN,
        answer=None,
        status=204,
        refusals=[404],
    )
    def delete(self, request: Request, secret: str) -> HttpResponse:
        """What runs keeps it; a job that names it fails to start."""
        do_remove_secret(self.person, self.person, secret)
        return self.done()


@policy(Policy.SIGNED_IN)
class ProjectSecretsRoute(Route):
    """The secrets of a project."""

    @operation(
        "project_secrets_list",
        "List a project's secrets",
        tag="projects",
        scope=Scope.READ,
        query=PageQuery,
        answer=page_of(shapes.Secret),
        refusals=[403, 404],
    )
    def get(self, request: Request, project: str) -> HttpResponse:
        """By name, without values; for those who may run jobs in it."""
        row = project_for(self.person, project)
        require(self.person, Verb.SUBMIT, row)
        return self.page(visible_secrets(self.person).filter(project=row), shapes.secret, Order("name"))


@policy(Policy.SIGNED_IN)
class ProjectSecretRoute(Route):
    """One secret of a project."""

    @operation(
        "project_secrets_put",
        "Write a secret of a project",
        tag="projects",
        scope=Scope.PROJECTS,
        body=ValueBody,
        answer=shapes.Secret,
        refusals=[404],
        detail="Managers write it; every job of the project may name it.",
    )
    def put(self, request: Request, project: str, secret: str) -> HttpResponse:
        """The secret, without its value."""
        row = project_for(self.person, project)
        return self.answer(shapes.secret(do_save_secret(self.person, row, secret, self.body["value"])))

    @operation(
        "project_secrets_remove",
        "Forget a secret of a project",
        tag="projects",
        scope=Scope.PROJECTS,
        answer=None,
        status=204,
        refusals=[404],
    )
    def delete(self, request: Request, project: str, secret: str) -> HttpResponse:
        """What runs keeps it; a job that names it fails to start."""
        do_remove_secret(self.person, project_for(self.person, project), secret)
        return self.done()
