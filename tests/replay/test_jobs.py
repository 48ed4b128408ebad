"""Job traces: what is read, what is refused with its place, and what the policies come to."""

from __future__ import annotations

import gzip
import json
import math
import operator
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.replay.__main__ import main
from bench.replay.jobs import OWN_POLICIES, replay
from bench.replay.prediction_hook import PredictionHook
from bench.replay.reference_policies import (
    NON_PREEMPTIVE_POLICIES,
    PREEMPTIVE_POLICIES,
    simulate_reference_policy,
)
from bench.replay.trace_files import read_trace
from scheduler.core.decide import decide
from scheduler.core.forecast.durations import DurationHistory
from scheduler.core.model.plan import Plan
from scheduler.core.model.policy import Policy
from scheduler.core.model.snapshot import NodeRow, PendingRow, RunningRow, Snapshot
from scheduler.core.model.validation import check_snapshot
from scheduler.replay.metrics import ReplayResult
from scheduler.replay.simulator import SimulationConfig, SimulationHook, Simulator
from scheduler.replay.trace import ClusterSize, TraceJob
from tests.core.plan_rules import check_plan

MORNING = Path(__file__).parents[1] / "data" / "philly" / "jobs.csv.gz"
HEAD = "timestamp,duration,num_gpus,gpu_time,cluster\n"


def jobs(*rows: tuple[int, int, int] | tuple[int, int, int, str]) -> list[TraceJob]:
    """(submitted, duration, GPUs[, project])."""
    full = [(*row, "p")[:4] for row in rows]
    return [TraceJob(i, str(p), int(s), int(d), int(g)) for i, (s, d, g, p) in enumerate(full)]


def fairway(
    traced: list[TraceJob],
    size: ClusterSize,
    quotas: dict[str, int] | None = None,
    hook: SimulationHook | None = None,
) -> ReplayResult:
    return Simulator(SimulationConfig(traced, size, quotas or {}, Policy(), decide), hook).run()


def starts(outcome: ReplayResult) -> list[float]:
    return [started - job.submitted_s for started, job in zip(outcome.started_s, outcome.jobs, strict=True)]


# -- the files ---------------------------------------------------------------------------------------------


def test_a_trace_is_read_by_time_of_submit_then_duration(tmp_path: Path) -> None:
    lines = ["2017-10-01 00:00:09,5,1,5,a", "2017-10-01 00:00:08,9.5,2,18,b", "2017-10-01 00:00:08,3,4,12,a"]
    path = tmp_path / "trace.csv"
    path.write_text(HEAD + "\n".join(lines) + "\n\n")
    found = read_trace(path)
    assert [(job.number, job.project, job.duration_s, job.gpus) for job in found] == [
        (0, "a", 3, 4), (1, "b", 10, 2), (2, "a", 5, 1)]  # fmt: skip
    assert [job.project for job in read_trace(path, projects=["b"])] == ["b"]


@pytest.mark.parametrize(
    ("content", "place"),
    [
        ("timestamp,duration,cluster\n2017-10-01,5,a\n", "line 1: the column num_gpus is missing"),
        (HEAD + "2017-10-01 00:00:00,5,1,5,a\nyesterday,5,1,5,a\n", "line 3, column timestamp"),
        (HEAD + "2017-10-01T00:00:00+02:00,5,1,5,a\n", "line 2, column timestamp"),
        (HEAD + "2017-10-01 00:00:00,-5,1,5,a\n", "line 2, column duration"),
        (HEAD + "2017-10-01 00:00:00,nan,1,5,a\n", "line 2, column duration"),
        (HEAD + "2017-10-01 00:00:00,5,0,5,a\n", "line 2, column num_gpus"),
        (HEAD + "2017-10-01 00:00:00,5,1.5,5,a\n", "line 2, column num_gpus"),
        (HEAD + "2017-10-01 00:00:00,5,1,5,\n", "line 2, column cluster"),
        (HEAD + "2017-10-01 00:00:00,5,1\n", "line 2: 3 cells"),
        (HEAD, "no job in this window"),
        (gzip.compress(HEAD.encode() * 99, mtime=0)[:-20], "damaged or truncated"),
    ],
)
def test_a_malformed_trace_exits_with_status_2_and_the_position(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | bytes, place: str
) -> None:
    path = tmp_path / "trace.csv"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert main(["jobs", "--trace", str(path), "--nodes", "2"]) == 2
    assert place in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "content", "place"),
    [
        ("--quota-file", '{"6214e9": 8, "nobody": 8}', "$.nobody: not one of the replayed projects"),
        ("--quota-file", '{"6214e9": -1}', "$.6214e9"),
        ("--quota-file", '{"6214e9": true}', "$.6214e9"),
        ("--quota-file", "[1]", "$: an object"),
        ("--quota-file", "{", "line 1, column 2"),
        ("--projects", '["6214e9", 7]', "$[1]"),
        ("--projects", '["6214e9", "6214e9"]', "$[1]"),
        ("--projects", '{"6214e9": 1}', "$: a list"),
        ("--projects", '["nobody"]', "no job in this window"),
    ],
)
def test_a_malformed_side_file_is_refused_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str, content: str, place: str
) -> None:
    path = tmp_path / "side.json"
    path.write_text(content)
    assert main(["jobs", "--trace", str(MORNING), "--nodes", "8", option, str(path)]) == 2
    assert place in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ["--nodes", "0"],
        ["--nodes", "4", "--from", "noon"],
        ["--nodes", "4", "--setting", "luck=1"],
        ["--nodes", "4", "--setting", "usage_half_life_s=-1"],
        ["--nodes", "4", "--setting", "usage_half_life_s"],
    ],
)
def test_invalid_arguments_are_refused(words: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["jobs", "--trace", str(MORNING), *words])
    assert ended.value.code == 2


def test_options_of_this_policy_are_refused_for_others(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["jobs", "--trace", str(MORNING), "--nodes", "4", "--policy", "fifo", "--forecast"]
    assert main(words) == 2
    assert "Fairway's own" in capsys.readouterr().err


def test_a_cluster_where_nothing_fits_is_reported(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(HEAD + "2017-10-01 00:00:00,5,64,5,a\n")
    assert main(["jobs", "--trace", str(path), "--nodes", "2"]) == 1
    assert "fits" in capsys.readouterr().err


# -- the reference policies ----------------------------------------------------------------------------------

SMALL = ClusterSize(2, 4)


@pytest.mark.parametrize(
    ("policy", "wanted"),
    [
        ("fifo", [0, 0, 40, 75, 70]),  # the third waits for a whole node, and the others with it
        ("fifo-skip", [0, 0, 55, 0, 25]),  # the others pass, and keep its node longer
        ("sjf", [0, 0, 55, 0, 25]),
    ],
)
def test_order_of_waiting_jobs(policy: str, wanted: list[int]) -> None:
    traced = jobs((0, 100, 4), (0, 50, 2), (10, 40, 4), (15, 30, 2), (20, 20, 2))
    assert starts(simulate_reference_policy(traced, SMALL, policy)) == wanted


@pytest.mark.parametrize(("policy", "wanted"), [("fifo", [0, 9, 108]), ("sjf", [0, 14, 8])])
def test_sjf_starts_the_shortest_waiting_job(policy: str, wanted: list[int]) -> None:
    assert (
        starts(simulate_reference_policy(jobs((0, 10, 4), (1, 100, 4), (2, 5, 4)), ClusterSize(1, 4), policy))
        == wanted
    )


def test_srtf_lets_the_shorter_in_and_adds_the_cost_of_a_restart() -> None:
    traced = jobs((0, 100, 4), (10, 20, 4))
    outcome = simulate_reference_policy(traced, ClusterSize(1, 4), "srtf")
    assert outcome.started_s == [0, 10]
    assert outcome.ended_s == [100 + 20 + 30, 30]
    assert (outcome.preemptions, outcome.lost_gpu_s) == (1, 120)


def test_tiresias_prefers_a_new_job_over_one_with_service() -> None:
    traced = jobs((0, 20_000, 4), (100, 50, 4), (9_000, 50, 4))
    outcome = simulate_reference_policy(traced, ClusterSize(1, 4), "tiresias")
    assert starts(outcome) == [0, 7_100, 0]  # the first job gives way at 28,800 GPU-seconds


@pytest.mark.parametrize("policy", [*NON_PREEMPTIVE_POLICIES, *PREEMPTIVE_POLICIES])
def test_every_job_ends_after_its_work(policy: str) -> None:
    outcome = simulate_reference_policy(read_trace(MORNING), ClusterSize(6, 8), policy)
    assert all(outcome.wait_s(job) >= 0 for job in outcome.jobs)


# -- ours ----------------------------------------------------------------------------------------------------


class Careful(SimulationHook):
    """Checks every snapshot and plan, and that rows that did not change are the same objects."""

    def __init__(self) -> None:
        self.rows: dict[str, NodeRow | PendingRow | RunningRow] = {}
        self.last_s = -1.0
        self.new = 0

    def on_decision(self, snapshot: Snapshot, plan: Plan) -> None:
        check_snapshot(snapshot)
        check_plan(snapshot, plan)
        assert snapshot.now_s >= self.last_s + 1
        self.last_s = snapshot.now_s
        rows: Iterator[NodeRow | PendingRow | RunningRow] = iter(
            [*snapshot.nodes, *snapshot.pending, *snapshot.running]
        )
        for row in rows:
            key = row.id if isinstance(row, NodeRow) else f"{type(row).__name__} {row.job}"
            before = self.rows.get(key)
            assert before is row or before != row
            self.new += before is not row
            self.rows[key] = row


def test_every_plan_holds_and_unchanged_rows_are_the_same_objects() -> None:
    morning = read_trace(MORNING)
    hook = Careful()
    outcome = fairway(morning[:120], ClusterSize(3, 8), hook=hook)
    assert all(outcome.wait_s(job) >= 0 for job in outcome.jobs)
    assert outcome.preemptions > 0
    assert hook.new < 1_500


def test_the_same_trace_gives_the_same_figures() -> None:
    morning = read_trace(MORNING)[:60]
    assert fairway(morning, ClusterSize(3, 8)).summary() == fairway(morning, ClusterSize(3, 8)).summary()


def test_a_guarantee_is_restored_at_once_and_finished_work_is_kept() -> None:
    """b borrows the whole cluster; a comes for its half: two of b's jobs leave, come back and lose no progress."""
    size = ClusterSize(1, 4)
    traced = jobs(
        (0, 1_000, 1, "b"), (0, 1_000, 1, "b"), (1, 1_000, 1, "b"), (2, 1_000, 1, "b"), (500, 100, 2, "a")
    )
    outcome = fairway(traced, size, {"a": 2, "b": 2})
    assert outcome.preemptions == 2
    assert outcome.started_s[4] == 501
    assert [outcome.wait_s(job) for job in traced] == [0, 0, 107, 107, 1]
    assert outcome.lost_gpu_s == 14


def test_a_gang_that_does_not_fill_its_nodes_is_placed() -> None:
    outcome = fairway(jobs((0, 10, 12), (0, 10, 4)), ClusterSize(2, 8))
    assert outcome.ended_s == [10, 10]


@pytest.mark.parametrize("policy", ["fairway", "fifo-skip"])
def test_the_command_prints_one_line(capsys: pytest.CaptureFixture[str], policy: str) -> None:
    words = ["jobs", "--trace", str(MORNING), "--nodes", "6", "--policy", policy, "--to", "2017-10-09T09:00"]
    assert main(words) == 0
    figures: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert figures["policy"] == policy
    assert figures["jobs"] > 50
    assert figures["mean_completion_s"] > figures["mean_wait_s"] >= 0
    assert set(figures) >= {
        "p50_completion_s", "p95_completion_s", "p99_completion_s", "mean_wait_16plus_s", "max_wait_s",
        "utilisation", "preemptions", "lost_gpu_s", "wait_by_project_s"}  # fmt: skip
    assert 0 < figures["utilisation"] <= 1


# -- predictions and forecasts -------------------------------------------------------------------------------


class ProvenHistory(DurationHistory):
    """Durations whose predictions always count as better than none."""

    is_informative = property(lambda self: True, lambda self, value: None)


class Looks(PredictionHook):
    """Notes what is expected of each job, and that nothing is known before somebody ended."""

    def __init__(self) -> None:
        super().__init__()
        self.durations = ProvenHistory()
        self.expected: dict[str, float | None] = {}
        self.past: list[float] = []

    def on_decision(self, snapshot: Snapshot, plan: Plan) -> None:
        self.expected |= {row.job: row.predicted_duration_s for row in snapshot.pending}
        self.past += [snapshot.now_s - (row.predicted_end_s or 0.0) for row in snapshot.running]


def test_a_prediction_uses_only_ended_jobs() -> None:
    traced = jobs(*((100 * n, 40, 1) for n in range(5)), (150, 4_000, 1), (460, 9, 1))
    hook = Looks()
    fairway([job._replace(number=n) for n, job in enumerate(sorted(traced, key=lambda j: j.submitted_s))],
            ClusterSize(1, 4), hook=hook)  # fmt: skip
    assert hook.expected == {f"{n:06d}": None for n in range(6)} | {"000006": 40.0}


def test_an_exceeded_prediction_is_renewed() -> None:
    hook = Looks()
    fairway(read_trace(MORNING)[:120], ClusterSize(3, 8), hook=hook)
    assert max(hook.past) < 0.0  # every running job is expected to end in the future


def random_trace(seed: int, nodes: int, load: float, known: float = 0.0) -> list[TraceJob]:
    """Return 460 jobs of one project; a doubling of the GPUs multiplies the duration by e to ``known``."""
    draw = random.Random(seed)
    sizes = [draw.choice((1, 1, 1, 2, 2, 4, 8)) for _ in range(460)]
    lasts = [max(60, round(draw.lognormvariate(8.0 + known * math.log2(gpus), 1.5))) for gpus in sizes]
    span_s = sum(map(operator.mul, sizes, lasts)) / (nodes * 8 * load)
    submits = sorted(draw.uniform(0, span_s) for _ in sizes)
    return jobs(*zip(map(int, submits), lasts, sizes, strict=True))


@pytest.mark.parametrize(("seed", "nodes", "load"), [(3, 2, 0.9), (6, 2, 2.0), (4, 4, 2.0), (7, 4, 2.0)])
def test_predictions_do_no_harm_where_durations_are_random(seed: int, nodes: int, load: float) -> None:
    traced, size = random_trace(seed, nodes, load), ClusterSize(nodes, 8)
    without, predicted = (replay(traced, size, policy)["mean_completion_s"] for policy in OWN_POLICIES)
    assert predicted <= 1.01 * without


def test_predictions_help_where_durations_follow_from_the_size() -> None:
    traced, size = random_trace(1, 2, 2.0, known=1.0), ClusterSize(2, 8)
    without, predicted = (replay(traced, size, policy)["mean_completion_s"] for policy in OWN_POLICIES)
    assert predicted < 0.95 * without


def test_forecasts_are_scored_without_side_effects(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["jobs", "--trace", str(MORNING), "--nodes", "3", "--to", "2017-10-09T08:00"]
    assert main(words) == 0
    plain = json.loads(capsys.readouterr().out)
    assert main([*words, "--forecast"]) == 0
    reported = json.loads(capsys.readouterr().out)
    assert reported["mean_completion_s"] == plain["mean_completion_s"]
    assert reported["forecasts"] > 10
    assert 0.0 <= reported["coverage"] <= 1.0
    assert reported["winkler"] > 0.0
    assert reported["baseline_winkler"] > 0.0
    assert reported["median_width_s"] > 0.0
