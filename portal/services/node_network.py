"""Which pools lend gangs the network of their nodes, and by which interface each node is reached there."""

from __future__ import annotations

import re
from collections.abc import Sequence

from django.db import transaction

from portal.access import Verb, require, require_admin
from portal.errors import Invalid
from portal.events import announce
from portal.models import Node, NodePool, User
from portal.services.audit import record_moved
from portal.wake import wake

DEVICE = re.compile(r"/dev(/[A-Za-z0-9_][A-Za-z0-9._-]{0,63}){1,4}")
MAX_DEVICES = 64


def do_set_node_network(
    actor: User, pool: NodePool, *, allowed: bool, devices: Sequence[str], reason: str = ""
) -> NodePool:
    """Lets gangs of a pool use the network of its nodes, with these devices of a fabric, or lets them no more.

    What runs stays as it is. Each node must lend the devices in its own settings, too.
    """
    require_admin(actor, "change pools")
    wrong = next((each for each in devices if not DEVICE.fullmatch(each)), None)
    if wrong is not None or len(devices) > MAX_DEVICES:
        raise Invalid(
            fields={
                "fabric_devices": f"{wrong} is no device below /dev."
                if wrong is not None
                else f"At most {MAX_DEVICES} devices."
            }
        )
    with transaction.atomic():
        row = NodePool.objects.select_for_update(no_key=True).get(pk=pool.pk)
        before = {"allow_node_network": row.allow_node_network, "fabric_devices": row.fabric_devices}
        after = {"allow_node_network": allowed, "fabric_devices": list(dict.fromkeys(devices))}
        if before == after:
            return row
        row.allow_node_network, row.fabric_devices = allowed, after["fabric_devices"]
        row.save(update_fields=["allow_node_network", "fabric_devices"])
        record_moved(actor, "pool.network", row, before, after, reason=reason)
        announce("cluster", {"kind": "pool", "pool": row.public_id})
        wake("policy")
    return row


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
        row.save(update_fields=["interface"])
        record_moved(actor, "node.interface", row, {"interface": before}, {"interface": name}, reason=reason)
        announce("cluster", {"kind": "node", "node": row.public_id, "state": row.state})
    return row
