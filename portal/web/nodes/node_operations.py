"""Actions of administrators on nodes, GPUs and pools: operations, states, labels, networks; and agent rollouts."""

from __future__ import annotations

from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.urls import reverse
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from portal.access import AccessPolicy
from portal.domain.nodes.gang_fabric import GangFabric
from portal.domain.nodes.node_operations import CONTROL_CHANNEL_OPERATIONS, OperationKind
from portal.domain.states import NodeState
from portal.errors import InvalidRequest, NotFound
from portal.models import AgentRollout, Gpu, Node, NodeOperation, NodePool, User
from portal.services.nodes import nodes
from portal.services.nodes.gang_fabric import do_set_gang_fabric, do_set_interface
from portal.services.nodes.gpus import do_return_gpu_to_service
from portal.services.nodes.nodes import do_uncordon_node
from portal.services.nodes.operations import do_request_operation, do_upgrade_all
from portal.services.nodes.quarantine import do_clear_node_quarantine
from portal.services.nodes.topologies import do_set_labels
from portal.web.nodes.node_page import node_page
from portal.web.views import action, find_row, page, refusals_as_messages, render_live

STATES = {"cordon": NodeState.CORDONED, "retire": NodeState.RETIRED}
"""New state of a node, by the value of the button; ``drains`` has its own page."""


@action(AccessPolicy.ADMIN)
def start_operation(request: HttpRequest, user: User, public_id: str) -> HttpResponse:
    """Start an operation on a node and show its steps as they finish."""
    node = find_row(Node.objects, public_id=public_id)
    kind = request.POST.get("act", "")
    if kind not in {act.value for act in CONTROL_CHANNEL_OPERATIONS}:
        raise NotFound
    to = ["node", public_id]
    with refusals_as_messages(request):
        check = do_request_operation(user, node, OperationKind(kind))
        to = ["node-operation", public_id, check.public_id]
    return redirect(*to)


@page(AccessPolicy.ADMIN)
def node_operation(request: HttpRequest, user: User, public_id: str, check_id: str) -> HttpResponse:
    """Show the finished steps of an operation; the fragment polls until it is complete."""
    rows = NodeOperation.objects.select_related("node")
    check = find_row(rows, public_id=check_id, node__public_id=public_id)
    context = {"check": check, "node": check.node}
    return render_live(request, "nodes/node_operation.html", "nodes/node_operation_steps.html", context)


@action(AccessPolicy.ADMIN)
def upgrade_all(request: HttpRequest, user: User) -> HttpResponse:
    """Start to upgrade every node with another agent version, and show the progress."""
    to = ["cluster"]
    with refusals_as_messages(request):
        to = ["rollout", do_upgrade_all(user).public_id]
    return redirect(*to)


@page(AccessPolicy.ADMIN)
def rollout_page(request: HttpRequest, user: User, public_id: str) -> HttpResponse:
    """Show a rollout; the fragment polls until it is complete."""
    rollout = find_row(AgentRollout.objects, public_id=public_id)
    checks = rollout.operations.select_related("node").order_by("node__name")
    context = {"rollout": rollout, "checks": checks}
    return render_live(request, "nodes/agent_rollout.html", "nodes/agent_rollout_live.html", context)


@action(AccessPolicy.ADMIN)
def return_gpu_to_service(request: HttpRequest, user: User, public_id: str, uuid: str) -> HttpResponse:
    gpu = find_row(Gpu.objects, node__public_id=public_id, uuid=uuid)
    do_return_gpu_to_service(user, gpu)
    messages.success(
        request,
        _("GPU {index} accepts jobs again.").format(index=gpu.index)
        if gpu.present
        else _("The GPU is removed."),
    )
    return redirect("node", public_id)


@action(AccessPolicy.ADMIN)
def set_node_state(request: HttpRequest, user: User, public_id: str) -> HttpResponse:
    """Cordon, fence, retire or uncordon a node, or clear its quarantine."""
    node = find_row(Node.objects, public_id=public_id)
    act, reason = request.POST.get("act", ""), request.POST.get("reason", "").strip()
    if act in ("uncordon", "force-uncordon") and reason == node.state_reason:
        reason = ""  # the reason explained why the node was out of service
    answer = redirect("cluster") if act == "retire" else redirect("node", public_id)
    with refusals_as_messages(request):
        if act == "uncordon":
            check = do_uncordon_node(user, node, reason=reason)
            return redirect("node-operation", public_id, check.public_id) if check else answer
        messages.success(request, _change_state(user, node, act, reason))
    return answer


def _change_state(user: User, node: Node, act: str, reason: str) -> str:
    """Do what the button ``act`` says, and return the message about it."""
    if act == "force-uncordon":
        do_uncordon_node(user, node, reason=reason, force=True)
        return _("{name} is now ready.").format(name=node.name)
    if act == "fence":
        ended = nodes.do_fence_node(user, node, reason=reason)
        return fenced_message(node, ended)
    if act == "clear-quarantine":
        do_clear_node_quarantine(user, node, reason=reason)
        return _("The quarantine of {name} is cleared.").format(name=node.name)
    if act not in STATES:
        raise NotFound
    nodes.do_set_node_state(user, node, STATES[act], reason=reason)
    return _("{name} is now {state}.").format(name=node.name, state=_(STATES[act].value))


def fenced_message(node: Node, ended: int) -> str:
    return ngettext(
        "{name} is fenced; {count} task ended and its GPUs are free.",
        "{name} is fenced; {count} tasks ended and their GPUs are free.",
        ended,
    ).format(name=node.name, count=ended)


@action(AccessPolicy.ADMIN)
def set_labels(request: HttpRequest, user: User, public_id: str) -> HttpResponse:
    """Replace the labels of a node by the posted ones, one key=value per line."""
    node, text = find_row(Node.objects, public_id=public_id), request.POST.get("labels", "")
    try:
        do_set_labels(user, node, parse_labels(text))
    except InvalidRequest as error:
        messages.error(request, error.message)
        return node_page(request, user, node, typed_labels=text, status=400)
    messages.success(
        request, _("The labels of {name} are saved. The next cycle uses them.").format(name=node.name)
    )
    return redirect("node", public_id)


def parse_labels(text: str) -> dict[str, str]:
    """Parse lines of key=value. Raise InvalidRequest for a malformed line and for a duplicate key."""
    found: dict[str, str] = {}
    for line in filter(None, map(str.strip, text.splitlines())):
        key, sign, value = (part.strip() for part in line.partition("="))
        if not sign:
            raise InvalidRequest(fields={"labels": _("“{line}” is not key=value.").format(line=line[:40])})
        if key in found:
            raise InvalidRequest(fields={"labels": _("{key} occurs twice.").format(key=key[:40])})
        found[key] = value
    return found


@action(AccessPolicy.ADMIN)
def set_interface(request: HttpRequest, user: User, public_id: str) -> HttpResponse:
    node = find_row(Node.objects, _("There is no such node."), public_id=public_id)
    name = request.POST.get("interface", "").strip()
    with refusals_as_messages(request):
        do_set_interface(user, node, name)
        through = name or _("the interface that its agent detects")
        messages.success(
            request,
            _("Gangs that start from now on reach {name} through {through}.").format(
                name=node.name, through=through
            ),
        )
    return redirect("node", public_id)


@action(AccessPolicy.ADMIN)
def set_pool_network(request: HttpRequest, user: User, public_id: str) -> HttpResponse:
    """Set whether gangs may use the host network, with which network, fabric devices and adapters."""
    pool = find_row(NodePool.objects, _("There is no such pool."), public_id=public_id)
    allowed = "allow_host_network" in request.POST
    fabric = GangFabric(
        interface=request.POST.get("fabric_interface", "").strip(),
        network=request.POST.get("fabric_network", "").strip(),
        devices=tuple(request.POST.get("fabric_devices", "").split()),
        adapters=request.POST.get("fabric_adapters", "").strip(),
    )
    with refusals_as_messages(request):
        do_set_gang_fabric(user, pool, allowed=allowed, fabric=fabric)
        if allowed and fabric.network:
            text = _("Gangs may use the network {network} in {pool}. Running jobs are not changed.")
        elif allowed:
            text = _("Gangs may use the host network in {pool}. Running jobs are not changed.")
        else:
            text = _("Gangs may not use the host network in {pool}. Running jobs are not changed.")
        messages.success(request, text.format(network=fabric.network, pool=pool.name))
    return redirect(f"{reverse('policy')}?pool={pool.name}")
