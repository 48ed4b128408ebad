"""When a waiting job will start."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scheduler.core.cluster import JobId, ProjectId, Snapshot
from scheduler.core.decide import decide
from scheduler.core.forecast import (
    PLAYS,
    Holds,
    Outlook,
    Waits,
    parts,
    play_forward,
)
from scheduler.core.policy import Policy
from scheduler.core.predict import Durations, Kind
from tests.core.drawn import MAIN, NOW_S, cluster, node, project, runs, waits

P, Q = ProjectId("p"), ProjectId("q")
SHARE = {P: 4_000.0, Q: 4_000.0}


def runs_on(of: ProjectId, left_s: float, *places: tuple[int, int]) -> Holds:
    return Holds(of, places, [left_s] * PLAYS)


def in_line(job: str, of: ProjectId, runs_s: float, *tasks: int) -> Waits:
    return Waits(JobId(job), of, tasks, [runs_s] * PLAYS)


def start_s(target: Waits, free: list[int], running: list[Holds], before: list[Waits], **bound: int) -> float:
    plays = play_forward(target, free, running, before, SHARE, **bound)
    assert len(set(plays)) == 1
    return plays[0]


def test_a_job_starts_when_enough_has_ended_and_who_is_before_it_has_started() -> None:
    running = [runs_on(P, 50.0, (0, 1_000)), runs_on(P, 80.0, (0, 1_000))]
    me = in_line("me", P, 10.0, 1_000)
    assert start_s(me, [0], running, []) == 50.0
    assert start_s(me, [0], running, [in_line("a", P, 10.0, 1_000)]) == 60.0
    assert start_s(me, [0], running, [in_line("a", P, 500.0, 1_000)]) == 80.0
    assert start_s(me, [1_000], running, []) == 0.0


def test_a_gang_waits_for_whole_nodes_and_smaller_ones_pass() -> None:
    running = [runs_on(P, 50.0, (0, 2_000)), runs_on(P, 80.0, (1, 2_000))]
    gang = in_line("gang", P, 10.0, 4_000, 4_000)
    assert start_s(gang, [2_000, 2_000], running, []) == 80.0
    assert start_s(in_line("me", P, 10.0, 2_000), [2_000, 0], running, [gang]) == 0.0


def test_who_holds_least_of_its_share_goes_first() -> None:
    running = [runs_on(P, 900.0, (0, 2_000)), runs_on(P, 50.0, (0, 1_000)), runs_on(Q, 900.0, (0, 1_000))]
    before = [in_line("a", P, 10.0, 1_000)]
    assert start_s(in_line("me", Q, 10.0, 1_000), [0], running, before) == 50.0
    assert start_s(in_line("me", P, 10.0, 1_000), [0], running, [in_line("a", Q, 10.0, 1_000)]) == 60.0


def test_a_play_is_bounded_and_says_how_far_it_came() -> None:
    running = [runs_on(P, 10.0 * n, (0, 1)) for n in range(1, 100)]
    assert start_s(in_line("me", P, 1.0, 9_000), [0], running, [], most_steps=7) == 70.0


def test_draws_are_spread_evenly_over_plays_and_jobs() -> None:
    assert all(0.0 <= part < 1.0 for number in range(50) for part in parts(number))
    for number in (0, 7):
        assert sorted(int(part * PLAYS) for part in parts(number)) == list(range(PLAYS))
    assert parts(3) == parts(3)


def crowd() -> Snapshot:
    rows = [runs(f"r{i}", "p", ("n1", range(i, i + 1)), started_s=NOW_S - 100.0) for i in range(4)]
    line = [waits(f"j{i}", "p", 1, age_s=10.0 - i) for i in range(5)]
    return cluster([node("n1")], [project("p")], [], running=rows, pending=line)


def taught() -> Durations:
    durations = Durations()
    for n in range(1, 101):
        durations.learn(Kind("p", "ada", None, 1_000), 20.0 * n)
    return durations


def test_from_photograph_and_plan_to_a_median() -> None:
    snapshot, policy = crowd(), Policy()
    plan = decide(snapshot, policy)
    outlook = Outlook(snapshot, plan, MAIN, taught(), policy)
    medians = [outlook.median_s(JobId(f"j{i}")) for i in range(5)]
    assert medians == sorted(medians)
    assert 0.0 < medians[0] < medians[4] < 2_000.0
    assert medians == [
        Outlook(snapshot, plan, MAIN, taught(), policy).median_s(JobId(f"j{i}")) for i in range(5)
    ]


def test_the_order_of_rows_changes_no_forecast() -> None:
    snapshot, policy = crowd(), Policy()
    turned = replace(snapshot, running=snapshot.running[::-1], pending=snapshot.pending[::-1])
    found = [
        Outlook(each, decide(each, policy), MAIN, taught(), policy).median_s(JobId("j3"))
        for each in (snapshot, turned)
    ]
    assert found[0] == found[1]


def test_a_time_limit_caps_what_is_drawn() -> None:
    snapshot, policy = crowd(), Policy()
    limited = replace(snapshot, running=tuple(replace(row, time_limit_s=130.0) for row in snapshot.running))
    outlook = Outlook(limited, decide(limited, policy), MAIN, taught(), policy)
    assert outlook.median_s(JobId("j0")) <= 30.0


def test_who_does_not_wait_here_has_no_forecast() -> None:
    snapshot, policy = crowd(), Policy()
    with pytest.raises(KeyError):
        Outlook(snapshot, decide(snapshot, policy), MAIN, taught(), policy).median_s(JobId("r0"))
