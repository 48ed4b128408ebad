"""The page of topologies: the fabrics of the cluster, how far the nodes' labels fill them in, and their edit."""

from __future__ import annotations

from django.contrib import messages
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.shortcuts import render
from django.urls import reverse
from django.views.decorators.http import require_POST, require_safe

from portal.access import Policy, policy, signed_in
from portal.errors import Invalid
from portal.models import Topology
from portal.selectors.topologies import levels_of, topologies_for, topology_for
from portal.services.topologies import do_remove_topology, do_save_topology
from portal.web.acts import act_and_return


@policy(Policy.SIGNED_IN)
@require_safe
def topologies_page(request: HttpRequest) -> HttpResponse:
    """All of them; ``edit`` names the one whose levels stand in the form."""
    row = topology_for(request.user, request.GET["edit"]) if request.GET.get("edit") else None
    return _render(request, row, {"levels": "\n".join(row.levels)} if row else {})


@policy(Policy.ADMIN)
@require_POST
def save_topology(request: HttpRequest) -> HttpResponse:
    """Adds one, or gives the one that ``row`` names other levels."""
    row = topology_for(request.user, request.POST["row"]) if request.POST.get("row") else None
    values = {key: request.POST.get(key, "").strip() for key in ("name", "levels")}
    levels = values["levels"].replace(",", "\n").split()
    try:
        saved = do_save_topology(signed_in(request.user), values["name"], levels, row)
    except Invalid as refusal:
        return _render(request, row, values, problems=refusal.fields, status=400)
    messages.success(request, f"The topology {saved.name} is saved. The next cycle places by it.")
    return HttpResponseRedirect(reverse("topologies"))


@policy(Policy.ADMIN)
@require_POST
def remove_topology(request: HttpRequest, name: str) -> HttpResponse:
    """Forgets one that no waiting job asks for."""
    row = topology_for(request.user, name)

    def remove() -> str:
        do_remove_topology(signed_in(request.user), row)
        return f"The topology {row.name} is removed."

    return act_and_return(request, remove, reverse("topologies"))


# -- inside ----------------------------------------------------------------------------------------


def _render(
    request: HttpRequest,
    row: Topology | None,
    values: dict[str, str],
    *,
    problems: dict[str, str] | None = None,
    status: int = 200,
) -> HttpResponse:
    levels = levels_of(request.user)
    context = {
        "topologies": [(each, levels(each)) for each in topologies_for(request.user)],
        "editing": row,
        "values": values,
        "problems": problems or {},
        "may_edit": signed_in(request.user).is_admin,
    }
    return render(request, "admin/topologies.html", context, status=status)
