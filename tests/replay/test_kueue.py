"""Kueue's scenario in small: admission times known by hand, what is refused, and one whole run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.replay.__main__ import main
from bench.replay.kueue_simulator import Cohorts, KueueSimulator, Workload
from scheduler.core.decide import decide
from scheduler.core.model.plan import Plan
from scheduler.core.model.policy import ACTIONS, Policy, SchedulingSemantics
from scheduler.core.model.snapshot import JobId, Snapshot
from tests.core.plan_rules import check_plan

SETS = [
    {
        "class": "small",
        "count": 8,
        "creation_interval_ms": 100,
        "run_time_ms": 200,
        "priority": 50,
        "gpus": 1,
    },
    {
        "class": "large",
        "count": 2,
        "creation_interval_ms": 300,
        "run_time_ms": 400,
        "priority": 200,
        "gpus": 3,
    },
]
SCENARIO: dict[str, Any] = {
    "cohorts": 2,
    "queues_per_cohort": 2,
    "nominal_quota": 3,
    "borrowing_limit": 2,
    "reclaim_within_cohort": "any",
    "within_queue": "lower_priority",
    "workload_sets": SETS,
    "floor_with_an_instant_scheduler": {"wall_s": 1.0},
}


def workload(
    name: str,
    at_s: float,
    run_s: float,
    *,
    queue: int = 0,
    gpus: int = 1,
    priority: int = 50,
    cohort: int = 0,
) -> Workload:
    return Workload(JobId(name), "any", cohort, queue, at_s, run_s, priority, gpus)


class Watch:
    """Simulated seconds; deciding takes ``each_s`` of them."""

    def __init__(self, each_s: float = 0.0) -> None:
        self.now_s = 1_000.0
        self.each_s = each_s
        self.seen: list[Snapshot] = []

    def decide(self, snapshot: Snapshot, policy: Policy) -> Plan:
        plan = decide(snapshot, policy)
        check_plan(snapshot, plan)
        self.seen.append(snapshot)
        self.now_s += self.each_s
        return plan


def admitted(clock: KueueSimulator, name: str) -> float:
    return clock.admitted_s[JobId(name)]


def ran(cohorts: Cohorts, *workloads: Workload, each_s: float = 0.0, without: str = "") -> KueueSimulator:
    """The clock after everything; deciding takes ``each_s``."""
    watch = Watch(each_s)
    actions = tuple(action for action in ACTIONS if action != without)
    policy = Policy(semantics=SchedulingSemantics(actions=actions))
    clock = KueueSimulator(cohorts, workloads, policy, watch.decide, lambda: watch.now_s)
    assert clock.run() == set()
    return clock


def test_a_queue_borrows_in_its_cohort_up_to_its_limit() -> None:
    clock = ran(Cohorts(2, 2, 2, 1), *(workload(name, 1, 10) for name in "abcd"))
    assert sorted(clock.admitted_s.values()) == [1, 1, 1, 11]
    assert clock.wall_s == 21


def test_without_a_limit_a_queue_borrows_only_from_its_cohort() -> None:
    clock = ran(Cohorts(2, 2, 2, None), *(workload(name, 1, 10) for name in "abcdef"))
    assert sorted(clock.admitted_s.values()) == [1, 1, 1, 1, 11, 11]


def test_borrowed_quota_is_returned_at_once_and_the_job_restarts() -> None:
    borrowers = [workload(name, 1, 10) for name in "abcd"]
    clock = ran(Cohorts(1, 2, 2, None), *borrowers, workload("owner", 4, 1, queue=1, gpus=2))
    assert admitted(clock, "owner") == 4
    assert sorted(admitted(clock, name) for name in "abcd") == [1, 1, 5, 5]
    assert (clock.preemptions, clock.lost_gpu_s, clock.wall_s) == (2, 6, 15)


def test_borrowed_quota_stays_where_reclaim_is_off() -> None:
    borrowers = [workload(name, 1, 10) for name in "abcd"]
    owner = workload("owner", 4, 1, queue=1, gpus=2)
    clock = ran(Cohorts(1, 2, 2, None), *borrowers, owner, without="reclaim")
    assert (admitted(clock, "owner"), clock.preemptions) == (11, 0)


@pytest.mark.parametrize(("without", "high_s", "low_s", "wall_s"), [("", 3, 5, 15), ("preempt", 11, 1, 13)])
def test_priority_within_a_queue(without: str, high_s: float, low_s: float, wall_s: float) -> None:
    low, high = workload("low", 1, 10), workload("high", 3, 2, priority=200)
    clock = ran(Cohorts(1, 1, 1, None), low, high, without=without)
    assert (admitted(clock, "high"), admitted(clock, "low"), clock.wall_s) == (high_s, low_s, wall_s)


def test_the_clock_runs_on_while_the_engine_decides() -> None:
    clock = ran(Cohorts(1, 1, 2, None), workload("first", 1, 1), workload("second", 1.2, 1), each_s=0.5)
    assert clock.admitted_s == {"first": pytest.approx(1.5), "second": pytest.approx(2.0)}
    assert clock.decide_s == pytest.approx(1.0)
    assert clock.wall_s == pytest.approx(3.0)


def test_a_job_that_ends_during_the_decision_is_not_preempted() -> None:
    low, high = workload("low", 1, 2.2), workload("high", 3, 1, priority=200)
    clock = ran(
        Cohorts(1, 1, 1, None), low, high, each_s=0.5
    )  # low runs from 1.5 to 3.7, high is placed at 3.5
    assert clock.preemptions == 1
    low = workload("low", 1, 1.8)  # ends at 3.3, while the engine decides upon its end
    clock = ran(Cohorts(1, 1, 1, None), low, high, each_s=0.5)
    assert clock.preemptions == 0
    assert admitted(clock, "high") == pytest.approx(4.0)


def test_unchanged_rows_are_the_same_objects() -> None:
    watch = Watch()
    jobs = [workload(name, 1 + i / 10, 1) for i, name in enumerate("abcd")]
    KueueSimulator(Cohorts(2, 1, 2, None), jobs, Policy(), watch.decide, lambda: watch.now_s).run()
    assert len(watch.seen) > 3
    for one, other in zip(watch.seen, watch.seen[1:], strict=False):
        assert one.nodes[1] is other.nodes[1]
        for row in other.running:
            assert all(row is before for before in one.running if before.job == row.job)
        for waits in other.pending:
            assert all(waits is before for before in one.pending if before.job == waits.job)


def test_an_impossible_workload_ends_the_scenario() -> None:
    clock = KueueSimulator(Cohorts(1, 1, 1, None), [workload("wide", 1, 1, gpus=2)], Policy(), decide)
    assert clock.run() == {"wide"}


def test_the_command_prints_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "scenario.json"
    path.write_text(json.dumps(SCENARIO))
    assert main(["kueue", str(path)]) == 0
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (line["workloads"], line["never_admitted"]) == (40, 0)
    assert set(line["mean_time_to_admission_s"]) == {"small", "large", "all"}
    assert line["wall_s"] >= 1.0
    assert line["times_floor"] == pytest.approx(line["wall_s"], rel=1e-3)
    assert 0 < line["decide_s"] < line["wall_s"]
    assert 0 < line["usage_percent"] <= 100


@pytest.mark.parametrize(
    ("change", "place"),
    [
        ({"cohorts": 0}, "$.cohorts: 0 is not between"),
        ({"queues_per_cohort": None}, "$.queues_per_cohort: it is missing"),
        ({"nominal_quota": 2.5}, "$.nominal_quota: 2.5 is not a whole number"),
        ({"nominal_quota": 0}, "$.nominal_quota: the queues of a cohort have 0 GPUs"),
        ({"borrowing_limit": -1}, "$.borrowing_limit: -1 is not between"),
        ({"reclaim_within_cohort": "maybe"}, "$.reclaim_within_cohort: 'maybe'"),
        ({"within_queue": 3}, "$.within_queue: 3"),
        ({"workload_sets": {}}, "$.workload_sets: a list"),
        ({"workload_sets": [*SETS, 7]}, "$.workload_sets[2]: an object"),
        ({"workload_sets": [{**SETS[0], "class": ""}]}, "$.workload_sets[0].class"),
        ({"workload_sets": [SETS[0], {**SETS[1], "count": True}]}, "$.workload_sets[1].count: True is no"),
        ({"workload_sets": [{**SETS[0], "run_time_ms": float("nan")}]}, "$.workload_sets[0].run_time_ms: nan"),
        ({"workload_sets": [{**SETS[0], "creation_interval_ms": "1"}]}, "$.workload_sets[0].creation_interval_ms"),
        ({"workload_sets": [{**SETS[0], "gpus": 0}]}, "$.workload_sets[0].gpus: 0 is not between"),
        ({"workload_sets": [{**SETS[0], "count": 900_000}]}, "$.workload_sets: more than"),
        ({"floor_with_an_instant_scheduler": 66}, "$.floor_with_an_instant_scheduler: an object"),
    ],
)  # fmt: skip
def test_a_malformed_scenario_exits_with_status_2_and_the_position(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: dict[str, Any], place: str
) -> None:
    path = tmp_path / "scenario.json"
    path.write_text(json.dumps({**SCENARIO, **change}))
    assert main(["kueue", str(path)]) == 2
    assert place in capsys.readouterr().err


@pytest.mark.parametrize(("content", "place"), [("[]", "$: an object"), ("{", "line 1, column 2")])
def test_text_that_is_not_a_scenario(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str, place: str
) -> None:
    path = tmp_path / "scenario.json"
    path.write_text(content)
    assert main(["kueue", str(path)]) == 2
    assert place in capsys.readouterr().err
