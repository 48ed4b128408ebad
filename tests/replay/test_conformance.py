"""The conformance runner: strict reading, honest counting, and the families that must match exactly."""

from __future__ import annotations

import copy
import gzip
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bench.conformance import predicates, run_case, select_cases
from bench.conformance.case_cluster import CaseCluster, next_states
from bench.conformance.format import read_cases
from bench.conformance.kai_policy import kai_policy
from bench.conformance.scheduling import apply
from bench.replay.__main__ import main
from scheduler.core.decide import decide
from scheduler.core.model.plan import Eviction, EvictionReason, JobPlacement, Plan, TaskPlacement
from scheduler.core.model.policy import Policy
from scheduler.core.model.snapshot import UNLIMITED_MILLI, JobId
from scheduler.replay.command import MALFORMED
from tests.core.plan_rules import check_plan

FILE = Path(__file__).parents[1] / "data" / "conformance" / "scheduler_cases.json.gz"
CASES = read_cases(FILE)
CONTENT = json.loads(gzip.decompress(FILE.read_bytes()))
SCHEDULING = {case["id"]: case for case in CASES.scheduling}


def case_named(name: str) -> dict[str, Any]:
    return copy.deepcopy(dict(SCHEDULING[name]))


@pytest.mark.parametrize("kind", ["fair_share", "predicate"])
def test_every_division_and_every_rule_is_as_expected(kind: str) -> None:
    outcomes = [run_case(name, case, Policy()) for name, case in select_cases(CASES, kind, "")]
    assert outcomes and [outcome for outcome in outcomes if not outcome.passed] == []


def test_work_inside_a_guarantee_is_safe_at_every_level() -> None:
    case = {
        "id": "x",
        "kind": "reclaimable",
        "expected": True,
        "data": {
            "queues": {
                "mine": {"gpu": {"deserved": 2, "fair_share": 2, "limit": -1}},
                "theirs": {"gpu": {"deserved": 1, "fair_share": 1, "allocated": 2, "limit": -1}},
                "leaf": {
                    "parent": "theirs",
                    "gpu": {"deserved": 2, "fair_share": 2, "allocated": 2, "limit": -1},
                },
            },
            "reclaimer": {"Queue": "mine", "RequiredResources": {"gpu": 1}, "IsPreemptable": True},
            "victims": [{"queue": "leaf", "tasks": [{"gpu": 1}]}],
        },
    }
    assert predicates.run_case(case).got == "False"  # all of it is inside the leaf's guarantee


def write(tmp_path: Path, content: Any) -> str:
    path = tmp_path / "cases.json"
    path.write_text(json.dumps(content))
    return str(path)


def changed(*path: str | int, to: Any) -> Callable[[], dict[str, Any]]:
    def make() -> dict[str, Any]:
        content = copy.deepcopy(CONTENT)
        here = content
        for step in path[:-1]:
            here = here[step]
        here[path[-1]] = to
        return content

    return make


@pytest.mark.parametrize(
    ("make", "place"),
    [
        (changed("surprise", to=1), "$.surprise"),
        (changed("scheduling_cases", 3, "surprise", to=1), "$.scheduling_cases[3].surprise"),
        (changed("scheduling_cases", 0, "jobs", 0, "surprise", to=1), "$.scheduling_cases[0].jobs[0].surprise"),
        (
            changed("scheduling_cases", 0, "jobs", 0, "tasks", 1, "surprise", to=1),
            "$.scheduling_cases[0].jobs[0].tasks[1].surprise",
        ),
        (
            changed("scheduling_cases", 0, "nodes", "node0", "surprise", to=1),
            "$.scheduling_cases[0].nodes.node0.surprise",
        ),
        (changed("scheduling_cases", 0, "queues", 0, "priority", to="?"), "$.scheduling_cases[0].queues[0].priority"),
        (changed("scheduling_cases", 0, "nodes", "node0", "gpus", to=9**9), "$.scheduling_cases[0].nodes.node0.gpus"),
        (changed("scheduling_cases", 0, "rounds", "until_match", to=-1), "$.scheduling_cases[0].rounds.until_match"),
        (changed("fair_share_cases", 0, "k_value", to=float("nan")), "$.fair_share_cases[0].k_value"),
        (changed("scheduling_cases", 0, "portable", to="yes"), "$.scheduling_cases[0].portable"),
        (changed("scheduling_cases", 0, "suite", to="other"), "$.scheduling_cases[0].suite"),
        (changed("scheduling_cases", 0, "jobs", 0, "queue", to="nobody"), "$.scheduling_cases[0].jobs[0].queue"),
        (changed("scheduling_cases", 1, "id", to=CONTENT["scheduling_cases"][0]["id"]), "$.scheduling_cases[1].id"),
        (changed("fair_share_cases", 2, "queues", "1", "gpu", "odd", to=1), "$.fair_share_cases[2].queues.1.gpu.odd"),
        (changed("fair_share_cases", 2, "total", to=True), "$.fair_share_cases[2].total"),
        (changed("predicate_cases", 0, "data", "surprise", to=1), "$.predicate_cases[0].data.surprise"),
        (changed("predicate_cases", 0, "data", to={"surprise": 1}), "$.predicate_cases[0].data"),
        (changed("predicate_cases", 0, "kind", to="other"), "$.predicate_cases[0]"),
        (list, "$"),
    ],
)  # fmt: skip
def test_unknown_keys_are_refused_with_their_position(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], make: Callable[[], Any], place: str
) -> None:
    assert main(["conformance", write(tmp_path, make())]) == MALFORMED
    assert f", {place}: " in capsys.readouterr().err


def test_a_field_that_is_missing_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = copy.deepcopy(CONTENT)
    del content["scheduling_cases"][5]["rounds"]
    assert main(["conformance", write(tmp_path, content)]) == MALFORMED
    assert "$.scheduling_cases[5]: the field rounds is missing" in capsys.readouterr().err


def test_groups_within_groups_end_somewhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tree: dict[str, Any] = {"name": "root"}
    for _ in range(400):
        tree = {"name": "root", "subgroups": [tree]}
    content = changed("scheduling_cases", 0, "jobs", 0, "subgroup_tree", to=tree)()
    assert main(["conformance", write(tmp_path, content)]) == MALFORMED
    assert "nested too deeply" in capsys.readouterr().err


def test_a_file_that_is_cut_off_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "cases.json.gz"
    path.write_bytes(FILE.read_bytes()[:-1000])
    assert main(["conformance", str(path)]) == MALFORMED
    assert "damaged or truncated" in capsys.readouterr().err


def last_line(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().out.splitlines()[-1]


def test_the_last_line_counts_every_case(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = changed("fair_share_cases", 0, "fair_share", "1", to=1.5)()
    wrong["scheduling_cases"] = [case for case in wrong["scheduling_cases"] if not case["portable"]]
    skipped = len(wrong["scheduling_cases"])
    assert main(["conformance", write(tmp_path, wrong)]) == 1
    assert last_line(capsys) == f"120 passed, 1 failed, {skipped} skipped of {121 + skipped}"


def test_a_choice_counts_the_chosen_alternative(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["conformance", str(FILE), "--kind", "predicate"]) == 0
    assert last_line(capsys) == "69 passed, 0 failed, 0 skipped of 69"
    assert main(["conformance", str(FILE), "--only", "fairshare#00"]) == 0
    assert last_line(capsys) == "8 passed, 0 failed, 0 skipped of 8"


def test_portable_cases_are_never_skipped() -> None:
    for kind, case in select_cases(CASES, "scheduling", ""):
        assert not (case["portable"] and run_case(kind, case, kai_policy()).skipped), case["id"]


@pytest.mark.parametrize(
    ("policy", "portable", "core"),
    [(kai_policy(), 98.0, 98.0), (Policy(movable_jobs="any"), 90.0, 90.0), (Policy(), 86.5, 87.0)],
    ids=["kai", "default that moves any job", "default"],
)
def test_portable_cases_end_as_they_do_in_kai(policy: Policy, portable: float, core: float) -> None:
    answered = [(case, run_case(kind, case, policy)) for kind, case in select_cases(CASES, "scheduling", "")]
    for flag, floor in (("portable", portable), ("core", core)):
        outcomes = [outcome for case, outcome in answered if case[flag]]
        failed = [outcome.id for outcome in outcomes if not outcome.passed]
        assert 100 * (1 - len(failed) / len(outcomes)) >= floor, failed


def perturbed(case: dict[str, Any], draw: random.Random) -> dict[str, Any]:
    """The same cluster with other priorities, quotas and minimums, and some of what runs waiting."""
    for queue in case["queues"]:
        queue["deserved_gpus"] = draw.choice([queue["deserved_gpus"], -1, 0, 1, 4])
        queue["limit_gpus"] = draw.choice([queue["limit_gpus"], -1, -1, 2, 4])
    for job in case["jobs"]:
        job["priority"] = draw.choice([job["priority"], 50, 100])
        job["preemptible"] = draw.choice([job["preemptible"], True])
        if job["min_available"]:
            job["min_available"] = draw.randint(1, max(1, len(job["tasks"])))
        for task in job["tasks"]:
            if task["state"] == "Running" and draw.random() < 0.1:
                task["state"] = "Pending"
    return case


@pytest.mark.parametrize("seed", range(4))
def test_invariants_hold_on_every_kind_of_case(seed: int) -> None:
    draw = random.Random(seed)
    for case in draw.sample([case for case in CASES.scheduling if case["portable"]], 60):
        cluster = CaseCluster(perturbed(copy.deepcopy(dict(case)), draw))
        states = cluster.initial_states()
        for _ in range(3):
            snapshot = cluster.snapshot(states)
            plan = decide(snapshot, Policy())
            check_plan(snapshot, plan)
            states = next_states(states, apply(states, plan), deleted=())


# -- from a case to a snapshot and on -------------------------------------------------------------------


def small() -> dict[str, Any]:
    """Two nodes of two GPUs; an elastic job runs with two of its three tasks, a share and a whole one wait."""
    case = case_named("allocate.allocateElastic#000")
    case["nodes"] = {f"node{i}": {"gpus": 2, "gpu_memory_mib": 100} for i in (0, 1)}
    job = case["jobs"][0]
    common = {**job, "min_available": 1, "priority": 50}
    case["jobs"] = [
        {**common, "name": "grows", "list_index": 0, "tasks": [
            {"id": "grows-0", "state": "Running", "node": "node0"},
            {"id": "grows-1", "state": "Running", "node": "node0"},
            {"id": "grows-2", "state": "Pending"},
        ]},
        {**common, "name": "half", "list_index": 1, "gpus_per_task": 0.5, "priority": 100, "tasks": [
            {"id": "half-0", "state": "Running", "node": "node1", "gpu_groups": ["0"]},
        ]},
        {**common, "name": "other", "list_index": 2, "gpus_per_task": 0.5, "tasks": [
            {"id": "other-0", "state": "Running", "node": "node1", "gpu_groups": ["0"]},
        ]},
    ]  # fmt: skip
    return case


def test_a_case_becomes_a_snapshot() -> None:
    cluster = CaseCluster(small())
    snapshot = cluster.snapshot(cluster.initial_states())
    grows = next(row for row in snapshot.running if row.job == "grows")
    assert [task.rank for task in grows.tasks] == [0, 1] and grows.min_tasks == 1
    waits = snapshot.pending[0]
    assert (waits.job, waits.tasks, waits.ranks) == ("grows", 1, (2,))
    halves = [row.tasks[0].gpus for row in snapshot.running if row.job != "grows"]
    assert halves[0] == halves[1] and halves[0][0].milli == 500
    assert [gpu.used_milli for node in snapshot.nodes for gpu in node.gpus] == [1000, 1000, 1000, 0]
    assert [gpu.exclusive for gpu in snapshot.nodes[1].gpus] == [False, False]
    department = next(quota for quota in snapshot.quotas if quota.project == "default")
    assert department.guaranteed_milli == UNLIMITED_MILLI and department.limit_milli is None
    oldest = min(snapshot.running, key=lambda row: row.submitted_s or 0)
    assert oldest.job == "half"  # priority first, then the order of the list


def test_effects_of_a_plan_on_tasks_and_the_next_cycle() -> None:
    case = small()
    cluster = CaseCluster(case)
    states = cluster.initial_states()
    place = (TaskPlacement(2, "node1", ()),)
    plan = Plan(
        starts=(JobPlacement(JobId("grows"), "pool", 0, place),),
        nominations=(JobPlacement(JobId("other"), "pool", 0, (TaskPlacement(0, "node0", ()),)),),
        evictions=(
            Eviction(JobId("grows"), EvictionReason.PREEMPTED, JobId("x"), (1,)),
            Eviction(JobId("half"), EvictionReason.PREEMPTED, JobId("x")),
            Eviction(JobId("other"), EvictionReason.MIGRATED, JobId("x")),
        ),
    )  # fmt: skip
    after = apply(states, plan)
    assert {task: state.state for task, state in after.items()} == {
        "grows-0": "Running", "grows-1": "Releasing", "grows-2": "Binding", "half-0": "Releasing",
        "other-0": "Pipelined",
    }  # fmt: skip
    then = next_states(states, after, deleted=["half-0"])
    assert {task: (state.state, state.node) for task, state in then.items()} == {
        "grows-0": ("Running", "node0"), "grows-1": ("Pending", None), "grows-2": ("Running", "node1"),
        "half-0": ("Releasing", "node1"), "other-0": ("Pending", None),
    }  # fmt: skip
