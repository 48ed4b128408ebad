"""Who shares no node with whom: a task on the node's network, and a workspace of another project.

What listens on a node can be reached from its network, and a workspace is a person's own machine there.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from enum import Enum

from scheduler.core.cluster import NodeId, ProjectId


class Side(Enum):
    """The two that do not mix; other work is of neither side."""

    NETWORK = "network"  # a gang, where it may use the network of its nodes
    WORKSPACE = "workspace"


Guests = Mapping[NodeId, Collection[tuple[Side, ProjectId]]]
"""By node, who of either side stands there; only of pools that lend gangs the network of their nodes."""


def side_of(*, workspace: bool, gang: bool) -> Side | None:
    """The side of a job, wherever it will stand: a gang may come to stand on several nodes."""
    if workspace:
        return Side.WORKSPACE
    return Side.NETWORK if gang else None


def strangers(side: Side, project: ProjectId, guests: Collection[tuple[Side, ProjectId]]) -> bool:
    """True when somebody stands there with whom a task of this side shares no node."""
    return any(other is not side and whose != project for other, whose in guests)


def closed_to(side: Side, project: ProjectId, guests: Guests) -> tuple[NodeId, ...]:
    """The nodes on which a task of this side and project may not stand now."""
    return tuple(sorted(node for node, there in guests.items() if strangers(side, project, there)))


def sentence(nodes: int) -> str:
    """What a job is told of nodes that are closed to it; nothing for none."""
    if not nodes:
        return ""
    closed = "1 node is" if nodes == 1 else f"{nodes} nodes are"
    return (
        f" {closed} closed to it: a workspace shares no node with a gang of another project that may use "
        "the network of its nodes."
    )
