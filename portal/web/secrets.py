"""Secrets on the account page and on project pages; values are write-only."""

from __future__ import annotations

from collections.abc import Callable

from django.http import HttpRequest, HttpResponse
from django.urls import reverse
from django.views.decorators.debug import sensitive_post_parameters
from django.views.decorators.http import require_POST

from portal.access import AccessPolicy, access_policy, require_user
from portal.models import Project, User
from portal.selectors.projects.projects import get_project
from portal.services.projects.secrets import do_delete_secret, do_save_secret
from portal.web.actions import run_and_redirect


@access_policy(AccessPolicy.SIGNED_IN)
@sensitive_post_parameters("value")
@require_POST
def save_secret(request: HttpRequest, public_id: str = "") -> HttpResponse:
    """Write a secret of the user, or of the project with this id."""
    of = _secret_owner(request, public_id)
    name = request.POST.get("name", "").strip()
    value = request.POST.get("value", "").replace("\r\n", "\n")

    def save() -> str:
        do_save_secret(require_user(request.user), of, name, value)
        return f"The secret {name} is saved. Jobs that start from now on get it."

    return _run_and_redirect(request, of, save)


@access_policy(AccessPolicy.SIGNED_IN)
@require_POST
def remove_secret(request: HttpRequest, name: str, public_id: str = "") -> HttpResponse:
    of = _secret_owner(request, public_id)

    def remove() -> str:
        do_delete_secret(require_user(request.user), of, name)
        return f"The secret {name} is deleted. Jobs that use it will not start."

    return _run_and_redirect(request, of, remove)


def _secret_owner(request: HttpRequest, public_id: str) -> User | Project:
    user = require_user(request.user)
    return get_project(user, public_id) if public_id else user


def _run_and_redirect(request: HttpRequest, of: User | Project, act: Callable[[], str]) -> HttpResponse:
    to = reverse("project", args=[of.public_id]) if isinstance(of, Project) else reverse("account")
    return run_and_redirect(request, act, to)
