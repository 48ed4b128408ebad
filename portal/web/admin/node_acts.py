"""What administrators ask of nodes themselves: another agent, a look at the machine, tidying up; for one or all."""

from __future__ import annotations

from django.contrib import messages
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.shortcuts import render
from django.urls import reverse
from django.views.decorators.http import require_GET, require_POST

from portal.access import Policy, policy, signed_in
from portal.errors import FairwayError, NotThere
from portal.models import Node, Rollout
from portal.services.node_acts import do_order, do_upgrade_all
from portal.words.node_acts import BY_ACTOR, NodeAct


@policy(Policy.ADMIN)
@require_POST
def order_act(request: HttpRequest, public_id: str) -> HttpResponse:
    """Asks for one act on a node and shows its steps as they finish."""
    node = Node.objects.filter(public_id=public_id).first()
    asked = request.POST.get("act", "")
    if node is None or asked not in {act.value for act in BY_ACTOR}:
        raise NotThere
    try:
        check = do_order(signed_in(request.user), node, NodeAct(asked))
    except FairwayError as refusal:
        messages.error(request, refusal.sentence)
        return HttpResponseRedirect(reverse("node", args=[public_id]))
    return HttpResponseRedirect(reverse("node-check", args=[public_id, check.public_id]))


@policy(Policy.ADMIN)
@require_POST
def upgrade_all(request: HttpRequest) -> HttpResponse:
    """Begins to upgrade every node that has another agent, and shows how far it has come."""
    try:
        rollout = do_upgrade_all(signed_in(request.user))
    except FairwayError as refusal:
        messages.error(request, refusal.sentence)
        return HttpResponseRedirect(reverse("cluster"))
    return HttpResponseRedirect(reverse("rollout", args=[rollout.public_id]))


@policy(Policy.ADMIN)
@require_GET
def rollout_page(request: HttpRequest, public_id: str) -> HttpResponse:
    """An upgrade of many nodes; the fragment asks again until it is over."""
    rollout = Rollout.objects.filter(public_id=public_id).first()
    if rollout is None:
        raise NotThere
    checks = rollout.checks.select_related("node").order_by("node__name")
    template = "admin/rollout_live.html" if request.headers.get("HX-Request") else "admin/rollout.html"
    return render(request, template, {"rollout": rollout, "checks": checks})
