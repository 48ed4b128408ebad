"""The registries page: logins of nodes at registries; passwords are never shown."""

from __future__ import annotations

from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.utils.translation import gettext as _
from django.views.decorators.debug import sensitive_post_parameters

from portal.access import AccessPolicy
from portal.errors import InvalidRequest
from portal.models import RegistryLogin, User
from portal.services.environments.registries import do_delete_login, do_save_login, get_login
from portal.web.views import action, page, posted_values, refusals_as_messages, render_form


@page(AccessPolicy.ADMIN)
def registries_page(request: HttpRequest, user: User) -> HttpResponse:
    return _render_page(request, {})


@action(AccessPolicy.ADMIN)
@sensitive_post_parameters("password")
def save_registry(request: HttpRequest, user: User) -> HttpResponse:
    """Save a login, replacing the one of the same host."""
    values = posted_values(request, "host", "username")
    try:
        row = do_save_login(user, values["host"], values["username"], request.POST.get("password", ""))
    except InvalidRequest as error:
        return _render_page(request, values, error)
    messages.success(
        request,
        _("Nodes log in to {host} as {username} from now on.").format(host=row.host, username=row.username),
    )
    return redirect("registries")


@action(AccessPolicy.ADMIN)
def remove_registry(request: HttpRequest, user: User, public_id: str) -> HttpResponse:
    row = get_login(public_id)
    with refusals_as_messages(request):
        do_delete_login(user, row)
        messages.success(request, _("The login of {host} is deleted.").format(host=row.host))
    return redirect("registries")


def _render_page(
    request: HttpRequest, values: dict[str, str], refusal: InvalidRequest | None = None
) -> HttpResponse:
    context = {"logins": RegistryLogin.objects.order_by("host")}
    return render_form(request, "environments/registries.html", context, values, refusal)
