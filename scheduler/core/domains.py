"""Which domain of a topology a gang should try first, when it asked to stand near.

A gang tries the lowest
level it prefers first and goes up to the level it requires; within a level the domain that it fills best, seen
from the outermost level down. Where it has to spread over several domains of the level that it prefers, it fills
the roomiest of them first, so that it stands in as few as can be.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from scheduler.core.cluster import Near, NodeRow, TopologyRow
from scheduler.core.gang import Task
from scheduler.core.placement import Floor
from scheduler.core.shape import Bools, Shape
from scheduler.core.topology import Fabric, Path

NOTHING_FREE = 1000.0


class Choice(NamedTuple):
    """Nodes to try, and, where the gang spreads over domains of the level it prefers, these, best first."""

    nodes: Bools
    parts: tuple[Bools, ...] = ()


class Domains:
    """All topologies of a pool."""

    def __init__(self, topologies: Iterable[TopologyRow], nodes: Sequence[NodeRow]) -> None:
        self._rows = {row.name: row for row in topologies}
        self._nodes = nodes
        self._fabrics: dict[str, Fabric] = {}

    def choices(
        self,
        near: Near,
        floor: Floor,
        runs: Sequence[tuple[Shape, Sequence[Task]]],
        standing: Sequence[Task],
        only: Bools | None,
    ) -> Iterator[Choice]:
        """Sets of nodes to try, best first; none when the topology or the level is unknown here.

        ``runs`` are the tasks to place by shape, ``standing`` those of the same group that have places: with a
        required level the others join them. ``only`` are the nodes left by the group above.
        """
        fabric = self._fabric(near.topology)
        if fabric is None:
            return
        names = fabric.levels
        wanted = {level for level in (near.required, near.preferred) if level is not None}
        if not wanted or not wanted <= set(names):
            return
        lowest = names.index(near.preferred if near.preferred is not None else near.required or "")
        highest = names.index(near.required) if near.required is not None else -1
        here = {place.node for task in standing for place in task.held or ((task.kept,) if task.kept else ())}
        everything = fabric.root if only is None else fabric.root & only
        fullness = {
            path: _fullness(floor, runs, mask & everything)
            for masks in fabric.masks
            for path, mask in masks.items()
        }

        def tree_order(path: Path) -> tuple[tuple[float, str], ...]:
            return tuple((-fullness[path[: i + 1]], path[i]) for i in range(len(path)))

        parts: tuple[Bools, ...] = ()
        if near.preferred is not None:
            level = fabric.masks[names.index(near.preferred)]
            parts = tuple(
                level[path]
                for path in sorted(level, key=tree_order, reverse=True)
                if (level[path] & everything).any()
            )
        for depth in range(max(lowest, highest), highest - 1, -1):
            masks: dict[Path, Bools] = {(): fabric.root} if depth < 0 else fabric.masks[depth]
            for path in sorted(masks, key=tree_order):
                nodes = masks[path] if only is None else masks[path] & only
                if near.required is not None and here and not self._joins(fabric, highest, nodes, here):
                    continue
                if _room(floor, runs, nodes):
                    yield Choice(nodes, parts)
        if near.required is None and not fabric.root.all():  # what is only preferred keeps nobody waiting
            anywhere = np.ones(len(self._nodes), dtype=bool) if only is None else only
            if _room(floor, runs, anywhere):
                yield Choice(anywhere, parts)

    def required(self, near: Near | None) -> list[Bools] | None:
        """The domains of which one must hold all tasks; None where any nodes will do.

        None of them when the topology or a level is unknown here: then no place is right.
        """
        if near is None:
            return None
        fabric = self._fabric(near.topology)
        wanted = {level for level in (near.required, near.preferred) if level is not None}
        if fabric is None or not wanted or not wanted <= set(fabric.levels):
            return []
        if near.required is None:
            return None
        return list(fabric.masks[fabric.levels.index(near.required)].values())

    def most_together(self, near: Near | None, floor: Floor, shape: Shape) -> int:
        """How many tasks of a shape ``floor`` holds as near to each other as they must stand."""
        capacity = floor.capacity(shape)
        within = self.required(near)
        if within is None:
            return int(capacity.sum())
        return max((int(capacity[domain].sum()) for domain in within), default=0)

    def _joins(self, fabric: Fabric, depth: int, nodes: Bools, here: set[int]) -> bool:
        """True when ``nodes`` lie in the domain of the required level where others of the group stand."""
        for mask in fabric.masks[depth].values():
            if any(mask[node] for node in here):
                return bool((mask & nodes).sum() == nodes.sum())
        return False

    def _fabric(self, name: str) -> Fabric | None:
        if name not in self._fabrics and name in self._rows:
            self._fabrics[name] = Fabric(self._rows[name], self._nodes)
        return self._fabrics.get(name)


def _room(floor: Floor, runs: Sequence[tuple[Shape, Sequence[Task]]], nodes: Bools) -> bool:
    """True when every shape fits on the nodes as often as it is asked for."""
    return all(int(floor.capacity(shape)[nodes].sum()) >= len(tasks) for shape, tasks in runs)


def _fullness(floor: Floor, runs: Sequence[tuple[Shape, Sequence[Task]]], nodes: Bools) -> float:
    """How full the tasks would make the nodes: the largest part, over GPUs and CPU, of what is free."""
    gpu = sum(shape.gpus * shape.milli * len(tasks) for shape, tasks in runs)
    cpu = sum(shape.cpu_milli * len(tasks) for shape, tasks in runs)
    free = max(0, int(floor.free_milli[nodes].sum())), max(0, int(floor.cpu_free[nodes].sum()))
    return max(
        (
            asked / there if there else NOTHING_FREE
            for asked, there in zip((gpu, cpu), free, strict=True)
            if asked
        ),
        default=0.0,
    )
