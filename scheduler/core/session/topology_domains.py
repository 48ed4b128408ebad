"""Order the topology domains that a gang with a topology constraint should try.

A gang tries its preferred level first and goes outwards to its required level; within a level the domain that
it fills most comes first, compared from the outermost level inwards. If it must spread over several domains
of its preferred level, it fills those with the most free capacity first, so that it uses few.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from scheduler.core.capacity.node_capacity import Bools
from scheduler.core.capacity.placement import NodePlacer
from scheduler.core.capacity.topology import DomainPath, TopologyIndex
from scheduler.core.model.snapshot import NodeId, NodeRow, TaskShape, TopologyConstraint, TopologyRow
from scheduler.core.session.gang import GangTask

FULLNESS_WITHOUT_CAPACITY = 1000.0


class DomainCandidate(NamedTuple):
    """Nodes to try (None is all), and the domains of the preferred level to fill first, best first.

    With ``node_of_rank``, each task may only be placed on its node.
    """

    nodes: Bools | None
    preferred_domains: tuple[Bools, ...] = ()
    node_of_rank: Mapping[int, NodeId] = MappingProxyType({})


class TopologyDomains:
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
        """Yield sets of nodes to try, best first; none if the topology or a level is unknown here.

        ``tasks_by_shape`` are the tasks to place. ``placed_tasks`` of the same group already have slots, and
        a required level keeps the others in their domain. ``allowed_nodes`` are the nodes left by the group
        above.
        """
        fabric = self._topology(constraint)
        if fabric is None:
            return
        names = fabric.levels
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
        # a preference never keeps a gang pending
        if constraint.required is None and not fabric.known_nodes.all():
            anywhere = np.ones(len(self._nodes), dtype=bool) if allowed_nodes is None else allowed_nodes
            if _fits_all(placer, tasks_by_shape, anywhere):
                yield DomainCandidate(anywhere, parts)

    def required_domains(self, constraint: TopologyConstraint | None) -> list[Bools] | None:
        """Return the domains one of which must hold all tasks; None if any nodes will do.

        Return an empty list if the topology or a level is unknown here, since then nothing fits.
        """
        if constraint is None:
            return None
        fabric = self._topology(constraint)
        if fabric is None:
            return []
        if constraint.required is None:
            return None
        return list(fabric.masks[fabric.levels.index(constraint.required)].values())

    def max_tasks_together(
        self, constraint: TopologyConstraint | None, placer: NodePlacer, shape: TaskShape
    ) -> int:
        """Return how many tasks of a shape fit within one required domain, or on all nodes without one.

        With ``same_gpus``, on one kind of hardware.
        """
        if shape.same_gpus:
            shapes = placer.hardware.restricted_shapes(shape)
            return max(self.max_tasks_together(constraint, placer, each) for each in shapes)
        capacity = placer.capacity(shape)
        within = self.required_domains(constraint)
        if within is None:
            return int(capacity.sum())
        return max((int(capacity[domain].sum()) for domain in within), default=0)

    def _contains_placed(
        self, fabric: TopologyIndex, depth: int, nodes: Bools, placed_nodes: set[int]
    ) -> bool:
        """Return True if ``nodes`` lie in the required domain of the placed tasks."""
        for mask in fabric.masks[depth].values():
            if any(mask[node] for node in placed_nodes):
                return bool((mask & nodes).sum() == nodes.sum())
        return False

    def _topology(self, constraint: TopologyConstraint) -> TopologyIndex | None:
        """Return the topology of a constraint; None if it or a level is unknown here."""
        row = self._rows.get(constraint.topology)
        wanted = {level for level in (constraint.required, constraint.preferred) if level is not None}
        if row is None or not wanted or not wanted <= set(row.levels):
            return None
        if row.name not in self._topologies:
            self._topologies[row.name] = TopologyIndex(row, self._nodes)
        return self._topologies[row.name]


def _fits_all(
    placer: NodePlacer, tasks_by_shape: Sequence[tuple[TaskShape, Sequence[GangTask]]], nodes: Bools
) -> bool:
    """Return True if the nodes hold all tasks of each shape, shape by shape."""
    return all(int(placer.capacity(shape)[nodes].sum()) >= len(tasks) for shape, tasks in tasks_by_shape)


def _fullness(
    placer: NodePlacer, tasks_by_shape: Sequence[tuple[TaskShape, Sequence[GangTask]]], nodes: Bools
) -> float:
    """Return the largest ratio of demand to free capacity, over GPUs and CPU."""
    gpu = sum(shape.request.total_milli * len(tasks) for shape, tasks in tasks_by_shape)
    cpu = sum(shape.request.cpu_milli * len(tasks) for shape, tasks in tasks_by_shape)
    free = max(0, int(placer.free_milli[nodes].sum())), max(0, int(placer.cpu_free[nodes].sum()))
    return max(
        (
            asked / there if there else FULLNESS_WITHOUT_CAPACITY
            for asked, there in zip((gpu, cpu), free, strict=True)
            if asked
        ),
        default=0.0,
    )
