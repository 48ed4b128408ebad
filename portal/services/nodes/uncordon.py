"""Uncordons a node: it is checked first and returns to service if the check succeeds.

An administrator can force the return despite the findings, also of an unreachable node, whose jobs then wait
until it answers.
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
    """Return the check that decides, or None if the node is in service now: already, or by ``force``.

    Raise Conflict ``node_unreachable``, or ``node_never_connected``.
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
                f"{row.name} is unreachable, so it cannot be checked. A forced uncordon is possible.",
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
    """Record the result of a check; uncordon the node if requested and the check succeeded."""
    with transaction.atomic():
        # the node's row first, in the order of every state change
        node = Node.objects.select_for_update(no_key=True, of=("self",)).get(operations=operation_id)
        record_operation_finished(operation_id, ok)
        check = NodeOperation.objects.select_related("actor").get(pk=operation_id)
        if check.uncordon_on_success and check.ok and node.state != NodeState.READY.value:
            record_uncordoned(check.actor, node, reason=check.reason)
