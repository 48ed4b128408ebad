"""Operations of administrators on one or all nodes: upgrade the agent, check, collect garbage."""

from __future__ import annotations

from django.contrib import messages
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.shortcuts import render
from django.urls import reverse
from django.views.decorators.http import require_GET, require_POST

from portal.access import AccessPolicy, access_policy, require_user
from portal.domain.node_operations import CONTROL_CHANNEL_OPERATIONS, OperationKind
from portal.errors import FairwayError, NotFound
from portal.models import AgentRollout, Node
from portal.services.nodes.operations import do_request_operation, do_upgrade_all


@access_policy(AccessPolicy.ADMIN)
@require_POST
def start_operation(request: HttpRequest, public_id: str) -> HttpResponse:
    """Start an operation on a node and show its steps as they finish."""
    node = Node.objects.filter(public_id=public_id).first()
    kind = request.POST.get("act", "")
    if node is None or kind not in {act.value for act in CONTROL_CHANNEL_OPERATIONS}:
        raise NotFound
    try:
        check = do_request_operation(require_user(request.user), node, OperationKind(kind))
    except FairwayError as refusal:
        messages.error(request, refusal.message)
        return HttpResponseRedirect(reverse("node", args=[public_id]))
    return HttpResponseRedirect(reverse("node-operation", args=[public_id, check.public_id]))


@access_policy(AccessPolicy.ADMIN)
@require_POST
def upgrade_all(request: HttpRequest) -> HttpResponse:
    """Start to upgrade every node with another agent version, and show the progress."""
    try:
        rollout = do_upgrade_all(require_user(request.user))
    except FairwayError as refusal:
        messages.error(request, refusal.message)
        return HttpResponseRedirect(reverse("cluster"))
    return HttpResponseRedirect(reverse("rollout", args=[rollout.public_id]))


@access_policy(AccessPolicy.ADMIN)
@require_GET
def rollout_page(request: HttpRequest, public_id: str) -> HttpResponse:
    """Show a rollout; the fragment polls until it is complete."""
    rollout = AgentRollout.objects.filter(public_id=public_id).first()
    if rollout is None:
        raise NotFound
    checks = rollout.operations.select_related("node").order_by("node__name")
    template = (
        "admin/agent_rollout_live.html" if request.headers.get("HX-Request") else "admin/agent_rollout.html"
    )
    return render(request, template, {"rollout": rollout, "checks": checks})
