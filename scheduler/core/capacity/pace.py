"""Which of several nodes, equal otherwise, gives a gang the layout on which work like it ran fastest.

A layout of which nothing is known counts as fast as the slowest that is known: where only one is, or none, no node
is before another.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import NamedTuple

import numpy as np

from portal.domain.throughput import Layout, LayoutSpeed, joined_models
from scheduler.core.model.task_shape import Ints

UNKNOWN_LAYOUT = -1


class NodeLayout(NamedTuple):
    """How tasks lie on one node: on GPUs of which model, on how many of its NVLink islands."""

    gpu_model: str
    islands: int


class NodeLayouts:
    """How so many tasks of one shape would lie on each node of a floor, as far as anybody asked."""

    __slots__ = ("layout_of_node", "log_position")

    def __init__(self, nodes: int, log_position: int) -> None:
        self.layout_of_node: Ints = np.full(
            nodes, UNKNOWN_LAYOUT, dtype=np.int64
        )  # an index of ``SpotTable.spots``
        self.log_position = log_position  # how much of the floor's change log it knows


class LayoutTable:
    """All spots there are in a pool, by number; few, as nodes are much alike."""

    def __init__(self) -> None:
        self.layouts: list[NodeLayout] = []
        self._number: dict[NodeLayout, int] = {}

    def number(self, layout: NodeLayout) -> int:
        """The number of a spot; a new one where it was not seen before."""
        number = self._number.setdefault(layout, len(self.layouts))
        if number == len(self.layouts):
            self.layouts.append(layout)
        return number


class ThroughputTieBreak:
    """Chooses nodes for one gang, one after the other; what it chose before counts."""

    def __init__(self, speeds: Sequence[LayoutSpeed], levels: int) -> None:
        """``levels`` of the fabric are crossed, should the gang stand on several nodes."""
        self._percent = {speed.layout: speed.percent for speed in speeds}
        self._unknown = min(self._percent.values())
        self._levels = levels
        self._models: list[str] = []
        self._nodes = 0
        self._islands = 0

    def choose(self, layouts: Sequence[NodeLayout], missing: int, count: int) -> int:
        """Which of these spots to take for the next ``count`` tasks, the first among equals.

        With ``missing`` tasks left, the nodes after it are taken to be like it.
        """
        left = ceil(missing / count)
        percents = [self._percent.get(self._layout(spot, left), self._unknown) for spot in layouts]
        best = percents.index(max(percents))
        self._models.append(layouts[best].gpu_model)
        self._nodes += 1
        self._islands += layouts[best].islands
        return best

    def _layout(self, node_layout: NodeLayout, left: int) -> Layout:
        """That of the gang, once its last tasks stand on ``left`` nodes like this."""
        nodes = self._nodes + left
        model = joined_models((*self._models, node_layout.gpu_model))
        return Layout(
            model, nodes, self._islands + left * node_layout.islands, self._levels if nodes > 1 else 0
        )
