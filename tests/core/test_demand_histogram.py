"""What is asked in a pool: who runs there and who could, counted by difference."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from scheduler.core.capacity.fragmentation import DEFAULT_DEMAND, DemandHistogram
from scheduler.core.model.snapshot import GpuConstraints, PendingRow, PoolId, RunningRow, TaskRequest
from tests.core.cluster_builder import MAIN, runs, waits

ELSEWHERE = PoolId("elsewhere")


def in_main(running: list[RunningRow], pending: list[PendingRow]) -> Counter[TaskRequest]:
    asked = DemandHistogram()
    asked.update([*running, *pending])
    return asked.in_pool(MAIN)


def test_running_and_waiting_demand_is_counted() -> None:
    running = runs("r", "vision", ("n1", [0, 1]), ("n2", [0]), milli=400, constraints=GpuConstraints("A100"))
    waiting = [
        waits("w", "vision", 4, tasks=3),
        waits("other", "vision", pools=(ELSEWHERE,)),
        waits("each", "vision", task_requests=(TaskRequest(1, 500, 1, 1), TaskRequest(1, 500, 1, 1))),
    ]
    asked = in_main([running], waiting)
    assert asked - Counter(DEFAULT_DEMAND) == {
        TaskRequest(
            2, 400, running.tasks[0].cpu_milli, running.tasks[0].memory_mib, GpuConstraints("A100")
        ): 1,
        TaskRequest(
            1, 400, running.tasks[1].cpu_milli, running.tasks[1].memory_mib, GpuConstraints("A100")
        ): 1,
        waiting[0].request: 3,
        TaskRequest(1, 500, 1, 1): 2,
    }
    assert in_main([running], waiting[::-1]) == asked


ROWS: list[RunningRow | PendingRow] = [
    *(waits(f"w{i}", "vision", 1 + i % 3, pools=((MAIN,), (ELSEWHERE, MAIN))[i % 2]) for i in range(6)),
    *(runs(f"r{i}", "vision", (f"n{i % 2}", [i]), milli=(1000, 500)[i % 2]) for i in range(6)),
]


@given(st.lists(st.sets(st.sampled_from(range(len(ROWS)))), min_size=1, max_size=5))
def test_incremental_and_fresh_counts_agree(snapshots: list[set[int]]) -> None:
    kept, before = DemandHistogram(), set[int]()
    for snapshot in snapshots:
        kept.update([ROWS[i] for i in snapshot - before], [ROWS[i] for i in before - snapshot])
        before = snapshot
        fresh = DemandHistogram()
        fresh.update(ROWS[i] for i in snapshot)
        assert kept.in_pool(MAIN) == fresh.in_pool(MAIN)
        assert kept.in_pool(ELSEWHERE) == fresh.in_pool(ELSEWHERE)
