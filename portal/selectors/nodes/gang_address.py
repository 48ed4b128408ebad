"""By which network interface a node is reached from others."""

from __future__ import annotations

from portal.domain.gang_fabric import GangFabric, InterfaceAddress, node_address
from portal.models import Node


def node_gang_address(node: Node, fabric: GangFabric) -> InterfaceAddress | None:
    """How other nodes reach a node: by what was chosen for it, by what its pool names, or as its agent found."""
    return node_address(node.agent_info.get("interfaces", ()), node.gang_interface, fabric.interface)
