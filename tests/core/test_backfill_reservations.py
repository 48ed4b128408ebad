"""A gang that waited too long is not passed by jobs that would delay it."""

from __future__ import annotations

from dataclasses import replace

from portal.domain.jobs.reasons import VerdictCode
from scheduler.core.decide import decide
from scheduler.core.model.policy import Policy
from scheduler.core.model.snapshot import PendingRow, Snapshot
from tests.core.cluster_builder import NOW_S, cluster, node, project, runs, started, waits

POLICY = Policy()
VISION = project("vision")


def dataset(*small: PendingRow, age_s: float = 7_200.0, limit_s: float | None = 900.0) -> Snapshot:
    """One node is used until ``limit_s``, the other is free; a gang needs both."""
    return cluster(
        [node("n1", 4), node("n2", 4)],
        [VISION],
        running=[runs("long", "vision", ("n1", range(4)), time_limit_s=limit_s)],
        pending=[waits("gang", "vision", 4, tasks=2, age_s=age_s), *small],
    )


def test_a_job_without_an_end_does_not_pass() -> None:
    plan = decide(dataset(waits("small", "vision")), POLICY)
    assert started(plan) == set()
    verdicts = {verdict.job: verdict for verdict in plan.verdicts}
    assert verdicts["small"].code is VerdictCode.RESERVED_FOR_OTHER_JOB
    assert verdicts["small"].details["reserved_from_s"] == NOW_S + 300  # it began 600 s ago
    assert verdicts["gang"].details["reserved_from_s"] == NOW_S + 300


def test_a_job_that_ends_before_passes() -> None:
    short, longer = (
        waits("short", "vision", time_limit_s=200.0),
        waits("longer", "vision", time_limit_s=400.0),
    )
    assert started(decide(dataset(short, longer), POLICY)) == {"short"}


def test_no_reservation_for_a_new_gang_or_without_known_ends() -> None:
    small = waits("small", "vision")
    assert started(decide(dataset(small, age_s=60.0), POLICY)) == {"small"}
    assert started(decide(dataset(small, limit_s=None), POLICY)) == {"small"}
    patient = replace(POLICY, backfill_reserve_after_s=86_400.0)
    assert started(decide(dataset(small), patient)) == {"small"}


def test_the_gang_starts_on_its_reserved_nodes() -> None:
    snapshot = dataset(waits("small", "vision"))
    ended = replace(snapshot, running=(), nodes=(node("n1", 4), node("n2", 4)))
    assert started(decide(ended, POLICY)) == {"gang"}
