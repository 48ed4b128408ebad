"""Network isolation: a gang on the host network shares no node with a workspace of another project.

What listens on a node can be reached from the host network, and a workspace runs a user's own servers there.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from enum import Enum

from scheduler.core.model.snapshot import NodeId, ProjectId


class IsolationClass(Enum):
    """The two classes of jobs that must not mix; other jobs have none."""

    HOST_NETWORK = "network"  # a gang, in a pool that allows the host network
    WORKSPACE = "workspace"


IsolatedOccupants = Mapping[NodeId, Collection[tuple[IsolationClass, ProjectId]]]
"""Class and project of isolated jobs by node, for pools that allow gangs the host network."""


def isolation_class_of(*, workspace: bool, gang: bool) -> IsolationClass | None:
    """Return the class of a job, independent of its placement: any gang may span several nodes."""
    if workspace:
        return IsolationClass.WORKSPACE
    return IsolationClass.HOST_NETWORK if gang else None


def must_be_separated(
    isolation_class: IsolationClass,
    project: ProjectId,
    occupants: Collection[tuple[IsolationClass, ProjectId]],
) -> bool:
    """Return True if ``occupants`` include the other class of another project."""
    return any(other is not isolation_class and owner != project for other, owner in occupants)


def isolation_excluded_nodes(
    isolation_class: IsolationClass, project: ProjectId, occupants: IsolatedOccupants
) -> tuple[NodeId, ...]:
    """Return the nodes where a job of this class and project must not run now."""
    return tuple(
        sorted(
            node for node, there in occupants.items() if must_be_separated(isolation_class, project, there)
        )
    )


def format_isolation(nodes: int) -> str:
    """Return a message about excluded nodes; blank for none."""
    if not nodes:
        return ""
    closed = "1 node is" if nodes == 1 else f"{nodes} nodes are"
    return (
        f" {closed} excluded: a workspace cannot share a node with another project's gang that may use "
        "the host network."
    )
