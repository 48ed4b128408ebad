"""Baseline policies of the FGD paper (Weng et al., USENIX ATC 2023, section 6).

Each chooses one of the nodes that fit and the GPUs on it. Scores are whole points of 100, as in Kubernetes;
ties go to the first node, and a share goes to the fullest GPU that fits unless the policy says otherwise.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Protocol

import numpy as np

from scheduler.core.capacity.node_capacity import Bools, Ints
from scheduler.core.capacity.placement import NodePlacer
from scheduler.core.model.snapshot import WHOLE_MILLI, TaskShape

INFEASIBLE = -1


class BaselinePolicy(Protocol):
    """Return a node index and GPU slots for a pod, or None where it fits nowhere."""

    def __call__(self, pod: TaskShape) -> tuple[int, tuple[int, ...]] | None: ...


class _NodeChooser(ABC):
    """Chooses a node that fits, and its fullest GPUs that fit."""

    def __init__(self, floor: NodePlacer, seed: int) -> None:
        self.floor = floor
        self.random = random.Random(~seed)
        self.most_cpu = max(int(floor.cpu_free.max()), 1)
        self.gpus_of = np.array([len(gpus) for gpus in floor.gpus])
        self.most_milli = max(int(self.gpus_of.max()), 1) * WHOLE_MILLI

    def __call__(self, pod: TaskShape) -> tuple[int, tuple[int, ...]] | None:
        fits = self.floor.capacity(pod) > 0
        if not fits.any():
            return None
        node = self.choose_node(pod, fits)
        return node, self.choose_slots(pod, node)

    @abstractmethod
    def choose_node(self, pod: TaskShape, fits: Bools) -> int:
        """Return the index of one of the nodes that fit."""

    def choose_slots(self, pod: TaskShape, node: int) -> tuple[int, ...]:
        free = self.floor.free_milli[node]
        return tuple(
            sorted(self.fitting_slots(pod, node), key=lambda slot: int(free[slot]))[: pod.request.gpus]
        )

    def fitting_slots(self, pod: TaskShape, node: int) -> list[int]:
        return [
            slot
            for slot in range(self.gpus_of[node])
            if self.floor.free_milli[node, slot] >= pod.request.milli
        ]

    def free(self) -> Ints:
        return np.asarray(self.floor.free_milli.sum(axis=1), dtype=np.int64)


class _Scored(_NodeChooser):
    """Chooses the node with the highest score."""

    def choose_node(self, pod: TaskShape, fits: Bools) -> int:
        return int(np.where(fits, self.scores(pod), INFEASIBLE).argmax())

    @abstractmethod
    def scores(self, pod: TaskShape) -> Ints:
        """Return the score of each node."""


class Random(_NodeChooser):
    """Random node and random GPUs that fit."""

    def choose_node(self, pod: TaskShape, fits: Bools) -> int:
        return self.random.choice(fits.nonzero()[0].tolist())

    def choose_slots(self, pod: TaskShape, node: int) -> tuple[int, ...]:
        return tuple(self.random.sample(self.fitting_slots(pod, node), pod.request.gpus))


class BestFit(_Scored):
    """Least CPU and GPU left, as parts of the largest node, weighted equally."""

    def scores(self, pod: TaskShape) -> Ints:
        cpu = (self.floor.cpu_free - pod.request.cpu_milli) / self.most_cpu
        gpu = (self.free() - pod.request.total_milli) / self.most_milli
        return np.asarray(100 * (1 - (cpu + gpu) / 2), dtype=np.int64)


class DotProd(_Scored):
    """Smallest dot product of free and requested resources (Grandl et al., SIGCOMM 2014)."""

    def scores(self, pod: TaskShape) -> Ints:
        cpu = self.floor.cpu_free / self.most_cpu * (pod.request.cpu_milli / self.most_cpu)
        gpu = self.free() / self.most_milli * (pod.request.total_milli / self.most_milli)
        return np.asarray(100 * (1 - (cpu + gpu) / 2), dtype=np.int64)


class GpuPacking(_Scored):
    """First GPUs in use, then idle GPUs of nodes in use, then idle nodes (Weng et al., NSDI 2022)."""

    def scores(self, pod: TaskShape) -> Ints:
        free = self.floor.free_milli
        if not pod.request.gpus:
            return np.zeros(len(free), dtype=np.int64)
        idle = (free == WHOLE_MILLI).sum(axis=1)
        fits = free >= pod.request.milli
        shared = np.where(fits & (free < WHOLE_MILLI), free, 0)
        opened = np.maximum(pod.request.gpus - (shared > 0).sum(axis=1), 0)
        tightest = np.sort(np.where(shared > 0, shared, 10 * WHOLE_MILLI), axis=1)[:, : pod.request.gpus].sum(
            axis=1
        )
        points = np.where(opened > 0, np.maximum(50 - opened, 33), np.maximum(100 - tightest // 100, 50))
        return np.asarray(np.where(idle == self.gpus_of, np.maximum(33 - idle, idle), points), dtype=np.int64)


class GpuClustering(_Scored):
    """Groups pods with equal numbers of GPUs, or with shares, on the same nodes (Xiao et al., OSDI 2018)."""

    def __init__(self, floor: NodePlacer, seed: int) -> None:
        super().__init__(floor, seed)
        self._kinds = np.zeros(len(floor.nodes), dtype=np.int64)
        self._nodes_by_kind: dict[int, Bools] = {}

    def __call__(self, pod: TaskShape) -> tuple[int, tuple[int, ...]] | None:
        chosen = super().__call__(pod)
        if chosen is not None and pod.request.gpus:
            self._nodes_with_kind(pod)[chosen[0]] = True
            self._kinds[chosen[0]] = sum(here[chosen[0]] for here in self._nodes_by_kind.values())
        return chosen

    def scores(self, pod: TaskShape) -> Ints:
        if not pod.request.gpus:
            return np.zeros(len(self._kinds), dtype=np.int64)
        used = 25 * (self.most_milli - self.free()) // self.most_milli
        alike = self._nodes_with_kind(pod)
        group = np.where(alike, np.where(self._kinds == 1, 75, 50), np.where(self._kinds == 0, 25, 0))
        return np.asarray(group + used, dtype=np.int64)

    def _nodes_with_kind(self, pod: TaskShape) -> Bools:
        kind = pod.request.gpus if pod.request.uses_whole_gpus else 0
        return self._nodes_by_kind.setdefault(kind, np.zeros(len(self._kinds), dtype=bool))


BASELINES: dict[str, Callable[[NodePlacer, int], BaselinePolicy]] = {
    "bestfit": BestFit,
    "dotprod": DotProd,
    "gpupacking": GpuPacking,
    "gpuclustering": GpuClustering,
    "random": Random,
}
