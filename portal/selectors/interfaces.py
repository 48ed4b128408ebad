"""By which network interface a node is reached from others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from portal.models import Node


def interface_of(node: Node) -> Mapping[str, Any] | None:
    """The interface by which other nodes reach a node: the one chosen for it, else the one its agent found."""
    told = node.hello.get("interfaces", ())
    if node.interface:
        return next((each for each in told if each["name"] == node.interface), None)
    return next((each for each in told if each["chosen"]), None)
