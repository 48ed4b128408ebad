"""Sets which pools allow a network between nodes for gangs, and by which interface nodes are reached."""

from __future__ import annotations

from dataclasses import replace

from django.db import transaction
from django.utils.translation import gettext as _

from portal.access import Permission, require_admin, require_permission
from portal.domain.nodes.gang_fabric import GangFabric, fabric_errors, missing_requirements
from portal.domain.nodes.node_operations import OperationKind
from portal.errors import InvalidRequest
from portal.live_events import publish_on_commit
from portal.models import Node, NodePool, User
from portal.outbox import trigger_cycle
from portal.services.audit import record_change
from portal.services.nodes.locks import lock_node
from portal.services.nodes.operations import request_operations


def do_set_gang_fabric(
    actor: User, pool: NodePool, *, allowed: bool, fabric: GangFabric, reason: str = ""
) -> NodePool:
    """Allow or forbid a network between nodes for gangs of a pool, and set its fabric.

    Running jobs are unchanged. Each node must allow the devices in its own settings too. Reachable nodes then
    check their requirements.
    """
    require_admin(actor, "change pools")
    if faults := fabric_errors(fabric):
        raise InvalidRequest(fields=faults)
    fabric = replace(fabric, devices=tuple(dict.fromkeys(fabric.devices)))
    with transaction.atomic():
        row = NodePool.objects.select_for_update(no_key=True).get(pk=pool.pk)
        before = {key: getattr(row, key) for key in ("allow_host_network", *fabric.to_json())}
        after = {"allow_host_network": allowed, **fabric.to_json()}
        if before == after:
            return row
        for key, value in after.items():
            setattr(row, key, value)
        row.save(update_fields=list(after))
        record_change(actor, "pool.gang_network", row, before, after, reason=reason)
        nodes = list(Node.objects.select_for_update(no_key=True).filter(pool=row).order_by("pk"))
        for node in nodes:
            update_missing_requirements(node, row)
        Node.objects.bulk_update(nodes, ["missing_requirements"])
        if row.fabric != GangFabric():
            request_operations([node for node in nodes if node.reachable], OperationKind.PREFLIGHT, actor)
        publish_on_commit("cluster", {"kind": "pool", "pool": row.public_id})
        trigger_cycle("policy")
    return row


def update_missing_requirements(node: Node, pool: NodePool) -> None:
    """Update what a node lacks of its pool's fabric, from its last hello; the caller saves it."""
    node.missing_requirements = missing_requirements(
        node.agent_info, node.runtime, node.gang_interface, pool.fabric
    )[:1000]


def do_set_interface(actor: User, node: Node, name: str, *, reason: str = "") -> Node:
    """Set the interface at which other nodes reach this node; blank: the agent's choice."""
    require_permission(actor, Permission.CHANGE, node)
    with transaction.atomic():
        row = lock_node(node)
        known = [each["name"] for each in row.agent_info.get("interfaces", ())]
        if name and name not in known:
            there = (
                _("It reports {known}.").format(known=", ".join(known))
                if known
                else _("Its agent reports none.")
            )
            message = _("{name} has no interface {interface} with an address. {there}").format(
                name=row.name, interface=name, there=there
            )
            raise InvalidRequest(fields={"interface": message})
        if row.gang_interface == name:
            return row
        before, row.gang_interface = row.gang_interface, name
        update_missing_requirements(row, row.pool)
        row.save(update_fields=["gang_interface", "missing_requirements"])
        record_change(actor, "node.interface", row, {"interface": before}, {"interface": name}, reason=reason)
        publish_on_commit("cluster", {"kind": "node", "node": row.public_id, "state": row.state})
    return row
