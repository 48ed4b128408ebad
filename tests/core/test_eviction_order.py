"""Who is evicted: the lowest priority first, the least lost work among equals, and nobody in turn."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations

import pytest

from scheduler.core.decide import decide
from scheduler.core.model.apply_plan import complete_evictions
from scheduler.core.model.plan import EvictionReason, Plan
from scheduler.core.model.policy import Policy
from scheduler.core.model.snapshot import (
    NodeRow,
    PendingRow,
    PoolId,
    PoolRow,
    ProjectRow,
    RunningRow,
    Snapshot,
)
from tests.core.cluster_builder import MAIN, NOW_S, cluster, node, project, quota, runs, waits
from tests.core.plan_rules import check_plan

POLICY = Policy()


def rounds(snapshot: Snapshot, policy: Policy = POLICY) -> Iterator[set[str]]:
    """Yield the evicted jobs of each decision, each after the evictions of the one before are complete."""
    for _ in range(8):
        plan = decide(snapshot, policy, explain=False)
        if not (plan.evictions or plan.starts):
            return
        yield {str(eviction.job) for eviction in plan.evictions}
        snapshot = replace(complete_evictions(snapshot, plan), now_s=snapshot.now_s + 1)


def evictions(snapshot: Snapshot, policy: Policy = POLICY) -> list[set[str]]:
    return [evicted for evicted in rounds(snapshot, policy) if evicted]


def full_project(*jobs: RunningRow, wants: int = 1, of: str = "p", nodes: int = 1) -> Snapshot:
    rows = [node(f"n{i}", 4) for i in range(nodes)]
    held = sum(len(task.gpus) for job in jobs for task in job.tasks)
    return cluster(
        rows if held == 4 * nodes else [node("n0", held)],
        [project("p"), project("other")],
        [quota("other", 2)],
        running=jobs,
        pending=[waits("top", of, wants, priority=90)],
    )


def ran(name: str, gpus: list[int], priority: int, for_s: float, **changes: object) -> RunningRow:
    started_s = NOW_S - for_s
    row = runs(name, "p", ("n0", gpus), priority=priority, started_s=started_s, submitted_s=started_s)
    return replace(row, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("order", ["least_lost_work", "youngest"])
@pytest.mark.parametrize("of", ["p", "other"])
def test_the_lowest_priority_is_evicted_even_if_it_loses_more(of: str, order: str) -> None:
    """In the same project, and in the project above its share from which another one reclaims."""
    snapshot = full_project(ran("low", [0, 1], 10, 640), ran("mid", [2, 3], 50, 600), wants=2, of=of)
    assert evictions(snapshot, replace(POLICY, victim_order=order)) == [{"low"}]


@pytest.mark.parametrize("of", ["p", "other"])
@pytest.mark.parametrize("count", [2, 4, 8])
def test_one_more_job_causes_one_eviction(count: int, of: str) -> None:
    jobs = [ran(f"job-{i}", [i], 10 + 9 * i, 1_000 - 10 * i) for i in range(count)]
    assert evictions(full_project(*jobs, of=of)) == [{"job-0"}]


def test_a_fresh_checkpoint_counts_only_among_equal_priorities() -> None:
    saved = ran("saved", [0], 50, 5_000, checkpoint_s=NOW_S - 1)
    assert evictions(full_project(saved, ran("low", [1], 10, 4_000))) == [{"low"}]
    assert evictions(full_project(saved, ran("equal", [1], 50, 4_000))) == [{"saved"}]


def test_ranks_beyond_the_minimum_leave_first_among_equal_priorities() -> None:
    elastic = replace(runs("elastic", "p", ("n0", [0]), ("n0", [1])), min_tasks=1, started_s=NOW_S - 9_000)
    equal, low = ran("equal", [2], 50, 10), ran("low", [2], 10, 9_999)
    for other, evicted in ((equal, "elastic"), (low, "low")):
        (eviction,) = decide(full_project(elastic, other), POLICY).evictions
        assert (eviction.job, eviction.ranks) == (evicted, (1,) if evicted == "elastic" else ())


def test_the_least_work_is_lost_among_equal_priorities_on_a_node() -> None:
    """One job of two GPUs loses less than two of one GPU, each of which loses less than it."""
    jobs = [ran("x", [0], 50, 100), ran("y", [1], 50, 110), ran("both", [2, 3], 50, 90)]
    assert evictions(full_project(*jobs, wants=2)) == [{"both"}]


def test_a_victim_that_could_evict_in_turn_is_moved_there_by_the_same_plan() -> None:
    """The pending job fits only where `mid` runs, and `mid` fits where `low` runs."""
    snapshot = cluster(
        [node("n0", 2), node("n1", 1), node("n2", 1)],
        [project("p")],
        running=[
            runs("mid", "p", ("n0", [0]), ("n0", [1]), priority=50, allow_mixed_gpus=True),
            runs("low-1", "p", ("n1", [0]), priority=10),
            runs("low-2", "p", ("n2", [0]), priority=10),
        ],
        pending=[waits("top", "p", 2, priority=90)],
    )
    plan = decide(snapshot, POLICY)
    assert {each.job: each.reason for each in plan.evictions} == {
        "mid": EvictionReason.MIGRATED,
        "low-1": EvictionReason.PREEMPTED,
        "low-2": EvictionReason.PREEMPTED,
    }
    assert len(evictions(snapshot)) == 1


def test_a_job_whose_start_was_undone_moves_another_in_the_same_plan() -> None:
    """`mine` starts on two free GPUs, loses them to `reclaims`, and fits on n1 once `small` has moved."""
    snapshot = cluster(
        [node("n0", 4), node("n1", 2)],
        [project("a"), project("b")],
        [quota("b", 4, 6, weight=2.0)],
        running=[
            runs("large", "a", ("n0", [0, 1]), priority=90, started_s=NOW_S - 100),
            runs("small", "a", ("n1", [0]), priority=10, started_s=NOW_S - 100),
        ],
        pending=[waits("mine", "a", 2, priority=100), waits("reclaims", "b", 3), waits("later", "b", 3)],
    )
    assert evictions(snapshot) == [{"large", "small"}]


def test_a_job_nominated_by_the_plan_keeps_its_place_when_a_victim_is_settled() -> None:
    """`mid-2` may evict `low`; that `last` is nominated for a GPU that another victim releases does not matter."""
    snapshot = cluster(
        [node("n0", 4), node("n1", 4)],
        [project("p")],
        running=[
            runs("high", "p", ("n0", [0, 1]), priority=95, started_s=NOW_S - 5_000),
            runs("low", "p", ("n0", [2, 3]), priority=10),
            runs("mid-1", "p", ("n1", [0, 1]), priority=50, started_s=NOW_S - 100),
            runs("mid-2", "p", ("n1", [2, 3]), priority=90, started_s=NOW_S - 100),
        ],
        pending=[waits("top", "p", 3, priority=100), waits("last", "p", 1, priority=10)],
    )
    assert len(evictions(snapshot)) == 1


def two_pools(*pending: PendingRow, running: Sequence[RunningRow] = (), counts: Sequence[int]) -> Snapshot:
    both = (MAIN, PoolId("second"))
    nodes = [
        node(f"n{i}", count, pool=pool) for i, (count, pool) in enumerate(zip(counts, both, strict=True))
    ]
    rows = [row if row.job == "main-only" else replace(row, pools=both) for row in pending]
    pools = [PoolRow(pool, pool) for pool in both]
    projects = [project("a"), project("b")]
    return cluster(nodes, projects, [quota("b", 2)], running=running, pending=rows, pools=pools)


@pytest.mark.parametrize("counts", [(1, 3), (2, 2), (4, 1), (1, 0)])
@pytest.mark.parametrize("full", [False, True])
def test_an_elastic_job_grows_only_in_the_pool_where_it_starts(counts: tuple[int, int], full: bool) -> None:
    """Also if the second pool has free GPUs, or jobs that it may evict, and also in later decisions."""
    held = [
        runs(f"low-{i}", "a", (f"n{i}", [0]), pool=pool, priority=10)
        for i, pool in enumerate((MAIN, PoolId("second")))
        if full and counts[i]
    ]
    elastic = waits("elastic", "a", 1, tasks=3, min_tasks=1, priority=90)
    snapshot = two_pools(elastic, running=held, counts=counts)
    for _ in range(4):
        plan = decide(snapshot, POLICY)
        check_plan(snapshot, plan)
        snapshot = complete_evictions(snapshot, plan)
    (row,) = (row for row in snapshot.running if row.job == "elastic")
    where = {each.id: each.pool for each in snapshot.nodes}
    assert {where[task.node] for task in row.tasks} == {row.pool}


def test_a_job_whose_start_was_undone_starts_in_its_other_pool() -> None:
    snapshot = two_pools(
        waits("either", "a", 1),
        waits("main-only", "b", 2),
        running=[runs("r", "a", ("n0", [0]))],
        counts=(2, 1),
    )
    plan = decide(snapshot, POLICY)
    check_plan(snapshot, plan)
    assert {(start.job, start.pool) for start in plan.starts} == {("either", "second")}
    assert evictions(snapshot) == [{"r"}]


# -- at random ---------------------------------------------------------------------------------------------


class Drawn:
    """A full cluster drawn at random: a tree of projects, gangs, elastic jobs, shares of GPUs and protections."""

    def __init__(self, seed: int) -> None:
        self._draw = draw = random.Random(seed)
        nodes = [node(f"n{i}", draw.choice([2, 4, 4])) for i in range(draw.randint(1, 3))]
        parents = (None, None, draw.choice([None, "b"]))
        projects = [project(*each) for each in zip("abc", parents, strict=True)][: draw.randint(1, 3)]
        quotas = [
            replace(
                quota(row.id, draw.choice([0, 0, 1, 2, 4]), draw.choice([None, None, 3, 6]),
                      weight=draw.choice([0.0, 1.0, 2.0])),
                reclaim_min_runtime_s=draw.choice([None, None, None, 3_600.0]),
            )
            for row in projects if draw.random() < 0.7
        ]  # fmt: skip
        self._free = {row.id: list(range(len(row.gpus))) for row in nodes}
        self._gangs, self._elastic, self._shares = (draw.random() < part for part in (0.4, 0.3, 0.25))
        running = [row for i in range(draw.randint(1, 7)) if (row := self._running(f"r{i}", nodes, projects))]
        pending = [self._pending(f"j{i}", projects) for i in range(draw.randint(1, 4))]
        self.snapshot = cluster(nodes, projects, quotas, running=running, pending=pending)
        self.policy = replace(
            POLICY,
            preempt_min_runtime_s=draw.choice([0.0, 0.0, 0.0, 3_600.0]),
            near_end_protection_s=draw.choice([7_200.0, 0.0]),
            movable_jobs=draw.choice(["evictable", "evictable", "any"]),
        )

    def _running(self, name: str, nodes: list[NodeRow], projects: list[ProjectRow]) -> RunningRow | None:
        draw, free = self._draw, self._free
        tasks = draw.randint(2, 3) if self._gangs and draw.random() < 0.4 else 1
        share = tasks == 1 and self._shares and draw.random() < 0.5
        places = []
        for _ in range(tasks):
            open_nodes = [row.id for row in nodes if free[row.id]]
            if not open_nodes:
                break
            where = draw.choice(open_nodes)
            taken = 1 if tasks > 1 or share else min(len(free[where]), draw.randint(1, 3))
            places.append((where, [free[where].pop(0) for _ in range(taken)]))
        if not places:
            return None
        age_s = draw.choice([100, 600, 5_000, draw.randint(0, 9_999)])
        row = runs(name, draw.choice(projects).id, *places, milli=500 if share else 1000)
        return replace(
            row,
            priority=draw.choice([10, 50, 50, 90]),
            preemptible=draw.random() < 0.85,
            started_s=NOW_S - age_s,
            submitted_s=NOW_S - age_s - draw.randint(0, 50),
            checkpoint_s=NOW_S - draw.randint(0, age_s) if draw.random() < 0.3 else None,
            predicted_end_s=NOW_S + draw.choice([60, 90_000]) if draw.random() < 0.15 else None,
            min_tasks=draw.randint(1, len(places)) if self._elastic and len(places) > 1 else None,
        )

    def _pending(self, name: str, projects: list[ProjectRow]) -> PendingRow:
        draw = self._draw
        row = waits(
            name,
            draw.choice(projects).id,
            draw.choice([1, 1, 2, 3, 4]),
            tasks=draw.choice([1, 1, 1, 2]) if self._gangs else 1,
            age_s=float(draw.randint(0, 9)),
            priority=draw.choice([10, 50, 90, 100]),
            preemptible=draw.random() < 0.85,
        )
        if self._elastic and row.tasks > 1:
            row = replace(row, min_tasks=1)
        if self._shares and draw.random() < 0.4:
            row = row.change({"gpus_per_task": 1, "milli_per_gpu": 500})
        return row


def test_no_eviction_creates_a_preemptor_that_evicts_again() -> None:
    """Decisions after the evictions of the first one are complete evict nobody more."""
    evicting = 0
    for seed in (*range(350), 1_699, 4_380):
        drawn = Drawn(seed)
        plan = decide(drawn.snapshot, drawn.policy)
        check_plan(drawn.snapshot, plan)
        if plan.evictions:
            evicting += 1
            after = complete_evictions(drawn.snapshot, plan)
            assert evictions(after, drawn.policy) == [], (seed, plan.evictions)
    assert evicting > 100


def _victims_cost(plan: Plan, running: dict[str, RunningRow]) -> tuple[int, float, float]:
    """The highest priority among the victims, the work lost at it, and all lost work."""
    victims = [running[eviction.job] for eviction in plan.evictions]
    lost = {
        row.job: (NOW_S - max(row.started_s, row.checkpoint_s or 0.0))
        * sum(len(task.gpus) for task in row.tasks)
        for row in victims
    }
    top = max(row.priority for row in victims)
    return top, sum(lost[row.job] for row in victims if row.priority == top), sum(lost.values())


def _evicts_only(plan: Plan) -> bool:
    return bool(plan.evictions) and all(each.reason is not EvictionReason.MIGRATED for each in plan.evictions)


@pytest.mark.parametrize("of", ["p", "other"])
def test_no_set_of_lower_priority_with_less_lost_work_would_have_served(of: str) -> None:
    """Compared with every set: all other jobs are made non-preemptible, and nobody may be evicted in turn."""
    compared = 0
    for seed in range(16):
        draw = random.Random(seed)
        running: list[RunningRow] = []
        nodes = [node(f"n{i}", 4) for i in range(2)]
        for where in nodes:
            start = 0
            while start < 4:
                end = min(4, start + draw.choice([1, 1, 2, 3]))
                saved = draw.choice([None, NOW_S - draw.randint(0, 100)])
                row = runs(f"{where.id}-{start}", "p", (where.id, range(start, end)), checkpoint_s=saved)
                age_s, priority = draw.randint(200, 9_999), draw.choice([10, 50, 50, 80])
                running.append(replace(row, started_s=NOW_S - age_s, priority=priority))
                start = end
        running = [
            replace(row, preemptible=i < 6) for i, row in enumerate(draw.sample(running, len(running)))
        ]
        snapshot = cluster(
            nodes,
            [project("p"), project("other")],
            [quota("other", 4)],
            running=running,
            pending=[waits("top", of, draw.randint(1, 4), priority=90)],
        )
        plan = decide(snapshot, POLICY, explain=False)
        if not plan.evictions:
            continue
        by_job = {str(row.job): row for row in running}
        chosen = _victims_cost(plan, by_job)
        preemptible = [row.job for row in running if row.preemptible]
        for count in range(1, 4):
            for allowed in combinations(preemptible, count):
                rows = tuple(replace(row, preemptible=row.job in allowed) for row in running)
                other = decide(replace(snapshot, running=rows), POLICY, explain=False)
                if _evicts_only(other) and not evictions(complete_evictions(snapshot, other)):
                    compared += 1
                    assert chosen <= _victims_cost(other, by_job), (seed, allowed)
    assert compared > 50
