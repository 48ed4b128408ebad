"""Reads topologies, and what of them the nodes' labels fill in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from django.db.models import Q, QuerySet

from portal.access import Person, visible_nodes
from portal.errors import NotThere
from portal.models import Topology


@dataclass(frozen=True)
class Level:
    """One level of a topology as the nodes fill it in."""

    key: str
    domains: int
    nodes: int


def topologies_for(person: Person) -> QuerySet[Topology]:
    """All topologies by name: whoever may see nodes may see where they stand."""
    visible_nodes(person)
    return Topology.objects.order_by("name", "id")


def topology_for(person: Person, key: str) -> Topology:
    """One by public id or name; NotThere otherwise."""
    row = topologies_for(person).filter(Q(public_id=key) | Q(name=key)).first()
    if row is None:
        raise NotThere("There is no such topology.")
    return row


def placed_by(person: Person) -> Callable[[Topology], int]:
    """Tells how many nodes stand somewhere in a topology; one query for all of them."""
    labels = list(visible_nodes(person).values_list("labels", flat=True))
    return lambda row: sum(row.levels[0] in each for each in labels)


def levels_of(person: Person) -> Callable[[Topology], list[Level]]:
    """Tells level by level how many domains there are and how many nodes stand in them; one query for all."""
    labels = list(visible_nodes(person).values_list("labels", flat=True))

    def levels(row: Topology) -> list[Level]:
        paths: list[tuple[str, ...] | None] = [() for _ in labels]
        found = []
        for key in row.levels:
            paths = [
                (*path, each[key]) if path is not None and key in each else None
                for path, each in zip(paths, labels, strict=True)
            ]
            counted = Counter(path for path in paths if path is not None)
            found.append(Level(key, len(counted), counted.total()))
        return found

    return levels
