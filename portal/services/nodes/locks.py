"""Locks the row of a node for an administrator's action; a retired node has no actions.

The name and the address of a retired node may belong to another one, and nothing brings it back.
"""

from __future__ import annotations

from django.utils.translation import gettext as _

from portal.domain.states import NodeState
from portal.errors import Conflict
from portal.models import Node


def lock_node(node: Node) -> Node:
    """Return the row, locked until the transaction ends. Raise Conflict ``node_retired``."""
    row = Node.objects.select_for_update(no_key=True).get(pk=node.pk)
    require_not_retired(row)
    return row


def require_not_retired(node: Node) -> None:
    """Raise Conflict for a retired node: its name and address may belong to another one."""
    if node.state == NodeState.RETIRED.value:
        message = _("{name} is retired; add the machine again.").format(name=node.name)
        raise Conflict(message, code="node_retired")
