"""A node comes back into service: it is checked first, and takes work by itself once nothing is amiss.

What the check finds keeps nobody who says so from taking the node back all the same; nor does a node that does not
answer, whose jobs then wait until it does.
"""

from __future__ import annotations

from django.db import transaction

from portal.access import Permission, require_permission
from portal.domain.node_operations import OperationKind
from portal.domain.states import NodeState
from portal.errors import Conflict
from portal.models import Node, NodeOperation, User
from portal.services.audit import record_action
from portal.services.nodes.nodes import do_set_node_state, record_uncordoned, require_connected_once
from portal.services.nodes.operations import record_operation_finished, request_operation


def do_uncordon_node(
    actor: User, node: Node, *, reason: str = "", force: bool = False
) -> NodeOperation | None:
    """Gives the check that decides, or None where the node is in service now: it was, or ``force`` asks no check.

    Raises Conflict ``node_unreachable`` for one that does not answer, ``node_never_connected`` for one that never did.
    """
    require_permission(actor, Permission.CHANGE, node)
    if force:
        do_set_node_state(actor, node, NodeState.READY, reason=reason)
        return None
    with transaction.atomic():
        row = Node.objects.select_for_update(no_key=True).get(pk=node.pk)
        require_connected_once(row)
        if row.state == NodeState.READY.value:
            return None
        if not row.reachable:
            raise Conflict(
                f"{row.name} does not answer, so it cannot be checked. It can be returned all the same.",
                code="node_unreachable",
            )
        looks = NodeOperation.objects.filter(
            node=row, kind=OperationKind.PREFLIGHT.value, finished_at__isnull=True
        )
        check = looks.first() or request_operation(row, OperationKind.PREFLIGHT)
        check.actor, check.uncordon_on_success, check.reason = actor, True, reason[:500]
        check.save(update_fields=["actor", "uncordon_on_success", "reason"])
        record_action(actor, "node.uncordon", row, after={"check": check.public_id}, reason=reason)
    return check


def record_preflight_finished(operation_id: int, ok: bool) -> None:
    """A check is over; where it was to decide and found nothing amiss, the node takes work again."""
    with transaction.atomic():
        # the node's row first, as whoever changes its state does
        node = Node.objects.select_for_update(no_key=True, of=("self",)).get(operations=operation_id)
        record_operation_finished(operation_id, ok)
        check = NodeOperation.objects.select_related("actor").get(pk=operation_id)
        if check.uncordon_on_success and check.ok and node.state != NodeState.READY.value:
            record_uncordoned(check.actor, node, reason=check.reason)
