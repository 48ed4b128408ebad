"""How long a job waits before it preempts others: the setting of the pool, or of the job."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scheduler.core.decide import decide
from scheduler.core.model.policy import Policy
from scheduler.core.model.snapshot import PoolRow, Snapshot
from tests.core.cluster_builder import MAIN, NOW_S, cluster, node, project, quota, runs, waits


def owed(age_s: float, pool: PoolRow, **changes: object) -> Snapshot:
    """A node full of borrowed GPUs, and the job of the project they belong to."""
    return cluster(
        [node("n0", 4)],
        [project("p"), project("q")],
        [quota("q", 4)],
        running=[runs("r", "p", ("n0", [0, 1, 2, 3]), started_s=NOW_S - 99_999)],
        pending=[waits("j", "q", 4, age_s=age_s, **changes)],
        pools=[pool],
    )


@pytest.mark.parametrize(
    ("settings", "own", "age_s", "asks"),
    [
        ((), None, 0.0, True),
        ((("preemption_delay_s", 600.0),), None, 599.0, False),
        ((("preemption_delay_s", 600.0),), None, 600.0, True),
        ((("preemption_delay_s", 600.0),), 60.0, 60.0, True),
        ((), 60.0, 59.0, False),
    ],
)
def test_preemption_waits_for_the_configured_time(settings, own, age_s, asks) -> None:
    plan = decide(owed(age_s, PoolRow(MAIN, "main", None, settings), preemption_delay_s=own), Policy())
    assert bool(plan.evictions) is asks
    if not asks:
        (verdict,) = plan.verdicts
        assert "No job is preempted for it before 1970-01-12 13:4" in verdict.message
        assert verdict.details["preemption_from_s"] == NOW_S + 1.0


def test_the_cluster_setting_applies_where_the_pool_has_none() -> None:
    snapshot = owed(10.0, PoolRow(MAIN, "main"))
    assert not decide(snapshot, replace(Policy(), preemption_delay_s=60.0)).evictions
