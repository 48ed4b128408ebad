"""The topologies page: topologies, how many nodes have their labels, and their edit form."""

from __future__ import annotations

from django.contrib import messages
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.shortcuts import render
from django.urls import reverse
from django.views.decorators.http import require_POST, require_safe

from portal.access import AccessPolicy, access_policy, require_user
from portal.errors import InvalidRequest
from portal.models import Topology
from portal.selectors.nodes.topologies import get_topology, list_topologies, topology_level_reader
from portal.services.nodes.topologies import do_delete_topology, do_save_topology
from portal.web.actions import run_and_redirect


@access_policy(AccessPolicy.SIGNED_IN)
@require_safe
def topologies_page(request: HttpRequest) -> HttpResponse:
    """List topologies; ``edit`` names the one shown in the form."""
    row = get_topology(request.user, request.GET["edit"]) if request.GET.get("edit") else None
    return _render_page(request, row, {"levels": "\n".join(row.levels)} if row else {})


@access_policy(AccessPolicy.ADMIN)
@require_POST
def save_topology(request: HttpRequest) -> HttpResponse:
    """Create a topology, or change the levels of the one that ``row`` names."""
    row = get_topology(request.user, request.POST["row"]) if request.POST.get("row") else None
    values = {key: request.POST.get(key, "").strip() for key in ("name", "levels")}
    levels = values["levels"].replace(",", "\n").split()
    try:
        saved = do_save_topology(require_user(request.user), values["name"], levels, row)
    except InvalidRequest as refusal:
        return _render_page(request, row, values, problems=refusal.fields, status=400)
    messages.success(request, f"The topology {saved.name} is saved. The next cycle uses it.")
    return HttpResponseRedirect(reverse("topologies"))


@access_policy(AccessPolicy.ADMIN)
@require_POST
def remove_topology(request: HttpRequest, name: str) -> HttpResponse:
    """Remove a topology that no pending job refers to."""
    row = get_topology(request.user, name)

    def remove() -> str:
        do_delete_topology(require_user(request.user), row)
        return f"The topology {row.name} is removed."

    return run_and_redirect(request, remove, reverse("topologies"))


# -- internal --------------------------------------------------------------------------------------


def _render_page(
    request: HttpRequest,
    row: Topology | None,
    values: dict[str, str],
    *,
    problems: dict[str, str] | None = None,
    status: int = 200,
) -> HttpResponse:
    levels = topology_level_reader(request.user)
    context = {
        "topologies": [(each, levels(each)) for each in list_topologies(request.user)],
        "editing": row,
        "values": values,
        "problems": problems or {},
        "may_edit": require_user(request.user).is_admin,
    }
    return render(request, "admin/topologies.html", context, status=status)
