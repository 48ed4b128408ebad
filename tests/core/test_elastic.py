"""Elastic jobs in decisions: how far they start and grow, what holds them back, and that a carried-out plan holds."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from portal.domain.jobs.reasons import VerdictCode
from scheduler.core.decide import decide
from scheduler.core.model.apply_plan import apply_plan
from scheduler.core.model.policy import Policy
from scheduler.core.model.snapshot import PendingRow, RunningRow, Snapshot
from tests.core.cluster_builder import cluster, node, project, quota, runs, waits


def grows(job: str, of: str, ranks: tuple[int, ...], least: int) -> PendingRow:
    """What a running elastic job waits for."""
    return waits(job, of, tasks=len(ranks), ranks=ranks, min_tasks=least)


def some(job: str, of: str, places: list[tuple[str, int]], least: int) -> RunningRow:
    """An elastic job that runs, its ranks from 0 on, with one GPU each."""
    row = runs(job, of, *[(where, [index]) for where, index in places], min_tasks=least)
    return replace(row, tasks=tuple(replace(task, rank=rank) for rank, task in enumerate(row.tasks)))


def ranks_started(snapshot: Snapshot) -> dict[str, list[int]]:
    plan = decide(snapshot, Policy())
    return {start.job: [task.rank for task in start.tasks] for start in plan.starts}


def test_a_running_job_grows_as_far_as_there_is_room() -> None:
    held = some("e", "p", [("n0", 0)], 1)
    snapshot = cluster(
        [node("n0", 3)], [project("p")], running=[held], pending=[grows("e", "p", (4, 5, 6), 1)]
    )
    assert ranks_started(snapshot) == {"e": [4, 5]}


def test_an_elastic_job_starts_and_grows_within_a_limit() -> None:
    limits = [quota("p", 0, 2)]
    new = waits("e", "p", tasks=4, min_tasks=1)
    assert ranks_started(cluster([node("n0")], [project("p")], limits, pending=[new])) == {"e": [0, 1]}
    held = some("e", "p", [("n0", 0)], 1)
    snapshot = cluster(
        [node("n0")], [project("p")], limits, running=[held], pending=[grows("e", "p", (1, 2), 1)]
    )
    assert ranks_started(snapshot) == {"e": [1]}


def test_a_waiting_elastic_job_names_its_minimum() -> None:
    new = waits("e", "p", tasks=4, min_tasks=2)
    taken = runs("other", "p", ("n0", range(3)))
    plan = decide(cluster([node("n0")], [project("p")], running=[taken], pending=[new]), Policy())
    (verdict,) = plan.verdicts
    assert verdict.code is VerdictCode.INSUFFICIENT_RESOURCES
    assert verdict.message.startswith("Needs at least 2 × 1 GPU;") and verdict.details["needed_gpus"] == 2


def test_a_snapshot_after_growth_has_a_running_and_a_waiting_row() -> None:
    held = some("e", "p", [("n0", 0)], 1)
    before = cluster([node("n0", 2)], [project("p")], running=[held], pending=[grows("e", "p", (7, 8), 1)])
    after = apply_plan(before, decide(before, Policy()))
    (running,), (pending,) = after.running, after.pending
    assert [task.rank for task in running.tasks] == [0, 7]
    assert (pending.ranks, pending.tasks) == ((8,), 1)
    assert [gpu.used_milli for gpu in after.nodes[0].gpus] == [1000, 1000]


def test_a_rank_with_a_reserved_node_may_wait_again() -> None:
    """Found by chance: it keeps a place, somebody goes first, and then it need not wait after all."""
    running = [some("r0", "p", [("n0", 0)], 1), some("r1", "q", [("n1", 0)], 1)]
    pending = [
        grows("r0", "p", (1,), 1),
        grows("r1", "q", (1,), 1),
        waits("w0", "p", tasks=2),
        waits("w1", "q", tasks=2, age_s=1.0, priority=60),
    ]
    nodes, projects = [node("n0", 1), node("n1", 3)], [project("p"), project("q")]
    plan = decide(cluster(nodes, projects, running=running, pending=pending), Policy())
    assert sum(len(start.tasks) for start in plan.starts) == 2


def test_a_job_that_leaves_reserves_its_node_also_for_a_joining_rank() -> None:
    running = [some("r0", "q", [("n0", 0), ("n0", 1)], 2), some("r1", "q", [("n0", 2)], 1)]
    pending = [
        grows("r1", "q", (1,), 1),
        waits("w0", "p", tasks=2),
        waits("w1", "q", age_s=1.0, priority=60),
        waits("w2", "q", age_s=2.0, priority=60),
    ]
    before = cluster(
        [node("n0", 3)], [project("p"), project("q")], [quota("q", 1)], running=running, pending=pending
    )
    after = apply_plan(before, decide(before, Policy()))
    assert [row.job for row in after.running] == ["r0", "r1"]


STANDING_PLANS = [
    pytest.param(
        cluster(
            [node("n0", 3), node("n1", 3)],
            [project("p"), project("q")],
            [quota("q", 2)],
            running=[some("r0", "p", [("n0", 0), ("n0", 1), ("n0", 2)], 1)],
            pending=[
                waits("w0", "q", tasks=4, min_tasks=3, priority=60),
                waits("w2", "q", tasks=4, age_s=2.0, min_tasks=3, priority=60),
            ],
        ),
        id="a job that starts with its minimum reclaims for a further rank, though an equal job may not",
    ),
    pytest.param(
        cluster(
            [node("n0", 4), node("n1", 1)],
            [project("p"), project("q")],
            [quota("p", 4), quota("q", 4)],
            running=[
                some("r0", "q", [("n0", 0), ("n0", 1)], 2),
                some("r1", "q", [("n0", 2), ("n0", 3)], 2),
            ],
            pending=[grows("r0", "q", (2, 3), 2), waits("w0", "p", tasks=2, priority=60)],
        ),
        id="ranks that join in this plan count as lost work of their job",
    ),
    pytest.param(
        cluster(
            [node("n0", 4), node("n1", 1)],
            [project("p"), project("q")],
            running=[some("r0", "p", [("n0", 0)], 1), some("r1", "p", [("n0", 1)], 1)],
            pending=[
                grows("r0", "p", (1,), 1),
                grows("r1", "p", (1,), 1),
                waits("w0", "p", tasks=3, priority=60),
                waits("w1", "q", tasks=3, age_s=1.0),
            ],
        ),
        id="the GPU of a rank that joins in this plan is not free for a victim",
    ),
    pytest.param(
        cluster(
            [node("n0", 2), node("n1", 2), node("n2", 4)],
            [project("p"), project("q")],
            [quota("p", 3, 5), quota("q", 4)],
            running=[some("r0", "p", [("n0", 0), ("n0", 1)], 2), some("r1", "q", [("n1", 0)], 1)],
            pending=[
                grows("r1", "q", (1,), 1),
                waits("w0", "q", tasks=3, priority=60),
                waits("w1", "p", tasks=4, min_tasks=2, age_s=1.0, priority=60),
            ],
        ),
        id="a gang starts on free GPUs that were nominated for a rank of another, which joins elsewhere",
    ),
    pytest.param(
        cluster(
            [node("n0", 4), node("n1", 4), node("n2", 3)],
            [project("p"), project("q")],
            [quota("p", 4), quota("q", 1)],
            running=[
                some("r0", "q", [("n0", 0), ("n0", 1)], 2),
                some("r1", "p", [("n0", 2), ("n0", 3)], 2),
                some("r2", "p", [("n1", 0), ("n1", 1), ("n1", 2)], 2),
            ],
            pending=[
                grows("r0", "q", (2, 3), 2),
                grows("r1", "p", (2, 3), 2),
                grows("r2", "p", (3,), 2),
                waits("w0", "p", tasks=3, min_tasks=2),
                waits("w1", "q", tasks=4, min_tasks=2, age_s=1.0, priority=60),
                waits("w2", "p", tasks=2, min_tasks=1, age_s=2.0, priority=60),
            ],
        ),
        id="a rank that joins starts on a free GPU that was nominated for a rank of a gang that starts",
    ),
    pytest.param(
        cluster(
            [node("n0", 1), node("n1", 4)],
            [project("p"), project("q")],
            [quota("p", 3), quota("q", 3)],
            running=[some("r0", "q", [("n0", 0)], 1), some("r1", "q", [("n1", 0), ("n1", 1)], 1)],
            pending=[
                grows("r0", "q", (1,), 1),
                waits("w0", "q", tasks=2),
                waits("w1", "p", tasks=3, age_s=1.0),
            ],
        ),
        id="a rank is evicted before a job that would start, as in the next decision",
    ),
]


@pytest.mark.parametrize("before", STANDING_PLANS)
def test_a_second_decision_changes_nothing(before: Snapshot) -> None:
    again = decide(apply_plan(before, decide(before, Policy())), Policy())
    assert (again.starts, again.evictions) == ((), ())


@st.composite
def elastic(draw: st.DrawFn) -> Snapshot:
    """Two projects with elastic and plain jobs on one to three nodes."""
    nodes = [node(f"n{i}", draw(st.integers(1, 4))) for i in range(draw(st.integers(1, 3)))]
    free = [(each.id, index) for each in nodes for index in range(len(each.gpus))]
    running: list[RunningRow] = []
    pending: list[PendingRow] = []
    for number in range(draw(st.integers(0, 3))):
        least, wants = draw(st.integers(1, 2)), draw(st.integers(2, 4))
        count = min(draw(st.integers(least, wants)), len(free))
        if count < least:
            break
        places, free = [(str(where), index) for where, index in free[:count]], free[count:]
        of = draw(st.sampled_from("pq"))
        running.append(some(f"r{number}", of, places, least))
        if count < wants:
            pending.append(grows(f"r{number}", of, tuple(range(count, wants)), least))
    for number in range(draw(st.integers(0, 3))):
        tasks = draw(st.integers(1, 4))
        least = draw(st.none() | st.integers(1, tasks))
        priority = draw(st.sampled_from([50, 60]))
        row = waits(f"w{number}", draw(st.sampled_from("pq")), tasks=tasks, age_s=float(number))
        pending.append(replace(row, min_tasks=least, priority=priority))
    quotas = [quota(name, draw(st.integers(0, 4)), draw(st.none() | st.integers(1, 6))) for name in "pq"]
    return cluster(nodes, [project("p"), project("q")], quotas, running=running, pending=pending)


@pytest.mark.parametrize("guaranteed", [2, 1])
def test_a_gang_takes_the_place_that_a_growing_job_reclaimed_if_it_may_reclaim_itself(
    guaranteed: int,
) -> None:
    """The victim of the growing job is then evicted for the gang, in the same plan."""
    before = cluster(
        [node("n0", 1), node("n1", 1)],
        [project("p"), project("q")],
        [quota("p", 0), quota("q", guaranteed)],
        running=[some("r0", "p", [("n0", 0)], least=1), some("r1", "q", [("n1", 0)], least=1)],
        pending=[
            replace(grows("r1", "q", (1,), least=1), priority=50),
            replace(waits("w0", "q", tasks=2), priority=60),
        ],
    )
    plan = decide(before, Policy())
    assert {(each.job, each.for_job) for each in plan.evictions} == (
        {("r0", "w0"), ("r1", "w0")} if guaranteed == 2 else set()
    )
    assert decide(apply_plan(before, plan), Policy()).evictions == ()


@settings(max_examples=150, deadline=None)
@given(elastic())
def test_limits_and_minimums_hold_and_plans_can_be_applied(before: Snapshot) -> None:
    plan = decide(before, Policy())
    after = apply_plan(before, plan)
    for row in after.running:
        live = sum(not (row.stopping or task.stopping) for task in row.tasks)
        assert live == 0 or live >= (row.min_tasks or len(row.tasks))
        ranks = [i if task.rank is None else task.rank for i, task in enumerate(row.tasks)]
        assert len(set(ranks)) == len(ranks)
    for each in after.quotas:
        started = {start.job for start in plan.starts if _project(before, start.job) == each.project}
        if started and each.limit_milli is not None:
            held = [task for row in after.running if row.project == each.project for task in row.tasks]
            assert sum(gpu.milli for task in held for gpu in task.gpus) <= each.limit_milli
    again = decide(after, Policy())
    assert (again.starts, again.evictions) == ((), ())


def test_elastic_job_without_room_for_its_minimum_does_not_start_with_less() -> None:
    nodes = [node("n0", 1), node("n1", 1), node("n2", 3)]
    needs_four = waits("w0", "q", tasks=4, age_s=0.0)
    elastic_job = replace(waits("w1", "p", tasks=3, age_s=1.0), min_tasks=2)
    quotas = [quota("p", 2, None), quota("q", 4, None)]
    before = cluster(nodes, [project("p"), project("q")], quotas, pending=[needs_four, elastic_job])
    assert {start.job: len(start.tasks) for start in decide(before, Policy()).starts} in (
        {"w0": 4},
        {"w1": 3},
    )


def _project(snapshot: Snapshot, job: str) -> str:
    return next(row.project for row in snapshot.pending if row.job == job)
