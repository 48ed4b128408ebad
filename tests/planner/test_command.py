"""``python -m scheduler.planner``: its output, its messages and its status."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent.parent
VGG = str(REPOSITORY / "tests/data/pipeline/vgg16.json")


def run(*words: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "scheduler.planner", *words],
        cwd=REPOSITORY,
        input=stdin,
        capture_output=True,
        text=True,
    )


def test_plan_is_printed_as_json() -> None:
    done = run("plan", "--profile", VGG, "--gpus", "4", "--bandwidth", "1e9")
    plan = json.loads(done.stdout)
    assert (done.returncode, done.stderr) == (0, "")
    assert (plan["config"], plan["replicas"], plan["stage_time_s"]) == ("3-1", [3, 1], 0.205520896)
    assert [stage["layers"] for stage in plan["stages"]] == [[0, 17], [17, 40]]
    assert set(plan["alternatives"]) == {"straight", "data_parallel", "hybrid"}


def test_levels_and_original_cost() -> None:
    words = ["--levels", "4x10e9,4x1.25e9", "--cost", "original", "--gpus", "16", "--bandwidth", "1"]
    plan = json.loads(run("plan", "--profile", "-", *words, stdin=Path(VGG).read_text()).stdout)
    assert plan["stage_time_s"] == pytest.approx(0.067134, abs=5e-7)


def test_a_graph_of_pipedream_is_read_and_merged_layers_are_said() -> None:
    nodes = [
        f"node{number} -- Linear -- forward_compute_time=1.000, backward_compute_time=2.000, "
        "activation_size=[8.0; 8.0], parameter_size=16.000"
        for number in range(500)
    ]
    text = "\n".join([*nodes, *(f"\tnode{number} -- node{number + 1}" for number in range(499))])
    done = run("plan", "--profile", "-", "--gpus", "4", "--bandwidth", "1e9", stdin=text)
    plan = json.loads(done.stdout)
    assert (done.returncode, plan["merged"]) == (0, {"layers": 500, "planned": 400, "branches": False})
    assert "The 500 layers are planned as 400" in done.stderr and plan["speedup"] > 3.9


@pytest.mark.parametrize(
    ("words", "message", "status"),
    [
        (["--gpus", "0", "--bandwidth", "1"], "argument --gpus: '0' is not a whole number of at least 1", 2),
        (["--gpus", "4", "--bandwidth", "nan"], "argument --bandwidth: 'nan' is not a number above 0", 2),
        (["--gpus", "9" * 400, "--bandwidth", "1"], "a number of 400 digits is too large", 2),
        (["--gpus", "999999999", "--bandwidth", "1"], "999999999 GPUs are too many to plan", 1),
        (["--gpus", "4"], "--gpus and --bandwidth are required, unless --levels describes the topology", 2),
        (["--levels", "4"], "argument --levels: '4' is not of the form NxB, such as 8x30e9", 2),
        (["--levels", "4x1e9,2x1e8", "--gpus", "9"], "--gpus is 9, but --levels has 8 GPUs", 2),
        (["--gpus", "4", "--bandwidth", "1", "--cost", "fast"], "'fast' is not paper or original", 2),
        (["--gpus", "4", "--bandwidth", "1", "--profile", "/missing"], "/missing: No such file or directory", 2),
        (["--gpus", "4", "--bandwidth", "1", "--profile", __file__], "The profile is not JSON", 2),
        (["--gpus", "4", "--bandwidth", "1", "--memory-bytes", "1"], "No division into such stages on 4 GPUs", 1),
    ],
)  # fmt: skip
def test_an_error_is_one_message(words: list[str], message: str, status: int) -> None:
    done = run("plan", "--profile", VGG, *words)
    assert (done.returncode, done.stdout) == (status, "")
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_help_names_the_command_and_its_options() -> None:
    assert "plan" in run("--help").stdout
    assert "--memory-bytes" in run("plan", "--help").stdout
    assert run().returncode == 2
