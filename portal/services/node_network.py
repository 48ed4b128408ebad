"""Which pools lend gangs the network of their nodes, and by which interface each node is reached there."""

from __future__ import annotations

from dataclasses import replace

from django.db import transaction

from portal.access import Verb, require, require_admin
from portal.errors import Invalid
from portal.events import announce
from portal.models import Node, NodePool, User
from portal.services.audit import record_moved
from portal.services.node_acts import order_all
from portal.wake import wake
from portal.words.fabric import Fabric, faults_of, lacking
from portal.words.node_acts import NodeAct


def do_set_node_network(
    actor: User, pool: NodePool, *, allowed: bool, fabric: Fabric, reason: str = ""
) -> NodePool:
    """Lets gangs of a pool use a network between its nodes, with what it names for them, or lets them no more.

    What runs stays as it is. Each node must lend the devices in its own settings, too. Nodes that answer are asked
    to check whether they have what is named.
    """
    require_admin(actor, "change pools")
    if faults := faults_of(fabric):
        raise Invalid(fields=faults)
    fabric = replace(fabric, devices=tuple(dict.fromkeys(fabric.devices)))
    with transaction.atomic():
        row = NodePool.objects.select_for_update(no_key=True).get(pk=pool.pk)
        before = {key: getattr(row, key) for key in ("allow_node_network", *fabric.as_json())}
        after = {"allow_node_network": allowed, **fabric.as_json()}
        if before == after:
            return row
        for key, value in after.items():
            setattr(row, key, value)
        row.save(update_fields=list(after))
        record_moved(actor, "pool.network", row, before, after, reason=reason)
        nodes = list(Node.objects.select_for_update(no_key=True).filter(pool=row).order_by("pk"))
        for node in nodes:
            note_lacks(node, row)
        Node.objects.bulk_update(nodes, ["lacks"])
        if row.fabric != Fabric():
            order_all([node for node in nodes if node.reachable], NodeAct.PREFLIGHT, actor)
        announce("cluster", {"kind": "pool", "pool": row.public_id})
        wake("policy")
    return row


def note_lacks(node: Node, pool: NodePool) -> None:
    """Works out what a node has not of what its pool names, by its last hello; the caller saves it."""
    node.lacks = lacking(node.hello, node.runtime, node.interface, pool.fabric)[:1000]


def do_set_interface(actor: User, node: Node, name: str, *, reason: str = "") -> Node:
    """Chooses the interface by which ranks on other nodes reach those on this one; blank: as its agent finds it."""
    require(actor, Verb.CHANGE, node)
    with transaction.atomic():
        row = Node.objects.select_for_update(no_key=True).get(pk=node.pk)
        known = [each["name"] for each in row.hello.get("interfaces", ())]
        if name and name not in known:
            there = f"It told of {', '.join(known)}." if known else "Its agent told of none."
            raise Invalid(
                fields={"interface": f"{row.name} has no interface {name} with an address. {there}"}
            )
        if row.interface == name:
            return row
        before, row.interface = row.interface, name
        note_lacks(row, row.pool)
        row.save(update_fields=["interface", "lacks"])
        record_moved(actor, "node.interface", row, {"interface": before}, {"interface": name}, reason=reason)
        announce("cluster", {"kind": "node", "node": row.public_id, "state": row.state})
    return row
