"""Who shares no node with whom: a task on the node's network, and a workspace of another project.

What listens on a node can be reached from its network, and a workspace is a person's own machine there.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from enum import Enum

from scheduler.core.model.snapshot import NodeId, ProjectId


class IsolationClass(Enum):
    """The two that do not mix; other work is of neither side."""

    HOST_NETWORK = "network"  # a gang, where it may use the network of its nodes
    WORKSPACE = "workspace"


IsolatedOccupants = Mapping[NodeId, Collection[tuple[IsolationClass, ProjectId]]]
"""By node, who of either side stands there; only of pools that lend gangs the network of their nodes."""


def isolation_class_of(*, workspace: bool, gang: bool) -> IsolationClass | None:
    """The side of a job, wherever it will stand: a gang may come to stand on several nodes."""
    if workspace:
        return IsolationClass.WORKSPACE
    return IsolationClass.HOST_NETWORK if gang else None


def must_be_separated(
    isolation_class: IsolationClass,
    project: ProjectId,
    occupants: Collection[tuple[IsolationClass, ProjectId]],
) -> bool:
    """True when somebody stands there with whom a task of this side shares no node."""
    return any(other is not isolation_class and whose != project for other, whose in occupants)


def isolation_excluded_nodes(
    isolation_class: IsolationClass, project: ProjectId, occupants: IsolatedOccupants
) -> tuple[NodeId, ...]:
    """The nodes on which a task of this side and project may not stand now."""
    return tuple(
        sorted(
            node for node, there in occupants.items() if must_be_separated(isolation_class, project, there)
        )
    )


def format_isolation(nodes: int) -> str:
    """What a job is told of nodes that are closed to it; nothing for none."""
    if not nodes:
        return ""
    closed = "1 node is" if nodes == 1 else f"{nodes} nodes are"
    return (
        f" {closed} closed to it: a workspace shares no node with a gang of another project that may use "
        "the network of its nodes."
    )
