"""What tasks ask in each pool and how often, counted by difference from photograph to photograph."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from scheduler.core.cluster import WHOLE_MILLI, Ask, PendingRow, PoolId, RunningRow

EXPECTED = {Ask(gpus, WHOLE_MILLI, 0, 0): 4 for gpus in (1, 2, 4, 8)}
"""Asked where little else is known: whole GPUs, one or more on one node."""

Row = RunningRow | PendingRow


class Asked:
    """What will be asked soon is best known from who is here and who waits, also from held jobs: they come.

    To that belongs ``EXPECTED``, which guides the first jobs of an idle pool and is outnumbered in a busy one.
    """

    def __init__(self) -> None:
        self._rows: dict[int, Row] = {}  # by id; as a row is held here, no other takes its id
        self._counts: dict[PoolId, Counter[Ask]] = {}

    def count(self, running: Iterable[RunningRow], pending: Iterable[PendingRow]) -> None:
        """Count these rows, and nothing else that was counted before."""
        now: dict[int, Row] = {id(row): row for row in running}
        now.update((id(row), row) for row in pending)
        for key in self._rows.keys() - now.keys():
            self._add(self._rows[key], -1)
        for key in now.keys() - self._rows.keys():
            self._add(now[key], +1)
        self._rows = now

    def in_pool(self, pool: PoolId) -> Counter[Ask]:
        """By request, how many tasks run in a pool or could run there."""
        return Counter(EXPECTED) + self._counts.get(pool, Counter())

    def _add(self, row: Row, sign: int) -> None:
        pools: Iterable[PoolId]
        if isinstance(row, RunningRow):
            pools, asks = (row.pool,), _of_running(row)
        else:
            pools, asks = dict.fromkeys(row.pools), _of_pending(row)
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
