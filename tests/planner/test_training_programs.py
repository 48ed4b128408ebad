"""The programs for a job's image, run with real torch: FAIRWAY_TEST_TORCH names a Python that has it."""

from __future__ import annotations

import json
import os
import subprocess
import venv
from pathlib import Path

import pytest

from scheduler.planner.comparison import compare_plans
from scheduler.planner.partition import BandwidthLevel
from scheduler.planner.profile import parse_profile

PROGRAMS = Path(__file__).parent.parent.parent / "deploy/training"
TORCH = "torch==2.13.0"
MODELS = """
import torch

def mlp(sizes=(64, 128, 128, 10)):
    torch.manual_seed(3)
    layers = []
    for given, returned in zip(sizes, sizes[1:]):
        layers += [torch.nn.Linear(given, returned), torch.nn.ReLU(inplace=True)]
    return torch.nn.Sequential(*layers[:-1])

def deep():
    return mlp((64, 128, 128, 128, 10))

branched = torch.nn.Linear(4, 4)
"""

pytestmark = pytest.mark.long


@pytest.fixture(scope="session")
def torch_python() -> str:
    """A Python with torch; without FAIRWAY_TEST_TORCH, one that is made once and kept."""
    if "FAIRWAY_TEST_TORCH" in os.environ:
        return os.environ["FAIRWAY_TEST_TORCH"]
    kept = Path.home() / ".cache/fairway-tests" / TORCH.replace("==", "-")
    python = kept / "bin/python"
    if (
        subprocess.run([python, "-c", "import torch"], capture_output=True).returncode
        if python.exists()
        else True
    ):
        venv.create(kept, with_pip=True, clear=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", TORCH, "numpy"], check=True)
    return str(python)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "models.py").write_text(MODELS)
    return tmp_path


def run(python: str, folder: Path, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [python, *words], cwd=folder, capture_output=True, text=True, timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1", **env},
    )  # fmt: skip


def test_a_measured_profile_is_accepted_by_the_planner(torch_python: str, folder: Path) -> None:
    done = run(
        torch_python,
        folder,
        str(PROGRAMS / "profile_layers.py"),
        "models:mlp",
        "--input",
        "32,64",
        "--device",
        "cpu",
    )
    assert done.returncode == 0, done.stderr
    profile = parse_profile((folder / "profile.json").read_text())
    assert [layer.parameter_bytes for layer in profile.layers] == [33_280, 0, 66_048, 0, 5_160]
    assert [layer.output_bytes for layer in profile.layers] == [16_384, 16_384, 16_384, 16_384, 1_280]
    assert all(layer.forward_s and layer.backward_s for layer in profile.layers)
    assert profile.batch_size == 32
    plan = compare_plans(profile, [BandwidthLevel(2, 1e9)])
    assert plan["alternatives"]["straight"]["config"] == "1-1"
    assert plan["samples_per_s"] > 0


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("models:branched", "it is a Linear, not a torch.nn.Sequential"),
        ("models:missing", "has no attribute"),
        ("models", "it is not of the form module:attribute"),
    ],
)
def test_a_model_that_cannot_be_profiled_is_refused(
    torch_python: str, folder: Path, model: str, message: str
) -> None:
    done = run(torch_python, folder, str(PROGRAMS / "profile_layers.py"), model, "--input", "32,64")
    assert done.returncode == 1
    assert message in done.stderr and "Traceback" not in done.stderr


def train(python: str, folder: Path, processes: int, plan: dict | None, *words: str) -> list[dict]:
    """The lines that a training prints: a loss for each step, and the rate at the end."""
    program = str(PROGRAMS / "train_pipeline.py")
    launcher = (
        ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
        if processes > 1
        else []
    )
    given = {"PIPELINE_PLAN": json.dumps(plan)} if plan else {}
    options = ["--model", "models:mlp", "--input", "32,64", "--steps", "6", *words]
    done = run(
        python,
        folder,
        *launcher,
        program,
        *options,
        CUDA_VISIBLE_DEVICES="",
        **given,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize(
    ("schedule", "stages"), [("gpipe", [[0, 2], [2, 5]]), ("1f1b", [[0, 1], [1, 2], [2, 5]])]
)
def test_a_pipeline_has_the_losses_of_the_plain_run(
    torch_python: str, folder: Path, schedule: str, stages: list
) -> None:
    """Also where a stage has no weights."""
    *plain, _ = train(torch_python, folder, 1, None)
    count = len(stages)
    plan = {"stages": stages, "ranks": [[rank] for rank in range(count)], "micro_batches": 4}
    *piped, rate = train(torch_python, folder, count, plan, "--schedule", schedule)
    assert len(plain) == 6 and plain[0]["loss"] != plain[-1]["loss"]
    assert [one["loss"] for one in piped] == pytest.approx([one["loss"] for one in plain], rel=1e-5)
    assert rate["bubble_predicted"] == pytest.approx((count - 1) / (3 + count))
    assert 0 <= rate["bubble_measured"] < 1


def test_replicas_of_a_stage_may_differ_in_number(torch_python: str, folder: Path) -> None:
    *plain, _ = train(torch_python, folder, 1, None)
    for ranks in ([[0, 1], [2]], [[0], [1, 2]], [[0, 1], [2], [3]]):
        stages = [[0, 2], [2, 5]] if len(ranks) == 2 else [[0, 2], [2, 3], [3, 5]]
        plan = {"stages": stages, "ranks": ranks, "micro_batches": 2}
        *piped, rate = train(torch_python, folder, sum(map(len, ranks)), plan)
        assert [one["loss"] for one in piped] == pytest.approx([one["loss"] for one in plain], rel=1e-5)
        assert 0 <= rate["bubble_measured"] < 1


@pytest.mark.parametrize("ranks", [[[0], [1]], [[0, 1], [2]]])
def test_recomputed_activations_give_the_same_losses(torch_python: str, folder: Path, ranks: list) -> None:
    *plain, _ = train(torch_python, folder, 1, None)
    plan = {"stages": [[0, 2], [2, 5]], "ranks": ranks, "micro_batches": 2}
    words = ("--schedule", "gpipe", "--recompute")
    *piped, _ = train(torch_python, folder, sum(map(len, ranks)), plan, *words)
    assert [one["loss"] for one in piped] == pytest.approx([one["loss"] for one in plain], rel=1e-5)


def test_a_pipeline_continues_from_a_checkpoint_in_another_division(
    torch_python: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    *plain, _ = train(torch_python, folder, 1, None)
    monkeypatch.setenv("FAIRWAY_CHECKPOINT_DIR", str(folder / "checkpoints"))
    monkeypatch.setenv("FAIRWAY_CHECKPOINT_FILE", str(folder / "saved"))
    plan = {"stages": [[0, 2], [2, 5]], "ranks": [[0], [1]], "micro_batches": 4}
    *before, _ = train(torch_python, folder, 2, plan, "--steps", "4", "--save_every", "3")
    assert (folder / "saved").read_text() == "4"
    (folder / "checkpoints/step-4.pt").unlink()  # as if it had been cut off
    (folder / "checkpoints/step-4.pt.complete").unlink()
    other = {"stages": [[0, 3], [3, 5]], "ranks": [[0, 1], [2]], "micro_batches": 2}
    *after, _ = train(torch_python, folder, 3, other, "--save_every", "3")
    assert [one["step"] for one in after] == [4, 5, 6]
    losses = [one["loss"] for one in (*before[:3], *after)]
    assert losses == pytest.approx([one["loss"] for one in plain], rel=1e-5)
    again = train(torch_python, folder, 2, plan)
    assert [one.get("step") for one in again] == [None], "it had completed"


def test_two_pipelines_share_their_gradients(torch_python: str, folder: Path) -> None:
    *plain, _ = train(torch_python, folder, 1, None)
    plan = {"stages": [[0, 2], [2, 5]], "ranks": [[0, 1], [2, 3]], "micro_batches": 2}
    *piped, _ = train(torch_python, folder, 4, plan)
    assert [one["loss"] for one in piped] == pytest.approx([one["loss"] for one in plain], rel=1e-5)


EQUAL = """
import sys, torch
expected, *files = sys.argv[1:]
expected = torch.load(expected)
for at, file in enumerate(files):
    found = torch.load(file)
    pairs = list(zip(found["updates"], expected[at], strict=True))
    assert len(pairs) > 20 and all(torch.equal(a, b) for pair in pairs for a, b in zip(*pair, strict=True))
    assert any(each.abs().max() > 0 for each in expected[at][-1])
    print(*found["versions"])
"""


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        ([[0], [1]], []),
        ([[0], [1], [2], [3]], []),
        ([[0, 1], [2]], []),
        ([[0], [1, 2]], []),
        ([[0, 1], [2, 3]], ["--recompute"]),
    ],
)
def test_pipedream_computes_each_gradient_at_the_weights_of_the_forward_pass(
    torch_python: str, folder: Path, ranks: list, words: list
) -> None:
    """The updates are exactly those of the staleness that the paper describes, simulated in one process."""
    stages = [[0, 2], [2, 5]] if len(ranks) == 2 else [[0, 2], [2, 4], [4, 6], [6, 7]]
    model = "models:mlp" if len(ranks) == 2 else "models:deep"
    plan = json.dumps({"stages": stages, "ranks": ranks, "micro_batches": 4, "schedule": "pipedream"})
    options = ["--model", model, "--input", "32,64", "--steps", "8", *words]
    recorder, updates = (
        [str(Path(__file__).parent / "record_gradients.py"), str(PROGRAMS)],
        str(folder / "updates"),
    )
    processes = sum(map(len, ranks))
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    for begin, kind in ((launcher, "run"), ([], "simulate")):
        done = run(
            torch_python, folder, *begin, *recorder, updates, kind, *options,
            PIPELINE_PLAN=plan, CUDA_VISIBLE_DEVICES="",
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
    files = [f"{updates}-{stage[-1]}" for stage in ranks]
    done = run(torch_python, folder, "-c", EQUAL, updates, *files)
    assert done.returncode == 0, done.stderr
    # the versions of the weights in a stage are the micro-batches in flight
    in_flight = [-(-sum(map(len, ranks[at:])) // len(ranks[at])) for at in range(len(ranks))]
    assert done.stdout.split("\n")[:-1] == [f"{number} {number}" for number in in_flight]


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (
            {"stages": [[0, 5]], "ranks": [[0, 1]], "micro_batches": 1},
            "it is for 2 processes, and there are 1",
        ),
        ({"stages": [[0, 4]], "ranks": [[0]], "micro_batches": 1}, "it is for 4 layers, and the model has 5"),
        ({"stages": [[0, 5]], "ranks": [[0]], "micro_batches": 3}, "32 samples are not divisible"),
        (
            {"stages": [[0, 5]], "ranks": [[0]], "micro_batches": 4, "schedule": "flush"},
            "no schedule 'flush'",
        ),
    ],
)
def test_a_plan_that_does_not_fit_is_refused(
    torch_python: str, folder: Path, plan: dict, message: str
) -> None:
    words = [str(PROGRAMS / "train_pipeline.py"), "--model", "models:mlp", "--input", "32,64"]
    done = run(torch_python, folder, *words, PIPELINE_PLAN=json.dumps(plan))
    assert done.returncode == 1
    assert message in done.stderr and "Traceback" not in done.stderr
