"""The order that a user gives to their own jobs: it moves no job of anybody else."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations
from typing import Any

import pytest

from scheduler.core.decide import decide
from scheduler.core.model.policy import Policy
from scheduler.core.model.snapshot import PendingRow
from scheduler.core.session.job_queue import effective_submit_s, queue_ages_s
from tests.core.cluster_builder import NOW_S, cluster, node, project, waits

POLICY = Policy()


def mine(name: str, age_s: float, rank: int = 0, **more: Any) -> PendingRow:
    return replace(waits(name, "p", 1, age_s=age_s, **more), queue_rank=rank)


def order_of(*rows: PendingRow) -> list[str]:
    """The jobs in the order in which the plan starts them, one GPU at a time."""
    started: list[str] = []
    left = rows
    while left:
        plan = decide(cluster([node("n", 1)], projects=[project("p"), project("q")], pending=left), POLICY)
        (start,) = plan.starts
        started.append(start.job)
        left = tuple(row for row in left if row.job != start.job)
    return started


def test_without_ranks_age_decides() -> None:
    assert order_of(mine("new", 10), mine("old", 30), mine("middle", 20)) == ["old", "middle", "new"]


def test_user_rank_precedes_age() -> None:
    assert order_of(mine("new", 10, -2), mine("old", 30), mine("middle", 20, -1)) == ["new", "middle", "old"]


def test_priority_precedes_user_rank() -> None:
    assert order_of(mine("a", 10, -5), mine("b", 20, priority=51)) == ["b", "a"]


@pytest.mark.parametrize("ranks", list(permutations((-3, -2, -1))))
def test_no_job_of_another_user_or_project_moves(ranks: tuple[int, ...]) -> None:
    """Places of other jobs are the same for every order of ada's jobs."""
    others = [waits("eve-1", "p", 1, age_s=25.0, user="eve"), waits("bio-1", "q", 1, age_s=15.0, user="bob")]
    own = [mine(f"ada-{n}", 10.0 * n, rank) for n, rank in enumerate(ranks, 1)]
    plain = order_of(*others, *(replace(row, queue_rank=0) for row in own))
    ranked = order_of(*others, *own)
    for other in ("eve-1", "bio-1"):
        assert ranked.index(other) == plain.index(other)
    by_rank = [row.job for row in sorted(own, key=lambda row: row.queue_rank)]
    assert [job for job in ranked if job.startswith("ada")] == by_rank


def test_a_forecast_exchanges_the_ages_of_the_jobs_of_a_user() -> None:
    rows = [mine("new", 10, -1), mine("old", 30), waits("eve-1", "p", 1, age_s=20.0, user="eve")]
    assert queue_ages_s(rows, POLICY) == [NOW_S - 30, NOW_S - 10, NOW_S - 20]
    plain = [replace(row, queue_rank=0) for row in rows]
    assert queue_ages_s(plain, POLICY) == [effective_submit_s(row, POLICY) for row in rows]
