"""The topologies page: topologies, how many nodes have their labels, and their edit form."""

from __future__ import annotations

from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.utils.translation import gettext as _

from portal.access import AccessPolicy
from portal.errors import InvalidRequest
from portal.models import Topology, User
from portal.selectors.nodes.topologies import get_topology, list_topologies, topology_level_reader
from portal.services.nodes.topologies import do_delete_topology, do_save_topology
from portal.web.views import action, page, posted_values, refusals_as_messages, render_form


@page(AccessPolicy.SIGNED_IN)
def topologies_page(request: HttpRequest, user: User) -> HttpResponse:
    """List topologies; ``edit`` names the one shown in the form."""
    row = get_topology(user, request.GET["edit"]) if request.GET.get("edit") else None
    return _render_page(request, user, row, {"levels": "\n".join(row.levels)} if row else {})


@action(AccessPolicy.ADMIN)
def save_topology(request: HttpRequest, user: User) -> HttpResponse:
    """Create a topology, or change the levels of the one that ``row`` names."""
    row = get_topology(user, request.POST["row"]) if request.POST.get("row") else None
    values = posted_values(request, "name", "levels")
    try:
        saved = do_save_topology(user, values["name"], values["levels"].replace(",", "\n").split(), row)
    except InvalidRequest as error:
        return _render_page(request, user, row, values, error)
    messages.success(
        request, _("The topology {name} is saved. The next cycle uses it.").format(name=saved.name)
    )
    return redirect("topologies")


@action(AccessPolicy.ADMIN)
def remove_topology(request: HttpRequest, user: User, name: str) -> HttpResponse:
    """Remove a topology that no pending job refers to."""
    row = get_topology(user, name)
    with refusals_as_messages(request):
        do_delete_topology(user, row)
        messages.success(request, _("The topology {name} is removed.").format(name=row.name))
    return redirect("topologies")


def _render_page(
    request: HttpRequest,
    user: User,
    row: Topology | None,
    values: dict[str, str],
    refusal: InvalidRequest | None = None,
) -> HttpResponse:
    levels = topology_level_reader(user)
    context = {
        "topologies": [(each, levels(each)) for each in list_topologies(user)],
        "editing": row,
        "may_edit": user.is_admin,
    }
    return render_form(request, "nodes/topologies.html", context, values, refusal)
