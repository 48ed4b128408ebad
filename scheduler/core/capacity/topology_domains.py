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

from scheduler.core.capacity.placement import NodePlacer
from scheduler.core.capacity.topology import DomainPath, TopologyIndex
from scheduler.core.model.snapshot import NodeRow, TopologyConstraint, TopologyRow
from scheduler.core.model.task_shape import Bools, TaskShape
from scheduler.core.session.gang import GangTask

FULLNESS_WITHOUT_CAPACITY = 1000.0


class DomainCandidate(NamedTuple):
    """Nodes to try, and, where the gang spreads over domains of the level it prefers, these, best first."""

    nodes: Bools
    preferred_domains: tuple[Bools, ...] = ()


class TopologyDomains:
    """All topologies of a pool."""

    def __init__(self, topologies: Iterable[TopologyRow], nodes: Sequence[NodeRow]) -> None:
        self._rows = {row.name: row for row in topologies}
        self._nodes = nodes
        self._topologies: dict[str, TopologyIndex] = {}

    def candidates(
        self,
        constraint: TopologyConstraint,
        placer: NodePlacer,
        tasks_by_shape: Sequence[tuple[TaskShape, Sequence[GangTask]]],
        placed_tasks: Sequence[GangTask],
        allowed_nodes: Bools | None,
    ) -> Iterator[DomainCandidate]:
        """Sets of nodes to try, best first; none when the topology or the level is unknown here.

        ``runs`` are the tasks to place by shape, ``standing`` those of the same group that have places: with a
        required level the others join them. ``only`` are the nodes left by the group above.
        """
        fabric = self._topology(constraint.topology)
        if fabric is None:
            return
        names = fabric.levels
        wanted = {level for level in (constraint.required, constraint.preferred) if level is not None}
        if not wanted or not wanted <= set(names):
            return
        lowest = names.index(
            constraint.preferred if constraint.preferred is not None else constraint.required or ""
        )
        highest = names.index(constraint.required) if constraint.required is not None else -1
        here = {
            place.node
            for task in placed_tasks
            for place in task.held or ((task.nominated,) if task.nominated else ())
        }
        everything = fabric.known_nodes if allowed_nodes is None else fabric.known_nodes & allowed_nodes
        fullness = {
            path: _fullness(placer, tasks_by_shape, mask & everything)
            for masks in fabric.masks
            for path, mask in masks.items()
        }

        def tree_order(path: DomainPath) -> tuple[tuple[float, str], ...]:
            return tuple((-fullness[path[: i + 1]], path[i]) for i in range(len(path)))

        parts: tuple[Bools, ...] = ()
        if constraint.preferred is not None:
            level = fabric.masks[names.index(constraint.preferred)]
            parts = tuple(
                level[path]
                for path in sorted(level, key=tree_order, reverse=True)
                if (level[path] & everything).any()
            )
        for depth in range(max(lowest, highest), highest - 1, -1):
            masks: dict[DomainPath, Bools] = {(): fabric.known_nodes} if depth < 0 else fabric.masks[depth]
            for path in sorted(masks, key=tree_order):
                nodes = masks[path] if allowed_nodes is None else masks[path] & allowed_nodes
                if (
                    constraint.required is not None
                    and here
                    and not self._contains_placed(fabric, highest, nodes, here)
                ):
                    continue
                if _fits_all(placer, tasks_by_shape, nodes):
                    yield DomainCandidate(nodes, parts)
        if (
            constraint.required is None and not fabric.known_nodes.all()
        ):  # what is only preferred keeps nobody waiting
            anywhere = np.ones(len(self._nodes), dtype=bool) if allowed_nodes is None else allowed_nodes
            if _fits_all(placer, tasks_by_shape, anywhere):
                yield DomainCandidate(anywhere, parts)

    def required_domains(self, constraint: TopologyConstraint | None) -> list[Bools] | None:
        """The domains of which one must hold all tasks; None where any nodes will do.

        None of them when the topology or a level is unknown here: then no place is right.
        """
        if constraint is None:
            return None
        fabric = self._topology(constraint.topology)
        wanted = {level for level in (constraint.required, constraint.preferred) if level is not None}
        if fabric is None or not wanted or not wanted <= set(fabric.levels):
            return []
        if constraint.required is None:
            return None
        return list(fabric.masks[fabric.levels.index(constraint.required)].values())

    def max_tasks_together(
        self, constraint: TopologyConstraint | None, placer: NodePlacer, shape: TaskShape
    ) -> int:
        """How many tasks of a shape ``placer`` holds as near to each other as they must stand."""
        capacity = placer.capacity(shape)
        within = self.required_domains(constraint)
        if within is None:
            return int(capacity.sum())
        return max((int(capacity[domain].sum()) for domain in within), default=0)

    def _contains_placed(
        self, fabric: TopologyIndex, depth: int, nodes: Bools, placed_nodes: set[int]
    ) -> bool:
        """True when ``nodes`` lie in the domain of the required level where others of the group stand."""
        for mask in fabric.masks[depth].values():
            if any(mask[node] for node in placed_nodes):
                return bool((mask & nodes).sum() == nodes.sum())
        return False

    def _topology(self, name: str) -> TopologyIndex | None:
        if name not in self._topologies and name in self._rows:
            self._topologies[name] = TopologyIndex(self._rows[name], self._nodes)
        return self._topologies.get(name)


def _fits_all(
    placer: NodePlacer, tasks_by_shape: Sequence[tuple[TaskShape, Sequence[GangTask]]], nodes: Bools
) -> bool:
    """True when every shape fits on the nodes as often as it is asked for."""
    return all(int(placer.capacity(shape)[nodes].sum()) >= len(tasks) for shape, tasks in tasks_by_shape)


def _fullness(
    placer: NodePlacer, tasks_by_shape: Sequence[tuple[TaskShape, Sequence[GangTask]]], nodes: Bools
) -> float:
    """How full the tasks would make the nodes: the largest part, over GPUs and CPU, of what is free."""
    gpu = sum(shape.gpus * shape.milli * len(tasks) for shape, tasks in tasks_by_shape)
    cpu = sum(shape.cpu_milli * len(tasks) for shape, tasks in tasks_by_shape)
    free = max(0, int(placer.free_milli[nodes].sum())), max(0, int(placer.cpu_free[nodes].sum()))
    return max(
        (
            asked / there if there else FULLNESS_WITHOUT_CAPACITY
            for asked, there in zip((gpu, cpu), free, strict=True)
            if asked
        ),
        default=0.0,
    )
