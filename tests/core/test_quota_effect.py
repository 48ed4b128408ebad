"""What changed quotas do to the present queue."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from scheduler.core.decide import decide
from scheduler.core.forecast.durations import DurationHistory
from scheduler.core.forecast.quota_effect import (
    ProjectHolding,
    QuotaEffect,
    StartShift,
    estimate_quota_effect,
    replace_quotas,
)
from scheduler.core.model.policy import Policy
from scheduler.core.model.snapshot import JobId, PoolId, ProjectId, QuotaRow, Snapshot
from tests.core.cluster_builder import MAIN, NOW_S, cluster, node, project, quota, runs, waits

POLICY = Policy()


def effect(snapshot: Snapshot, *quotas: QuotaRow) -> QuotaEffect:
    changed = replace_quotas(snapshot, quotas)
    pools = sorted({row.pool for row in quotas})
    sides = [(view, decide(view, POLICY)) for view in (snapshot, changed)]
    return estimate_quota_effect(sides[0], sides[1], pools, POLICY, DurationHistory())


@pytest.fixture
def borrowing() -> Snapshot:
    """Four GPUs: `holder` runs on all and is guaranteed all; one job of `waiter`, without a guarantee, waits."""
    rows = [runs(f"r{i}", "holder", ("n1", [i]), started_s=NOW_S - 3600.0 + i) for i in range(4)]
    return cluster(
        [node("n1")],
        [project("holder"), project("waiter")],
        [quota("holder", 4)],
        running=rows,
        pending=[waits("next", "waiter", 2)],
    )


def test_a_guarantee_reclaims_borrowed_gpus_and_the_job_starts(borrowing) -> None:
    found = effect(borrowing, quota("holder", 2), quota("waiter", 2))
    assert len(found.evictions) == 2 and {each.for_job for each in found.evictions} == {JobId("next")}
    (shift,) = found.shifts
    assert shift.job == "next" and shift.after_s is not None and shift.after_s < 60 < (shift.before_s or 0)
    assert found.holdings[ProjectId("holder"), MAIN][0] == ProjectHolding(4000, 4000, 4000.0)
    before, after = found.holdings[ProjectId("waiter"), MAIN]
    assert (before.used_milli, before.guaranteed_milli, before.borrowed_milli) == (0, 0, 0)
    assert (after.used_milli, after.guaranteed_milli, after.fair_share_milli) == (2000, 2000, 2000.0)
    assert found.is_complete


def test_equal_quotas_change_nothing(borrowing) -> None:
    found = effect(borrowing, quota("holder", 4))
    assert (found.shifts, found.evictions, dict(found.holdings)) == ((), (), {})


def test_a_raised_limit_lets_an_impossible_job_start_and_a_lowered_one_delays() -> None:
    limited = cluster(
        [node("n1")],
        [project("p")],
        [quota("p", 0, 2)],
        pending=[waits("big", "p", 4), waits("small", "p", 1)],
    )
    found = effect(limited, quota("p", 0, 4))
    shifts = {each.job: each for each in found.shifts}
    assert shifts[JobId("big")] == StartShift(JobId("big"), math.inf, 0.0)
    back = effect(replace_quotas(limited, [quota("p", 0, 4)]), quota("p", 0, 2))
    assert {each.job: each.shift_s for each in back.shifts}[JobId("big")] == math.inf


def test_borrowed_is_above_the_guarantee_and_parents_include_children() -> None:
    snapshot = cluster(
        [node("n1")],
        [project("dept"), project("team", "dept")],
        [quota("team", 1)],
        running=[runs("r", "team", ("n1", range(3)))],
    )
    found = effect(snapshot, quota("team", 2))
    for name in ("dept", "team"):
        before, after = found.holdings[ProjectId(name), MAIN]
        assert (before.used_milli, before.borrowed_milli, after.borrowed_milli) == (3000, 2000, 1000)


def test_only_the_named_quotas_are_replaced() -> None:
    rows = [quota("p", 1), quota("q", 1), quota("p", 1, pool="other")]
    snapshot = replace(cluster([node("n1")], [project("p"), project("q")]), quotas=tuple(rows))
    changed = replace_quotas(snapshot, [quota("p", 3)])
    assert {(row.project, row.pool, row.guaranteed_milli) for row in changed.quotas} == {
        ("p", MAIN, 3000), ("q", MAIN, 1000), ("p", PoolId("other"), 1000),
    }  # fmt: skip
