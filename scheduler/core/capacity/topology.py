"""Distance between GPUs: topology levels between nodes (block, rack), NVLink islands within a node.

A gang should cross few levels and take the smallest domain that holds it, so that large domains stay free for
large gangs. Domains are integers per node, so that a choice takes a few array sums.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from scheduler.core.model.snapshot import NodeRow, TopologyRow

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
DomainPath = tuple[str, ...]
"""The labels of a domain, from the outermost level to its own."""

NO_DOMAIN = -1


class TopologyIndex:
    """The domains of one topology on the nodes of a pool, by level, outermost first.

    Nodes share a domain if their labels agree from the outermost level to this one. A node without the label
    of a level is in ``NO_DOMAIN`` at that level and below.
    """

    def __init__(self, row: TopologyRow, nodes: Sequence[NodeRow]) -> None:
        self.levels = row.levels
        paths = [_path(row.levels, node) for node in nodes]
        self.paths: list[list[DomainPath]] = []
        """The domains of each level, sorted by label."""
        self.domain_index: Ints = np.full((len(row.levels), len(nodes)), NO_DOMAIN, dtype=np.int64)
        """The index of each node's domain in ``paths``; (levels, nodes)."""
        for depth in range(len(row.levels)):
            mine = [path[: depth + 1] if len(path) > depth else None for path in paths]
            self.paths.append(sorted({path for path in mine if path is not None}))
            number = {path: i for i, path in enumerate(self.paths[depth])}
            self.domain_index[depth] = [NO_DOMAIN if path is None else number[path] for path in mine]
        self.known_nodes: Bools = np.asarray((self.domain_index != NO_DOMAIN).any(axis=0))
        """The nodes that have a domain at some level."""
        self.masks: list[dict[DomainPath, Bools]] = [
            {path: self.domain_index[depth] == i for i, path in enumerate(at_level)}
            for depth, at_level in enumerate(self.paths)
        ]
        """The nodes of each domain."""

    def smallest_domain(self, capacity: Ints, tasks: int) -> Bools | None:
        """Return the nodes of the smallest domain that holds ``tasks``; None if none does.

        The innermost level with such a domain is used; there the domain with the least capacity, then the
        first.

        Args:
            capacity: how many tasks each node could take; (nodes,).
            tasks: number of tasks.
        """
        for depth in reversed(range(len(self.levels))):
            known = self.domain_index[depth] != NO_DOMAIN
            space = np.zeros(len(self.paths[depth]), dtype=np.int64)
            np.add.at(space, self.domain_index[depth][known], np.clip(capacity[known], 0, tasks))
            holds = np.flatnonzero(space >= tasks)
            if len(holds):
                return np.asarray(self.domain_index[depth] == holds[space[holds].argmin()])
        return None

    def levels_crossed(self, nodes: Bools) -> int:
        """Return the number of levels, from the innermost, that these nodes do not share."""
        shared = 0
        for number in self.domain_index[:, nodes]:
            if not len(number) or number[0] == NO_DOMAIN or (number != number[0]).any():
                break
            shared += 1
        return len(self.levels) - shared


def default_topology(topologies: Iterable[TopologyRow], nodes: Sequence[NodeRow]) -> TopologyIndex | None:
    """Return the topology used for gangs without a constraint: the first by name that labels a node."""
    for topology in sorted(topologies, key=lambda row: row.name):
        fabric = TopologyIndex(topology, nodes)
        if fabric.known_nodes.any():
            return fabric
    return None


def _path(levels: Sequence[str], node: NodeRow) -> DomainPath:
    """Return the labels of a node from the outermost level to the last one it has."""
    labels = dict(node.labels)
    path: DomainPath = ()
    for level in levels:
        if level not in labels:
            break
        path = (*path, labels[level])
    return path


def pick_slots_by_island(free: Sequence[int], island_of: Sequence[int], count: int) -> list[int]:
    """Return ``count`` of the ``free`` GPU slots of a node on few islands, keeping large islands whole.

    Args:
        free: slots that may be taken.
        island_of: the island of every slot of the node.
        count: at most the number of free slots.
    """
    islands: dict[int, list[int]] = {}
    for slot in sorted(free):
        islands.setdefault(island_of[slot], []).append(slot)
    taken: list[int] = []
    while len(taken) < count:
        missing = count - len(taken)
        enough = [slots for slots in islands.values() if len(slots) >= missing]
        if enough:
            best = min(enough, key=lambda slots: (len(slots), slots))
        else:
            best = min(islands.values(), key=lambda slots: (-len(slots), slots))
        del islands[island_of[best[0]]]
        taken.extend(best[:missing])
    return taken
