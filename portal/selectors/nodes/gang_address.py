"""The network interface by which other nodes reach a node."""

from __future__ import annotations

from portal.domain.gang_fabric import GangFabric, InterfaceAddress, node_address
from portal.models import Node


def node_gang_address(node: Node, fabric: GangFabric) -> InterfaceAddress | None:
    """Return the address by the node's override, its pool's setting, or the agent's choice, in this order."""
    return node_address(node.agent_info.get("interfaces", ()), node.gang_interface, fabric.interface)
