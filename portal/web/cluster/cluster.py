"""The cluster: a map of all GPUs with a text version, and a page for each node."""

from __future__ import annotations

from django.conf import settings
from django.core.paginator import Paginator
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render

from portal.access import AccessPolicy
from portal.models import AgentRollout, ClusterSettings, User
from portal.selectors.cluster.cluster_map import cluster_totals, map_boxes, matching_nodes
from portal.selectors.nodes.network_links import link_matrices
from portal.web.views import page, render_live

NODES_PER_PAGE = 100


@page(AccessPolicy.SIGNED_IN)
def cluster(request: HttpRequest, user: User) -> HttpResponse:
    search = request.GET.get("q", "").strip().lower()
    nodes = matching_nodes(user, search)
    totals = cluster_totals(nodes)
    shown = Paginator(range(totals.nodes), NODES_PER_PAGE).get_page(request.GET.get("page"))
    boxes, attention = map_boxes(user, nodes, shown.start_index(), shown.end_index())
    context = {
        "totals": totals,
        "boxes": boxes,
        "attention_needed": attention,
        "shown": shown,
        "search": search,
        "may_add": user.is_admin,
    }
    if user.is_admin:
        cluster_row = ClusterSettings.objects.filter(id=1).first()
        context |= {
            "cluster": cluster_row,
            "bundled_servers": settings.BUNDLED_SERVERS,
            "same_site": settings.SAME_SITE_WARNING,
            "behind": totals.outdated,
            "rollout": AgentRollout.objects.order_by("-id").first(),
        }
    return render_live(request, "cluster/page.html", "cluster/live.html", context)


@page(AccessPolicy.SIGNED_IN)
def network(request: HttpRequest, user: User) -> HttpResponse:
    """Show the measured bandwidth between the nodes of each pool."""
    return render(request, "nodes/network.html", {"matrices": link_matrices(user)})
