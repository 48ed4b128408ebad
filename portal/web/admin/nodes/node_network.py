"""Actions: network settings of a pool for gangs, and the interface at which a node is reached."""

from __future__ import annotations

from django.http import HttpRequest, HttpResponse
from django.urls import reverse
from django.views.decorators.http import require_POST

from portal.access import AccessPolicy, access_policy, require_user
from portal.domain.gang_fabric import GangFabric
from portal.errors import NotFound
from portal.models import Node, NodePool
from portal.services.nodes.gang_fabric import do_set_gang_fabric, do_set_interface
from portal.web.actions import run_and_redirect


@access_policy(AccessPolicy.ADMIN)
@require_POST
def set_pool_network(request: HttpRequest, public_id: str) -> HttpResponse:
    """Set whether gangs may use the host network, with which network, fabric devices and adapters."""
    pool = NodePool.objects.filter(public_id=public_id).first()
    if pool is None:
        raise NotFound("There is no such pool.")
    allowed = "allow_host_network" in request.POST
    fabric = GangFabric(
        interface=request.POST.get("fabric_interface", "").strip(),
        network=request.POST.get("fabric_network", "").strip(),
        devices=tuple(request.POST.get("fabric_devices", "").split()),
        adapters=request.POST.get("fabric_adapters", "").strip(),
    )

    def change() -> str:
        do_set_gang_fabric(require_user(request.user), pool, allowed=allowed, fabric=fabric)
        may = "may use" if allowed else "may not use"
        owner = f"the network {fabric.network} in" if allowed and fabric.network else "the host network in"
        return f"Gangs {may} {owner} {pool.name}. Running jobs are not changed."

    return run_and_redirect(request, change, f"{reverse('policy')}?pool={pool.name}")


@access_policy(AccessPolicy.ADMIN)
@require_POST
def set_interface(request: HttpRequest, public_id: str) -> HttpResponse:
    """Set the interface at which ranks on other nodes reach this one."""
    node = Node.objects.filter(public_id=public_id).first()
    if node is None:
        raise NotFound("There is no such node.")
    name = request.POST.get("interface", "").strip()

    def change() -> str:
        do_set_interface(require_user(request.user), node, name)
        through = name or "the interface that its agent detects"
        return f"Gangs that start from now on reach {node.name} through {through}."

    return run_and_redirect(request, change, reverse("node", args=[public_id]))
