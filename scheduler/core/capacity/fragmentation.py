"""Fragmentation: how much of a node's free GPU capacity typical requests cannot use, as a placement score.

The measure is that of Weng et al., "Beware of Fragmentation: Scheduling GPU-Sharing Workloads with
Fragmentation Gradient Descent" (FGD), USENIX ATC 2023. For a node n and a request m of the typical mix M,
drawn with probability p(m):

    F(n)     = sum over m of p(m) x (milli-GPU free on n that m cannot use)
    score(n) = floor(100 x sigmoid((F(n) - F(n with the task)) / 1000))

The largest score wins, ties go to the first node. Rounding to whole points makes nodes of nearly equal score
tie, so that tasks gather on the first of them instead of fragmenting many nodes a little.

FGD tests for each GPU whether *one* task m could use it. That misses a node whose CPU is nearly used up: the
first task fits, the second does not, and the other free GPUs are unusable. F here is therefore a mean of two
sums: FGD's own, and one that grants the j-th emptiest GPU to m only where j tasks m fit at once.
docs/decisions/placement-score.md has measurements.

All sums are of integers (counts of requests x milli), so the score does not depend on the order of rows.

``DemandHistogram`` counts the requests of a pool, from which the typical mix is taken.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from portal.domain.jobs.feasibility import GpuKind, milli_by_memory
from scheduler.core.model.snapshot import WHOLE_MILLI, PendingRow, PoolId, RunningRow, TaskRequest

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

TYPICAL_FRACTION = 0.95
"""The typical mix is the most frequent requests that make up this fraction of all."""
WEIGHT_TOTAL = 20
GROUP_WEIGHT = 3
"""Weight, of ``WEIGHT_TOTAL``, of the sum over tasks that fit at once; the rest is FGD's own sum."""
MAX_LEVELS = 40
"""Distinct amounts of CPU, memory or milli; with more, amounts are rounded up to the next kept one."""
DEFAULT_DEMAND = {TaskRequest(gpus, WHOLE_MILLI, 0, 0): 4 for gpus in (1, 2, 4, 8)}
"""Prior for pools with few jobs: whole GPUs, one or more on one node."""


class DemandHistogram:
    """Expected demand: the requests of running, pending and held jobs, plus ``DEFAULT_DEMAND``.

    The prior matters in an idle pool and is outnumbered in a busy one.
    """

    def __init__(self) -> None:
        self._counts: dict[PoolId, Counter[TaskRequest]] = {}

    def update(self, added: Iterable[object], removed: Iterable[object] = ()) -> None:
        """Add the jobs among ``added`` rows and subtract those among ``removed``."""
        for row in removed:
            self._add(row, -1)
        for row in added:
            self._add(row, +1)

    def in_pool(self, pool: PoolId) -> Counter[TaskRequest]:
        """Return the number of tasks by request that run or could run in the pool."""
        return Counter(DEFAULT_DEMAND) + self._counts.get(pool, Counter())

    def _add(self, row: object, sign: int) -> None:
        pools: Iterable[PoolId]
        if isinstance(row, RunningRow):
            pools, asks = (row.pool,), [(task.request(row.constraints), 1) for task in row.tasks]
        elif isinstance(row, PendingRow):
            pools = dict.fromkeys(row.pools)
            asks = [(ask, 1) for ask in row.task_requests] or [(row.request, row.tasks)]
        else:
            return
        for pool in pools:
            counts = self._counts.setdefault(pool, Counter())
            for ask, tasks in asks:
                counts[ask] += sign * tasks
                if not counts[ask]:
                    del counts[ask]


def typical_mix(asks: Mapping[TaskRequest, int]) -> dict[TaskRequest, int]:
    """Return the most frequent requests that make up ``TYPICAL_FRACTION`` of all, with their counts.

    Requests as frequent as the last one are excluded unless they sort before it.
    """
    wanted = TYPICAL_FRACTION * sum(asks.values())
    mix: dict[TaskRequest, int] = {}
    seen = 0
    for ask, count in sorted(asks.items(), key=lambda pair: (-pair[1], _sortable(pair[0]))):
        if seen >= wanted:
            break
        mix[ask] = count
        seen += count
    return mix


def _sortable(ask: TaskRequest) -> tuple[tuple[bool, object], ...]:
    model, memory_mib, *others = ask.constraints
    values = (*ask[:4], model, memory_mib, ask.share_mib, *others)
    return tuple((value is not None, value) for value in values)


class CandidateTask(NamedTuple):
    """A task on each of some nodes: its milli per GPU there, and what CPU and memory it leaves; (nodes,)."""

    gpus: int
    milli: Ints
    cpu_left: Ints
    memory_left: Ints


class Fragmentation:
    """The typical mix as tables, so that F of a node takes a few lookups per GPU.

    Args:
        kinds: the kinds of GPU in the pool; nodes refer to them by index.
        mix: the typical requests and their counts; see ``typical_mix``.
        group_weight: of ``WEIGHT_TOTAL``, the weight of the sum over tasks that fit at once; 0 is FGD.
    """

    def __init__(
        self, kinds: Sequence[GpuKind], mix: Mapping[TaskRequest, int], group_weight: int = GROUP_WEIGHT
    ) -> None:
        self._single_weight, self._group_weight = WEIGHT_TOTAL - group_weight, group_weight
        self.weight = sum(mix.values())
        with_gpu = {ask: count for ask, count in mix.items() if ask.gpus}
        # Requests without a GPU can use no free GPU capacity: they count in FGD's sum, as FGD has it.
        self._per_milli = self._single_weight * self.weight + group_weight * sum(with_gpu.values())
        self._milli = _Levels(_milli(a, kind) for a in with_gpu for kind in kinds)
        self._cpu = _Levels(_per_share(a.cpu_milli, a) for a in with_gpu)
        self._memory = _Levels(_per_share(a.memory_mib, a) for a in with_gpu)
        self._milli_at = self._milli.of(np.arange(WHOLE_MILLI + 1))
        self._most_gpus = max((a.gpus for a in with_gpu if _uses_several_whole_gpus(a)), default=0)
        steps = (len(kinds), len(self._milli), len(self._cpu), len(self._memory))
        singles = np.zeros(steps, dtype=np.int64)
        groups = np.zeros((2, len(kinds), self._most_gpus + 1, len(self._cpu), len(self._memory)), np.int64)
        for ask, count in with_gpu.items():
            cpu = self._cpu.needed(_per_share(ask.cpu_milli, ask))
            memory = self._memory.needed(_per_share(ask.memory_mib, ask))
            constraints = ask.constraints
            for k, kind in enumerate(kinds):
                if not constraints.accepts(kind) or _milli(ask, kind) > WHOLE_MILLI:
                    continue
                if _uses_several_whole_gpus(ask):
                    groups[0, k, ask.gpus, cpu, memory] += count
                    groups[1, k, ask.gpus, cpu, memory] += count * ask.gpus
                else:
                    singles[k, self._milli.needed(_milli(ask, kind)), cpu, memory] += count
        # After cumsum, a cell counts the requests that need *at most* this much of each resource.
        self._singles: Ints = singles.cumsum(1).cumsum(2).cumsum(3).ravel()
        self._groups: Ints = groups.cumsum(2).cumsum(3).cumsum(4).reshape(2, -1)

    def unusable(self, free: Ints, kind: Ints, cpu: Ints, memory: Ints) -> Ints:
        """Return F of nodes, in milli x requests of the mix x ``WEIGHT_TOTAL``.

        Args:
            free: milli free on each GPU, largest first; (nodes, GPUs).
            kind: index of each node's kind of GPU; (nodes,).
            cpu: milli-CPU free; (nodes,).
            memory: MiB free; (nodes,).
        """
        tasks = np.arange(1, free.shape[1] + 1)
        cpus, memories = np.maximum(cpu, 0)[:, None] // tasks, np.maximum(memory, 0)[:, None] // tasks
        space = self._cpu.of(cpus) * len(self._memory) + self._memory.of(memories)
        kinds = kind[:, None]
        area = len(self._cpu) * len(self._memory)
        at = (kinds * len(self._milli) + self._milli_at[free]) * area
        granted = self._single_weight * self._singles[at + space[:, :1]]
        if self._group_weight:
            granted += self._group_weight * self._singles[at + space]
        usable = (granted * free).sum(axis=1)
        if self._most_gpus:
            whole = (free == WHOLE_MILLI).sum(axis=1)[:, None]
            at = (kinds * (self._most_gpus + 1) + np.minimum(whole // tasks, self._most_gpus)) * area + space
            usable += self._single_weight * whole[:, 0] * WHOLE_MILLI * self._groups[0, at[:, 0]]
            usable += self._group_weight * WHOLE_MILLI * self._groups[1, at].sum(axis=1)
        return np.asarray(self._per_milli * free.sum(axis=1) - usable, dtype=np.int64)

    def milli(self, lost: int) -> float:
        """Convert F to thousandths of a GPU."""
        return lost / (WEIGHT_TOTAL * self.weight)

    def score(self, before: Ints, after: Ints) -> Ints:
        """Return 0 to 100 for a change of F: 50 is no change, more is less fragmentation."""
        healed = (before - after) / (WEIGHT_TOTAL * WHOLE_MILLI * self.weight)
        return np.asarray(100.0 / (1.0 + np.exp(-healed)), dtype=np.int64)

    def best(
        self, task: CandidateTask, free: Ints, fits: Bools, kind: Ints, before: Ints
    ) -> tuple[Ints, Ints]:
        """Return the score of placing a task on each of some nodes that can take it, and the GPU to share.

        Args:
            task: what it takes there, and the CPU and memory it leaves.
            free: milli free on each GPU, largest first; (nodes, GPUs).
            fits: whether the task fits on that GPU; (nodes, GPUs).
            kind: index of each node's kind of GPU; (nodes,).
            before: F of the nodes as they are; (nodes,).

        Returns:
            Scores, and the milli free on the GPU to share (0 for whole or several GPUs).
        """
        if task.gpus != 1 or (task.milli == WHOLE_MILLI).all():
            after = free
            if task.gpus:
                fullest_first = fits[:, ::-1].cumsum(axis=1)[:, ::-1]
                after = free - np.where(fits & (fullest_first <= task.gpus), task.milli[:, None], 0)
                after = np.sort(after, axis=1)[:, ::-1]
            points = self.score(before, self.unusable(after, kind, task.cpu_left, task.memory_left))
            return points, np.zeros(len(points), dtype=np.int64)
        different = fits.copy()
        different[:, 1:] &= (free[:, 1:] != free[:, :-1]) | ~fits[:, :-1]
        node, slot = different.nonzero()
        after = free[node]
        after[np.arange(len(node)), slot] -= task.milli[node]
        after = np.sort(after, axis=1)[:, ::-1]
        points = self.score(
            before[node], self.unusable(after, kind[node], task.cpu_left[node], task.memory_left[node])
        )
        # Of a node's equally good GPUs take the fullest, which comes last.
        first = np.flatnonzero(np.diff(node, prepend=-1))
        width = free.shape[1]
        ranked = np.maximum.reduceat(points * width + slot, first)
        return ranked // width, free[node[first], ranked % width]


class _Levels:
    """The distinct requested amounts of one resource as steps; step 0 is less than the smallest amount."""

    def __init__(self, amounts: Iterable[int]) -> None:
        different = sorted(set(amounts))
        if len(different) > MAX_LEVELS:
            last = len(different) - 1
            different = sorted({different[-(-i * last // (MAX_LEVELS - 1))] for i in range(MAX_LEVELS)})
        self._steps: Ints = np.array(different, dtype=np.int64)

    def __len__(self) -> int:
        return len(self._steps) + 1

    def of(self, free: Ints) -> Ints:
        """Return the highest step that each free amount suffices for."""
        return np.asarray(self._steps.searchsorted(free, side="right"), dtype=np.int64)

    def needed(self, amount: int) -> int:
        """Return the step that a request for ``amount`` needs."""
        return int(self._steps.searchsorted(amount)) + 1


def _uses_several_whole_gpus(ask: TaskRequest) -> bool:
    return ask.gpus > 1 and ask.uses_whole_gpus


def _milli(ask: TaskRequest, kind: GpuKind) -> int:
    """Return the milli that the request takes of each GPU of this kind."""
    if ask.share_mib is None:
        return ask.milli
    return min(milli_by_memory(ask.share_mib, kind.memory_mib), WHOLE_MILLI + 1)


def _per_share(amount: int, ask: TaskRequest) -> int:
    """Return the amount per GPU share: a task of several shares counts as that many tasks of one share."""
    return amount if ask.gpus <= 1 or _uses_several_whole_gpus(ask) else -(-amount // ask.gpus)
