"""Divides a model into replicated pipeline stages on a topology, by PipeDream's dynamic programme.

Equations of section 3.1 of "PipeDream: Generalized Pipeline Parallelism for DNN Training" (SOSP 2019), for
level k with bandwidth B_k, machines m, layers i..j, parameters w and output a (bytes)::

    T^k(i..j, m) = (1/m) max(A^{k-1}(i..j, m_{k-1}), 2 (m-1) sum w / B_k)
    A^k(i..j, m) = min(T^k(i..j, m), min over s, m' of
                       max(A^k(i..s, m-m'), 2 a_s / B_k, T^k(s+1..j, m')))

with A^0 the sum of the compute times. The cost model ``original`` is that of the optimizer published with
the paper: ``T = (A^{k-1} + 4 (m-1) sum w / (B_k m)) / m``, transfers divided by the replicas of the stage,
the synchronization of the first stage divided by the machines of the level below, and cuts within parallel
branches if the profile lists them.

Memory: a stage keeps the activations and parameters of each minibatch in flight, which are
``ceil(machines from this stage on / replicas of this stage)``.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import NamedTuple

import numpy as np

from scheduler.planner.cut_points import CutPoints, Floats, cuts_of_merged_layers
from scheduler.planner.profile import Profile

MAX_STEPS = 2_000_000_000
"""Maximum number of examined combinations; layers are merged until there are no more."""
MAX_CUTS, MIN_CUTS = 400, 24
"""Maximum number of cuts that are examined; a topology for which fewer than the minimum remain is refused."""


class CostModel(Enum):
    PAPER = "paper"
    ORIGINAL = "original"


class PlanError(ValueError):
    """No such plan is possible; the message says why."""


class BandwidthLevel(NamedTuple):
    """A level of the topology, innermost first: ``machines`` of the level below, each with this bandwidth."""

    machines: int
    bandwidth: float
    """Bytes per second."""


@dataclass(frozen=True)
class Stage:
    """Cuts ``start`` to ``end`` (exclusive) of the model on ``replicas`` GPUs.

    ``machines`` are the replicas by level, innermost first. ``memory_bytes`` is that of one GPU, for
    ``in_flight`` minibatches.
    """

    start: int
    end: int
    machines: tuple[int, ...]
    in_flight: int
    compute_s: float
    parameter_bytes: float
    activation_bytes: float

    @property
    def replicas(self) -> int:
        return math.prod(self.machines)

    @property
    def memory_bytes(self) -> float:
        return self.in_flight * (self.activation_bytes + self.parameter_bytes)


@dataclass(frozen=True)
class Partition:
    """A plan. ``stage_time_s`` is the time per minibatch of the slowest stage or transfer."""

    stages: tuple[Stage, ...]
    stage_time_s: float

    def ranks(self, levels: Sequence[BandwidthLevel]) -> list[list[int]]:
        """Return the GPUs of each stage, numbered node by node."""
        return _ranks(deque(self.stages), levels, len(levels) - 1)

    @property
    def config(self) -> str:
        """Return the replicas of the stages: ``15-1``."""
        return "-".join(str(stage.replicas) for stage in self.stages)


class Partitioner:
    """Finds the best partitions of a profile on a topology (innermost level first)."""

    def __init__(
        self,
        profile: Profile,
        levels: Sequence[BandwidthLevel],
        cost: CostModel = CostModel.PAPER,
        memory_bytes: float | None = None,
        max_steps: int = MAX_STEPS,
        searches: Sequence[Sequence[int | None]] | None = None,
    ) -> None:
        """Merge layers if more than ``max_steps`` combinations would have to be examined.

        ``searches`` are the ``replicas`` of all calls of ``best`` that will be made; None is one for any number.
        Raise PlanError if that is in vain.
        """
        self.levels, self.cost, self.memory_bytes = tuple(levels), cost, memory_bytes
        limit = self._most_cuts(max_steps, searches or [[None] * len(levels)])
        self.all_cuts: CutPoints = profile.cut_points
        self.branches_merged = cost is CostModel.ORIGINAL and profile.branches_merged
        if cost is CostModel.ORIGINAL and profile.states is not None:
            if len(profile.states) <= limit:
                self.all_cuts = profile.states
            else:
                self.branches_merged = True
        count = len(self.all_cuts)
        self._kept = cuts_of_merged_layers(self.all_cuts, limit) if count > limit else list(range(count))
        self.cuts = self.all_cuts if len(self._kept) == count else self.all_cuts.select(self._kept)
        self.compute, self.parameters, self.activations = (
            _intervals(sums, self.cuts)
            for sums in (self.cuts.compute_s, self.cuts.parameter_bytes, self.cuts.activation_bytes)
        )
        self.finite_parameters = np.where(np.isinf(self.parameters), 0.0, self.parameters)

    def _most_cuts(self, max_steps: int, searches: Sequence[Sequence[int | None]]) -> int:
        """Return how many cuts can be examined on this topology. Raise PlanError if they are hardly any."""
        pairs = [sum(each) for each in zip(*(self._pairs(one) for one in searches), strict=True)]

        def steps(count: int) -> int:
            rows = [*[count] * (len(pairs) - 1), 1]
            return sum(count**2 * row * pair for row, pair in zip(rows, pairs, strict=True))

        found = bisect_right(range(1, MAX_CUTS + 1), max_steps, key=steps)
        if found < MIN_CUTS:
            machines = " x ".join(str(level.machines) for level in self.levels)
            raise PlanError(
                f"{machines} GPUs are too many to plan: {steps(MIN_CUTS):.1e} combinations for {MIN_CUTS} layers, at "
                f"most {max_steps:.0e}. Describe the GPUs of a node as a level of its own."
            )
        return found

    def _pairs(self, replicas: Sequence[int | None]) -> list[int]:
        """Return by level how many pairs of machines before and in the last stage a search examines.

        With a memory limit, a level is searched for each number of minibatches that may be in flight in its group.
        """
        pairs: list[int] = []
        groups = {1}
        for level, fixed in zip(reversed(self.levels), reversed(replicas), strict=True):
            machines = level.machines
            if fixed is None:
                pairs.append(len(groups) * (machines * (machines - 1) // 2))
            else:
                pairs.append(len(groups) * (machines - fixed))
            if self.memory_bytes is not None:
                groups = {
                    count_in_flight(machines, group, used, count)
                    for group in groups
                    for used in range(1, machines + 1)
                    for count in (range(1, used + 1) if fixed is None else [min(fixed, used)])
                }
        return pairs[::-1]

    def best(self, replicas: Sequence[int | None] | None = None) -> Partition:
        """Return the best partition of the whole model, or raise PlanError.

        ``replicas`` fixes the replicas of each stage by level; None is any number.
        """
        search = _Search(self, replicas or [None] * len(self.levels))
        last, top = len(self.cuts) - 1, len(self.levels) - 1
        stage_time_s = float(search.tables(top, 1)[self.levels[top].machines][0, last])
        if math.isinf(stage_time_s):
            raise PlanError(self._impossible())
        return Partition(tuple(search.stages(top, 1, 0, last, ())), stage_time_s)

    def stage(self, first: int, last: int, machines: tuple[int, ...], in_flight: int) -> Stage:
        """Return the stage of the cuts ``first`` to ``last``, numbered without those that were merged."""
        amounts = (float(one[first, last]) for one in (self.compute, self.parameters, self.activations))
        start = self._kept[first - 1] + 1 if first else 0
        return Stage(start, self._kept[last] + 1, machines, in_flight, *amounts)

    def _impossible(self) -> str:
        gpus = math.prod(level.machines for level in self.levels)
        if self.memory_bytes is None:
            return f"{len(self.all_cuts)} layers cannot be divided into such stages for {gpus} GPUs."
        return (
            f"No division into such stages on {gpus} GPUs keeps the minibatches in flight within "
            f"{self.memory_bytes:.0f} bytes per GPU."
        )


def _ranks(stages: deque[Stage], levels: Sequence[BandwidthLevel], level: int) -> list[list[int]]:
    """Take the stages of one group of this level, and return their GPUs within the group."""
    if level < 0:
        stages.popleft()
        return [[0]]
    size = math.prod(below.machines for below in levels[:level])
    placed: list[list[int]] = []
    position = 0
    while position < levels[level].machines:
        replicas = stages[0].machines[level]
        inner = _ranks(stages, levels, level - 1)
        offsets = [(position + machine) * size for machine in range(replicas)]
        placed += [[offset + rank for offset in offsets for rank in ranks] for ranks in inner]
        position += replicas
    return placed


def count_in_flight(machines: int, group: int, used: int, replicas: int) -> int:
    """Return the minibatches in flight on one of ``replicas``, the last of ``used`` of ``machines``.

    ``group`` minibatches are in flight in the whole group, 1 at the outermost level.
    """
    after = machines - used + (group - 1) * machines
    return math.ceil((after + replicas) / replicas)


def _intervals(sums: Floats, cuts: CutPoints) -> Floats:
    """Return the amount between cuts: row i, column j is that after cut i - 1 up to cut j; else infinite."""
    between = np.where(cuts.before, sums[None, :] - sums[:, None], np.inf)
    return np.vstack([sums, between])


class _Search:
    """One search. ``replicas`` restricts the replicas of a stage by level; None is any number.

    A *group* is what one machine of a level is: a GPU, and above that all machines of the level below. All
    tables are kept by level and by the minibatches in flight in the group.
    """

    def __init__(self, plan: Partitioner, replicas: Sequence[int | None]) -> None:
        self._plan, self._replicas = plan, replicas
        self._count = len(plan.cuts)
        self.group_times = cache(self._group_times)
        self.tables = cache(self._fill_tables)
        self._last_times = cache(self._time_last_stages)

    def in_flight(self, level: int, group: int, used: int, replicas: int) -> int:
        """Return the minibatches in flight of a stage that is the last of ``used`` machines of its group.

        ``group`` are those in flight in the group; without a memory limit they do not matter.
        """
        if self._plan.memory_bytes is None:
            return 1
        return count_in_flight(self._plan.levels[level].machines, group, used, replicas)

    def _group_times(self, level: int, in_flight: int) -> Floats:
        """Return the time of one group for each interval of cuts, infinite where it is impossible."""
        plan = self._plan
        if level < 0:
            limit = math.inf if plan.memory_bytes is None else plan.memory_bytes
            return np.where(in_flight * (plan.activations + plan.parameters) <= limit, plan.compute, np.inf)
        table = self.tables(level, in_flight)[plan.levels[level].machines]
        return np.vstack([table, np.full((1, self._count), np.inf)])

    def _single_times(self, level: int, replicas: int, in_flight: int, shared_by: int) -> Floats:
        """Return T^k of each interval; ``shared_by`` machines below share a synchronization (original)."""
        group = self.group_times(level - 1, in_flight)
        parameters, bandwidth = self._plan.finite_parameters, self._plan.levels[level].bandwidth
        if self._plan.cost is CostModel.PAPER:
            return np.maximum(group, 2 * (replicas - 1) * parameters / bandwidth) / replicas
        sync = 4 * (replicas - 1) * parameters / (bandwidth * replicas) / shared_by
        return (group + sync) / replicas

    def _time_last_stages(self, level: int, replicas: int, in_flight: int) -> Floats:
        """Return the time of a stage after cut k up to cut j with its transfers, at row k, column j."""
        times = self._single_times(level, replicas, in_flight, 1)[1:]
        sent = 2 * self._plan.cuts.output_bytes / self._plan.levels[level].bandwidth
        if self._plan.cost is CostModel.PAPER:
            return np.maximum(times, sent[:, None])
        sent /= replicas
        onward = sent.copy()
        onward[-1] = 0.0
        return np.maximum(times, np.maximum(sent[:, None], onward[None, :]))

    def _one_stage(self, level: int, group: int, used: int) -> Floats:
        """Return the time of each interval as one stage on ``used`` machines."""
        if self._replicas[level] not in (None, used):
            return np.full((self._count, self._count), np.inf)
        below = self._plan.levels[level - 1].machines if level else 1
        flying = self.in_flight(level, group, used, used)
        return self._single_times(level, used, flying, below)[: self._count]

    def _choices(self, level: int, used: int) -> Sequence[int]:
        """Return the possible replicas of the last of several stages on ``used`` machines."""
        fixed = self._replicas[level]
        return range(1, used) if fixed is None else [fixed] if fixed < used else []

    def _fill_tables(self, level: int, group: int) -> dict[int, Floats]:
        """Return A^k by number of machines; the outermost level has only the intervals from the start."""
        rows = self._count if level < len(self._plan.levels) - 1 else 1
        tables: dict[int, Floats] = {}
        for used in range(1, self._plan.levels[level].machines + 1):
            best = self._one_stage(level, group, used)[:rows].copy()
            for replicas in self._choices(level, used):
                last = self._last_times(level, replicas, self.in_flight(level, group, used, replicas))
                before = tables[used - replicas]
                for row in range(rows):
                    np.minimum(best[row], np.maximum(before[row][:, None], last).min(axis=0), out=best[row])
            tables[used] = best
        return tables

    def stages(self, level: int, group: int, first: int, last: int, outer: tuple[int, ...]) -> list[Stage]:
        """Return the stages of a best partition of the cuts ``first`` to ``last`` with the fewest stages."""
        if level < 0:
            return [self._plan.stage(first, last, outer, group)]
        machines = self._plan.levels[level].machines
        limited = self._plan.memory_bytes is not None
        bound = self.tables(level, group if limited else 1)[machines][first, last]
        fewest: dict[int, Floats] = {}
        chosen: dict[int, list[tuple[int, int]]] = {}
        for used in range(1, machines + 1):
            count = np.where(self._one_stage(level, group, used)[first] <= bound, 1.0, np.inf)
            choice = [(-1, used)] * self._count
            for replicas in self._choices(level, used):
                times = self._last_times(level, replicas, self.in_flight(level, group, used, replicas))
                counts = np.where(times <= bound, fewest[used - replicas][:, None] + 1, np.inf)
                for end in np.flatnonzero(counts.min(axis=0) < count).tolist():
                    count[end], choice[end] = counts[:, end].min(), (int(counts[:, end].argmin()), replicas)
            fewest[used], chosen[used] = count, choice
        parts = []
        end, used = last, machines
        while used:
            cut, replicas = chosen[used][end]
            flying = count_in_flight(machines, group, used, replicas)
            parts.append(
                self.stages(level - 1, flying, first if cut < 0 else cut + 1, end, (replicas, *outer))
            )
            end, used = cut, used - replicas
        return [stage for part in reversed(parts) for stage in part]
