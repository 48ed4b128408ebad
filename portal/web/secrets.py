"""Secrets on the account page and on project pages; values are write-only."""

from __future__ import annotations

from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.views.decorators.debug import sensitive_post_parameters

from portal.access import AccessPolicy
from portal.models import User
from portal.selectors.projects.projects import get_project
from portal.services.projects.secrets import do_delete_secret, do_save_secret
from portal.web.views import action, refusals_as_messages


@action(AccessPolicy.SIGNED_IN)
@sensitive_post_parameters("value")
def save_secret(request: HttpRequest, user: User, public_id: str = "") -> HttpResponse:
    """Write a secret of the user, or of the project with this id."""
    of = get_project(user, public_id) if public_id else user
    name = request.POST.get("name", "").strip()
    value = request.POST.get("value", "").replace("\r\n", "\n")
    with refusals_as_messages(request):
        do_save_secret(user, of, name, value)
        messages.success(request, f"The secret {name} is saved. Jobs that start from now on get it.")
    return redirect("project", public_id) if public_id else redirect("account")


@action(AccessPolicy.SIGNED_IN)
def remove_secret(request: HttpRequest, user: User, name: str, public_id: str = "") -> HttpResponse:
    of = get_project(user, public_id) if public_id else user
    with refusals_as_messages(request):
        do_delete_secret(user, of, name)
        messages.success(request, f"The secret {name} is deleted. Jobs that use it will not start.")
    return redirect("project", public_id) if public_id else redirect("account")
