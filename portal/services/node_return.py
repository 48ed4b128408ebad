"""A node comes back into service: it is checked first, and takes work by itself once nothing is amiss.

What the check finds keeps nobody who says so from taking the node back all the same; nor does a node that does not
answer, whose jobs then wait until it does.
"""

from __future__ import annotations

from django.db import transaction

from portal.access import Verb, require
from portal.errors import Conflict
from portal.models import Node, NodeCheck, User
from portal.services.audit import record_act
from portal.services.node_acts import order, record_order_finished
from portal.services.nodes import do_set_node_state, record_return, require_hello
from portal.words.node_acts import NodeAct
from portal.words.states import NodeState


def do_return_node(actor: User, node: Node, *, reason: str = "", force: bool = False) -> NodeCheck | None:
    """Gives the check that decides, or None where the node is in service now: it was, or ``force`` asks no check.

    Raises Conflict ``node_unreachable`` for one that does not answer, ``node_never_seen`` for one that never did.
    """
    require(actor, Verb.CHANGE, node)
    if force:
        do_set_node_state(actor, node, NodeState.READY, reason=reason)
        return None
    with transaction.atomic():
        row = Node.objects.select_for_update(no_key=True).get(pk=node.pk)
        require_hello(row)
        if row.state == NodeState.READY.value:
            return None
        if not row.reachable:
            raise Conflict(
                f"{row.name} does not answer, so it cannot be checked. It can be returned all the same.",
                code="node_unreachable",
            )
        looks = NodeCheck.objects.filter(node=row, kind=NodeAct.PREFLIGHT.value, finished_at__isnull=True)
        check = looks.first() or order(row, NodeAct.PREFLIGHT)
        check.actor, check.returns, check.reason = actor, True, reason[:500]
        check.save(update_fields=["actor", "returns", "reason"])
        record_act(actor, "node.return", row, after={"check": check.public_id}, reason=reason)
    return check


def record_checked(check_id: int, ok: bool) -> None:
    """A check is over; where it was to decide and found nothing amiss, the node takes work again."""
    with transaction.atomic():
        # the node's row first, as whoever changes its state does
        node = Node.objects.select_for_update(no_key=True, of=("self",)).get(checks=check_id)
        record_order_finished(check_id, ok)
        check = NodeCheck.objects.select_related("actor").get(pk=check_id)
        if check.returns and check.ok and node.state != NodeState.READY.value:
            record_return(check.actor, node, reason=check.reason)
