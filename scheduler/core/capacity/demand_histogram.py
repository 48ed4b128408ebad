"""Histogram of the task requests in each pool, updated by differences between snapshots."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from portal.domain.feasibility import gpu_constraints
from scheduler.core.model.snapshot import WHOLE_MILLI, PendingRow, PoolId, RunningRow, TaskRequest

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
            pools, asks = (row.pool,), _running_requests(row)
        elif isinstance(row, PendingRow):
            pools, asks = dict.fromkeys(row.pools), _pending_requests(row)
        else:
            return
        for pool in pools:
            counts = self._counts.setdefault(pool, Counter())
            for ask, tasks in asks:
                counts[ask] += sign * tasks
                if not counts[ask]:
                    del counts[ask]


def _running_requests(row: RunningRow) -> list[tuple[TaskRequest, int]]:
    return [
        (
            TaskRequest(
                len(task.gpus), max((gpu.milli for gpu in task.gpus), default=WHOLE_MILLI), task.cpu_milli,
                task.memory_mib, share_mib=task.share_mib, **gpu_constraints(row)._asdict(),
            ),
            1,
        )
        for task in row.tasks
    ]  # fmt: skip


def _pending_requests(row: PendingRow) -> list[tuple[TaskRequest, int]]:
    if row.task_requests:
        return [(ask, 1) for ask in row.task_requests]
    return [
        (row.task_request if row.gpus_per_task else row.task_request._replace(milli=WHOLE_MILLI), row.tasks)
    ]
