"""The registries page: logins of nodes at registries; passwords are never shown."""

from __future__ import annotations

from django.contrib import messages
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.shortcuts import render
from django.urls import reverse
from django.views.decorators.debug import sensitive_post_parameters
from django.views.decorators.http import require_POST, require_safe

from portal.access import AccessPolicy, access_policy, require_user
from portal.errors import InvalidRequest
from portal.models import RegistryLogin
from portal.services.images.registries import do_delete_login, do_save_login, get_login
from portal.web.actions import run_and_redirect


@access_policy(AccessPolicy.ADMIN)
@require_safe
def registries_page(request: HttpRequest) -> HttpResponse:
    return _render_page(request, {})


@access_policy(AccessPolicy.ADMIN)
@sensitive_post_parameters("password")
@require_POST
def save_registry(request: HttpRequest) -> HttpResponse:
    """Save a login, replacing the one of the same host."""
    values = {key: request.POST.get(key, "").strip() for key in ("host", "username")}
    password = request.POST.get("password", "")
    try:
        row = do_save_login(require_user(request.user), values["host"], values["username"], password)
    except InvalidRequest as refusal:
        return _render_page(request, values, problems=refusal.fields, status=400)
    messages.success(request, f"Nodes log in to {row.host} as {row.username} from now on.")
    return HttpResponseRedirect(reverse("registries"))


@access_policy(AccessPolicy.ADMIN)
@require_POST
def remove_registry(request: HttpRequest, public_id: str) -> HttpResponse:
    row = get_login(public_id)

    def remove() -> str:
        host = row.host
        do_delete_login(require_user(request.user), row)
        return f"The login of {host} is deleted."

    return run_and_redirect(request, remove, reverse("registries"))


def _render_page(
    request: HttpRequest, values: dict[str, str], *, problems: dict[str, str] | None = None, status: int = 200
) -> HttpResponse:
    context = {
        "logins": RegistryLogin.objects.order_by("host"),
        "values": values,
        "problems": problems or {},
    }
    return render(request, "admin/registries.html", context, status=status)
