"""By which network interface a node is reached from others."""

from __future__ import annotations

from portal.models import Node
from portal.words.fabric import Fabric, Reached, reached_by


def interface_of(node: Node, fabric: Fabric) -> Reached | None:
    """How other nodes reach a node: by what was chosen for it, by what its pool names, or as its agent found."""
    return reached_by(node.hello.get("interfaces", ()), node.interface, fabric.interface)
