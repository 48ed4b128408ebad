"""Break ties between nodes by the layout on which similar work had the highest throughput.

A layout without measurements counts as fast as the slowest measured one, so with fewer than two measured
layouts no node is preferred.
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
    """How tasks lie on one node: the GPU model and the number of NVLink islands used."""

    gpu_model: str
    islands: int


class NodeLayouts:
    """The layout of one batch of tasks on each node, computed on demand."""

    __slots__ = ("layout_of_node", "log_position")

    def __init__(self, nodes: int, log_position: int) -> None:
        self.layout_of_node: Ints = np.full(
            nodes, UNKNOWN_LAYOUT, dtype=np.int64
        )  # an index into ``LayoutTable.layouts``
        self.log_position = log_position  # changes applied from the placer's change log


class LayoutTable:
    """Numbers the distinct layouts of a pool; they are few, because nodes are similar."""

    def __init__(self) -> None:
        self.layouts: list[NodeLayout] = []
        self._number: dict[NodeLayout, int] = {}

    def number(self, layout: NodeLayout) -> int:
        """Return the number of a layout, adding it if it is new."""
        number = self._number.setdefault(layout, len(self.layouts))
        if number == len(self.layouts):
            self.layouts.append(layout)
        return number


class ThroughputTieBreak:
    """Chooses nodes for one gang, one after the other, taking earlier choices into account."""

    def __init__(self, speeds: Sequence[LayoutSpeed], levels: int) -> None:
        """``levels`` is the number of topology levels that the gang crosses if it spans several nodes."""
        self._percent = {speed.layout: speed.percent for speed in speeds}
        self._unknown = min(self._percent.values())
        self._levels = levels
        self._models: list[str] = []
        self._nodes = 0
        self._islands = 0

    def choose(self, layouts: Sequence[NodeLayout], missing: int, count: int) -> int:
        """Return the index of the best layout for the next ``count`` tasks, the first among equals.

        With ``missing`` tasks left, later nodes are assumed to have the same layout.
        """
        left = ceil(missing / count)
        percents = [self._percent.get(self._layout(spot, left), self._unknown) for spot in layouts]
        best = percents.index(max(percents))
        self._models.append(layouts[best].gpu_model)
        self._nodes += 1
        self._islands += layouts[best].islands
        return best

    def _layout(self, node_layout: NodeLayout, left: int) -> Layout:
        """Return the layout of the gang if its last tasks use ``left`` nodes like this one."""
        nodes = self._nodes + left
        model = joined_models((*self._models, node_layout.gpu_model))
        return Layout(
            model, nodes, self._islands + left * node_layout.islands, self._levels if nodes > 1 else 0
        )
