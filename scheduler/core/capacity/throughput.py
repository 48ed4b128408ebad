"""Relative throughput of layouts, learned from ended attempts for pending jobs of the same work.

As in ``forecast/durations.py``, results depend only on the latest attempts and change in steps, so that all
processes agree and snapshot rows rarely change. ``portal/domain/scheduling/throughput.py`` defines which jobs do the
same *work* and how attempts are combined.

``ThroughputTieBreak`` prefers, among nodes that are equal otherwise, the layout with the highest throughput. A
layout without measurements counts as fast as the slowest measured one, so with fewer than two measured layouts
no node is preferred.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from math import ceil
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from portal.domain.scheduling.throughput import (
    Layout,
    LayoutSpeed,
    compare_layouts,
    joined_models,
    median_rates,
)

Ints = NDArray[np.int64]


class ThroughputHistory:
    """Throughput of ended attempts. Job numbers ascend; ``forget_before`` drops the oldest."""

    def __init__(self) -> None:
        self._arrivals: deque[tuple[int, str]] = deque()
        self._by_work: dict[str, deque[tuple[int, Layout, float]]] = {}
        self._speeds: dict[str, tuple[LayoutSpeed, ...]] = {}
        self._changed: set[str] = set()  # works to compare again

    @property
    def has_differences(self) -> bool:
        """True if the layouts of some work are known to differ."""
        self._compare()
        return bool(self._speeds)

    def learn(self, job: int, work: str, layout: Layout, rate_per_s: float) -> None:
        self._arrivals.append((job, work))
        self._by_work.setdefault(work, deque()).append((job, layout, rate_per_s))
        self._changed.add(work)

    def forget_before(self, first: int) -> None:
        """Drop attempts of jobs with numbers below ``first``."""
        while self._arrivals and self._arrivals[0][0] < first:
            _, work = self._arrivals.popleft()
            mine = self._by_work[work]
            mine.popleft()
            if not mine:
                del self._by_work[work]
            self._changed.add(work)

    def speeds(self, work: str) -> tuple[LayoutSpeed, ...]:
        """Return the relative speeds of known layouts, fastest first; empty if none are known to differ."""
        self._compare()
        return self._speeds.get(work, ())

    def _compare(self) -> None:
        for work in self._changed:
            latest = reversed(self._by_work.get(work, ()))
            speeds = compare_layouts(median_rates((layout, per_s) for _, layout, per_s in latest))
            self._speeds.pop(work, None)
            if speeds:
                self._speeds[work] = speeds
        self._changed.clear()


UNKNOWN_LAYOUT = -1


class NodeLayout(NamedTuple):
    """How tasks lie on one node: the GPU model and the number of NVLink islands used."""

    gpu_model: str
    islands: int


class NodeLayouts:
    """The layout of one batch of tasks on each node, computed on demand."""

    __slots__ = ("layout_of_node", "log_position")

    def __init__(self, nodes: int, log_position: int) -> None:
        self.layout_of_node: Ints = np.full(nodes, UNKNOWN_LAYOUT, dtype=np.int64)
        """Numbers of ``NodePlacer``."""
        self.log_position = log_position  # changes applied from the placer's change log


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
