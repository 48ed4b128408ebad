"""Reads topologies, and what of them the nodes' labels fill in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from django.db.models import Q, QuerySet

from portal.access import Requester, visible_nodes
from portal.errors import NotFound
from portal.models import Topology


@dataclass(frozen=True)
class TopologyLevel:
    """One level of a topology as the nodes fill it in."""

    key: str
    domains: int
    nodes: int


def list_topologies(requester: Requester) -> QuerySet[Topology]:
    """All topologies by name: whoever may see nodes may see where they stand."""
    visible_nodes(requester)
    return Topology.objects.order_by("name", "id")


def get_topology(requester: Requester, key: str) -> Topology:
    """One by public id or name; NotThere otherwise."""
    row = list_topologies(requester).filter(Q(public_id=key) | Q(name=key)).first()
    if row is None:
        raise NotFound("There is no such topology.")
    return row


def labelled_node_counter(requester: Requester) -> Callable[[Topology], int]:
    """Tells how many nodes stand somewhere in a topology; one query for all of them."""
    labels = list(visible_nodes(requester).values_list("labels", flat=True))
    return lambda row: sum(row.levels[0] in each for each in labels)


def topology_level_reader(requester: Requester) -> Callable[[Topology], list[TopologyLevel]]:
    """Tells level by level how many domains there are and how many nodes stand in them; one query for all."""
    labels = list(visible_nodes(requester).values_list("labels", flat=True))

    def levels(row: Topology) -> list[TopologyLevel]:
        paths: list[tuple[str, ...] | None] = [() for _ in labels]
        found = []
        for key in row.levels:
            paths = [
                (*path, each[key]) if path is not None and key in each else None
                for path, each in zip(paths, labels, strict=True)
            ]
            counted = Counter(path for path in paths if path is not None)
            found.append(TopologyLevel(key, len(counted), counted.total()))
        return found

    return levels
