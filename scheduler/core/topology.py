"""How near to each other GPUs are: fabric levels between nodes (block, rack), NVLink islands within one.

A gang should cross as few levels as it can, and take the tightest place that holds it, so that large ones stay
whole for those who need them. Domains are counted in whole numbers per node, so one choice is a few sums.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from scheduler.core.cluster import NodeRow, TopologyRow

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

NOWHERE = -1


def domains(levels: Sequence[str], nodes: Sequence[NodeRow]) -> Ints:
    """The domain of each node at each level, outermost first; (levels, nodes), numbered by sorted labels.

    Nodes share a domain when their labels agree from the outermost level down to this one. A node without the
    label of a level stands ``NOWHERE`` at it and below.
    """
    paths: list[list[tuple[str, ...] | None]] = [[] for _ in levels]
    for node in nodes:
        labels = dict(node.labels)
        path: tuple[str, ...] | None = ()
        for depth, level in enumerate(levels):
            path = (*path, labels[level]) if path is not None and level in labels else None
            paths[depth].append(path)
    numbered = np.full((len(levels), len(nodes)), NOWHERE, dtype=np.int64)
    for depth, at_level in enumerate(paths):
        number = {path: i for i, path in enumerate(sorted({path for path in at_level if path is not None}))}
        numbered[depth] = [NOWHERE if path is None else number[path] for path in at_level]
    return numbered


def fabric_of(topologies: Iterable[TopologyRow], nodes: Sequence[NodeRow]) -> Ints | None:
    """The domains of the topology that gangs keep to without asking: the first by name that labels a node."""
    for topology in sorted(topologies, key=lambda row: row.name):
        fabric = domains(topology.levels, nodes)
        if (fabric != NOWHERE).any():
            return fabric
    return None


def nearest(
    fabric: Ints, capacity: Ints, tasks: int, *, innermost: int | None = None, outermost: int = 0
) -> Bools | None:
    """The nodes of the smallest domain that holds ``tasks``; None when none does at these levels.

    Of the domains of one level the one with the least room is taken, then the first.

    Args:
        fabric: from ``domains``.
        capacity: how many tasks each node could take; (nodes,).
        tasks: how many there are.
        innermost: the level to begin at, by its place in ``fabric``; None is the last.
        outermost: the last level to try; a required level. 0 is any.
    """
    last = len(fabric) - 1 if innermost is None else innermost
    for depth in range(last, outermost - 1, -1):
        known = fabric[depth] != NOWHERE
        if not known.any():
            continue
        number = fabric[depth][known]
        room = np.zeros(int(number.max()) + 1, dtype=np.int64)
        np.add.at(room, number, np.clip(capacity[known], 0, tasks))
        holds = np.flatnonzero(room >= tasks)
        if len(holds):
            return np.asarray(fabric[depth] == holds[room[holds].argmin()])
    return None


def near_slots(free: Sequence[int], island_of: Sequence[int], count: int) -> list[int]:
    """``count`` of the ``free`` GPU slots of a node on as few islands as can be, large islands left whole.

    Args:
        free: slots that may be taken.
        island_of: the island of every slot of the node.
        count: how many are asked for; at most as many as are free.
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
