"""Whom a later end of a running job would delay."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.core.decide import decide
from scheduler.core.forecast import start_times
from scheduler.core.forecast.durations import DurationHistory
from scheduler.core.forecast.start_times import MIN_DELAY_S, estimate_delay_impact
from scheduler.core.model.policy import Policy
from scheduler.core.model.snapshot import JobId, NodeId, ProjectId, ReservationRow, Snapshot
from tests.core.cluster_builder import NOW_S, cluster, node, project, runs, snapshots, waits

HOUR = 3600.0
END_S = NOW_S + HOUR


def full(*line, reservations=()) -> Snapshot:
    """A node of four GPUs: ``long`` holds three of them until END_S at the latest, ``short`` one for ten minutes."""
    rows = [
        runs("long", "p", ("n1", range(3)), time_limit_s=HOUR + 100.0, started_s=NOW_S - 100.0),
        runs("short", "p", ("n1", range(3, 4)), time_limit_s=600.0, started_s=NOW_S),
    ]
    made = cluster([node("n1")], [project("p"), project("q")], [], running=rows, pending=list(line))
    return replace(made, reservations=tuple(reservations))


def delays(snapshot: Snapshot, job: JobId, end_s: float, later_s: float):
    plan, policy = decide(snapshot, Policy()), Policy()
    return estimate_delay_impact(snapshot, plan, policy, job, end_s, later_s, DurationHistory())


def asked(snapshot: Snapshot, later_s: float):
    return delays(snapshot, JobId("long"), END_S, later_s)


def test_only_jobs_that_need_the_gpus_are_delayed() -> None:
    found = asked(full(waits("wide", "p", 4), waits("slim", "p", 1, time_limit_s=300.0)), END_S + 2 * HOUR)
    assert [(one.job, one.delay_s) for one in found.jobs] == [("wide", 2 * HOUR)]
    assert asked(full(waits("slim", "p", 1)), END_S + 2 * HOUR).jobs == ()
    assert asked(full(), END_S + 30 * 24 * HOUR) == asked(full(), END_S + 1.0)


def test_only_the_head_of_a_long_queue_is_examined_and_that_is_reported(monkeypatch) -> None:
    line = [waits("slim", "p", 1, age_s=9.0), waits("wide", "p", 4, age_s=5.0)]
    assert asked(full(*line), END_S + HOUR).is_complete
    monkeypatch.setattr(start_times, "MAX_DELAYED_JOBS", 1)
    found = asked(full(*line), END_S + HOUR)
    assert (found.jobs, found.is_complete) == ((), False)


def test_less_than_a_minute_is_not_a_delay() -> None:
    line = full(waits("wide", "p", 4))
    assert asked(line, END_S + MIN_DELAY_S - 1.0).jobs == ()
    assert len(asked(line, END_S + MIN_DELAY_S).jobs) == 1


def test_a_reservation_in_the_added_time_conflicts() -> None:
    def reserved(name: str, begins_s: float, *projects: str) -> ReservationRow:
        whom = tuple(map(ProjectId, projects))
        return ReservationRow(name, name, (NodeId("n1"),), whom, begins_s, begins_s + HOUR)

    rows = (
        reserved("theirs", END_S + 60.0, "q"),
        reserved("maintenance", END_S + 2 * HOUR),
        reserved("own", END_S + 60.0, "p"),
        reserved("later", END_S + 9 * HOUR),
    )
    assert asked(full(reservations=rows), END_S + 3 * HOUR).reservations == ("maintenance", "theirs")
    assert asked(full(reservations=rows), END_S + 30.0).reservations == ()


def test_a_job_that_does_not_run_is_refused() -> None:
    with pytest.raises(ValueError):
        delays(full(), JobId("none"), END_S, END_S + 1.0)
    with pytest.raises(ValueError):
        asked(full(), END_S)


@given(snapshots(), st.floats(60.0, 1e6), st.floats(1.0, 1e6), st.randoms(use_true_random=False))
def test_delays_are_sorted_and_independent_of_row_order(snapshot, end_s, extra_s, dice) -> None:
    if not snapshot.running:
        return
    job, end_s = snapshot.running[0].job, snapshot.now_s + end_s
    found = delays(snapshot, job, end_s, end_s + extra_s)
    late = [one.delay_s for one in found.jobs]
    assert late == sorted(late, reverse=True)
    assert all(MIN_DELAY_S <= by_s <= math.inf for by_s in late)
    assert {one.job for one in found.jobs} <= {row.job for row in snapshot.pending}
    mixed = replace(
        snapshot,
        pending=tuple(dice.sample(snapshot.pending, len(snapshot.pending))),
        running=tuple(dice.sample(snapshot.running, len(snapshot.running))),
    )
    assert delays(mixed, job, end_s, end_s + extra_s) == found
