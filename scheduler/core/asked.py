"""What tasks ask in each pool and how often, counted by difference from photograph to photograph."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from scheduler.core.cluster import WHOLE_MILLI, Ask, PendingRow, PoolId, RunningRow

EXPECTED = {Ask(gpus, WHOLE_MILLI, 0, 0): 4 for gpus in (1, 2, 4, 8)}
"""Asked where little else is known: whole GPUs, one or more on one node."""


class Asked:
    """What will be asked soon is best known from who is here and who waits, also from held jobs: they come.

    To that belongs ``EXPECTED``, which guides the first jobs of an idle pool and is outnumbered in a busy one.
    """

    def __init__(self) -> None:
        self._counts: dict[PoolId, Counter[Ask]] = {}

    def change(self, came: Iterable[object], left: Iterable[object] = ()) -> None:
        """Count the jobs among rows that came, and no more those that left."""
        for row in left:
            self._add(row, -1)
        for row in came:
            self._add(row, +1)

    def in_pool(self, pool: PoolId) -> Counter[Ask]:
        """By request, how many tasks run in a pool or could run there."""
        return Counter(EXPECTED) + self._counts.get(pool, Counter())

    def _add(self, row: object, sign: int) -> None:
        pools: Iterable[PoolId]
        if isinstance(row, RunningRow):
            pools, asks = (row.pool,), _of_running(row)
        elif isinstance(row, PendingRow):
            pools, asks = dict.fromkeys(row.pools), _of_pending(row)
        else:
            return
        for pool in pools:
            counts = self._counts.setdefault(pool, Counter())
            for ask, tasks in asks:
                counts[ask] += sign * tasks
                if not counts[ask]:
                    del counts[ask]


def _of_running(row: RunningRow) -> list[tuple[Ask, int]]:
    """What its tasks ask, and how many of them."""
    return [
        (
            Ask(
                len(task.gpus), max((gpu.milli for gpu in task.gpus), default=WHOLE_MILLI), task.cpu_milli,
                task.memory_mib, row.gpu_model, row.min_gpu_memory_mib, task.share_mib, row.mig_profile,
                row.min_compute_capability,
            ),
            1,
        )
        for task in row.tasks
    ]  # fmt: skip


def _of_pending(row: PendingRow) -> list[tuple[Ask, int]]:
    if row.asks:
        return [(ask, 1) for ask in row.asks]
    return [(row.ask if row.gpus_per_task else row.ask._replace(milli=WHOLE_MILLI), row.tasks)]
