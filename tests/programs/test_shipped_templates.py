"""The shipped templates: declarations agree with their programs, which run, with real frameworks when long."""

from __future__ import annotations

import argparse
import ast
import os
import socket
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from portal.domain.jobs.parameters import fill_command
from portal.domain.jobs.template_parameters import read_template_parameters
from portal.services.jobs.job_templates import TemplateInput, input_errors
from portal.services.jobs.starter_templates import PROGRAM_PATH, shipped_templates

SHIPPED = {each.name: each for each in shipped_templates()}
WITH_PROGRAM = [name for name, each in SHIPPED.items() if "program" in each.fields]
PACKAGES = {
    "torch-2.13.0": ["torch==2.13.0", "numpy", "accelerate", "onnx", "onnxscript", "onnxruntime"],
    "tf": ["tensorflow-cpu==2.21.0"],
    "sklearn": ["scikit-learn", "xgboost", "ray[train]==2.60.0"],
    "flwr": ["flwr==1.41.0", "numpy"],
    "jax": ["jax==0.10.2"],
}
"""What the cached virtual environments contain; the frameworks are in no lock file of the portal."""


def values_of(template: TemplateInput, **given: object) -> dict[str, object]:
    return {each.name: each.default for each in read_template_parameters(template.parameters)} | given


def arguments_of(name: str, **given: object) -> list[str]:
    """Return the arguments that the template passes to its program."""
    command = SHIPPED[name].fields["command"]
    assert command[:2] == ["python", PROGRAM_PATH]
    return fill_command(command[2:], values_of(SHIPPED[name], **given))


def test_templates_exist_for_common_tasks() -> None:
    assert len(SHIPPED) >= 16 and len(WITH_PROGRAM) >= 20
    assert SHIPPED["sweep"].sweep["searcher"] == "asha"


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_template_is_valid_for_users(name: str) -> None:
    assert input_errors(SHIPPED[name]) == {}


@pytest.mark.parametrize("name", WITH_PROGRAM)
def test_a_program_accepts_the_parameters_of_its_template(name: str) -> None:
    """Its parser is run without its imports, which need the framework."""
    text = SHIPPED[name].fields["program"]
    compile(text, name, "exec")
    parser = read_parser(text)
    parsed = vars(parser.parse_args(arguments_of(name)))
    values = {key: str(value).lower() for key, value in values_of(SHIPPED[name]).items()}
    passed = {word.removeprefix("--") for word in SHIPPED[name].fields["command"] if word.startswith("--")}
    assert {key: str(parsed[key]).lower() for key in passed} == {key: values[key] for key in passed}
    defaults = vars(parser.parse_args([]))
    assert set(defaults) >= passed


PIPELINE_SCHEDULES = ("gpipe", "1f1b", "pipedream")


def read_parser(text: str) -> argparse.ArgumentParser:
    tree = ast.parse(text)
    kept = [
        node
        for node in tree.body
        if (isinstance(node, ast.FunctionDef) and node.name == "shape")
        or (isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "parser")
        or (isinstance(node, ast.Expr) and ast.unparse(node).startswith("parser."))
    ]
    names = {"argparse": argparse, "__doc__": ast.get_docstring(tree), "SCHEDULES": PIPELINE_SCHEDULES}
    exec(compile(ast.Module(kept, []), "parser", "exec"), names)
    found = names["parser"]
    assert isinstance(found, argparse.ArgumentParser)
    return found


def run(
    python: str, folder: Path, name: str, *launch: str, env: dict[str, str] | None = None, **given: object
) -> str:
    """Run a program as a job would: as one file, with its checkpoint directory and metric file; return its output."""
    program = folder / "program"
    program.write_text(SHIPPED[name].fields["program"])
    done = subprocess.run(
        [python, *launch, str(program), *arguments_of(name, **given)],
        cwd=folder, capture_output=True, text=True, timeout=300, env=job_variables(folder) | (env or {}),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def job_variables(folder: Path) -> dict[str, str]:
    return {
        **{key: value for key, value in os.environ.items() if not key.startswith(("DJANGO", "MLFLOW"))},
        "FAIRWAY_CHECKPOINT_DIR": str(folder / "checkpoints"),
        "FAIRWAY_CHECKPOINT_FILE": str(folder / "checkpoint"),
        "FAIRWAY_METRIC_FILE": str(folder / "metrics"),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }


def reports(folder: Path) -> list[tuple[int, float]]:
    lines = [line.split() for line in (folder / "metrics").read_text().splitlines()]
    return [(int(step), float(value)) for step, value in lines]


STANDARD = [
    ("sweep", "epochs", 12, 20, {}),
    ("evolution", "generations", 3, 4, {"population": 8}),
    ("robot-navigation", "episodes", 400, 440, {"size": 6}),
]


@pytest.mark.parametrize(("name", "length", "first", "then", "given"), STANDARD)
def test_a_program_without_framework_trains_and_resumes(
    tmp_path: Path, name: str, length: str, first: int, then: int, given: dict[str, object]
) -> None:
    check_continues(sys.executable, tmp_path, name, length, first, then, given)


def check_continues(
    python: str, folder: Path, name: str, length: str, first: int, then: int, given: dict[str, object]
) -> None:
    """A second run begins after the newest checkpoint of the first."""
    assert "done:" in run(python, folder, name, **{length: first, **given})
    assert (folder / "checkpoint").read_text() == str(first)
    assert list((folder / "checkpoints").glob(f"step-{first}.*.complete"))
    known = reports(folder)
    assert known[-1][0] == first
    run(python, folder, name, **{length: then, **given})
    more = reports(folder)[len(known) :]
    assert more and more[0][0] > first and more[-1][0] == then


def test_a_broken_checkpoint_is_not_used(tmp_path: Path) -> None:
    run(sys.executable, tmp_path, "sweep", epochs=3)
    cut = tmp_path / "checkpoints/step-4.npz"
    cut.write_bytes((tmp_path / "checkpoints/step-3.npz").read_bytes()[:100])
    run(sys.executable, tmp_path, "sweep", epochs=5)
    assert [step for step, _ in reports(tmp_path)] == [1, 2, 3, 4, 5]


def test_the_trial_of_a_sweep_gets_better_with_its_parameters(tmp_path: Path) -> None:
    errors = {}
    for rate in (0.0001, 0.05):
        folder = tmp_path / str(rate)
        folder.mkdir()
        run(sys.executable, folder, "sweep", learning_rate=rate, epochs=20)
        errors[rate] = reports(folder)[-1][1]
    assert errors[0.05] < errors[0.0001] / 2


@pytest.fixture(scope="session")
def pythons() -> dict[str, str]:
    """Pythons with the frameworks by name, made once and kept."""
    return {}


@pytest.fixture
def python_with(pythons):
    def make(name: str) -> str:
        if name not in pythons:
            kept = Path.home() / ".cache/fairway-tests" / name
            python = kept / "bin/python"
            words = [python, "-m", "pip", "install", "--quiet", *PACKAGES[name]]
            if (
                not python.exists()
                or subprocess.run([*words, "--dry-run", "--no-index"], capture_output=True).returncode
            ):
                venv.create(kept, with_pip=True)
                subprocess.run(words, check=True)
            pythons[name] = str(python)
        return pythons[name]

    return make


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "packages", "length", "first", "then", "given"),
    [
        ("data-parallel", "torch-2.13.0", "epochs", 2, 3, {}),
        ("llm-lora", "torch-2.13.0", "steps", 50, 100, {"pretrain_steps": 50, "width": 32}),
        ("reinforcement", "torch-2.13.0", "iterations", 10, 20, {}),
        ("semi-supervised", "torch-2.13.0", "epochs", 3, 5, {}),
        ("transfer", "torch-2.13.0", "epochs", 10, 20, {"pretrain_epochs": 1}),
        ("onnx-export", "torch-2.13.0", "epochs", 5, 10, {}),
        ("scikit-learn", "sklearn", "trees", 20, 40, {}),
        ("xgboost-ray", "sklearn", "rounds", 8, 16, {"rows": 2000}),
        ("tf-mirrored", "tf", "epochs", 1, 2, {}),
    ],
)
def test_a_program_with_framework_trains_and_resumes(
    tmp_path: Path,
    python_with,
    name: str,
    packages: str,
    length: str,
    first: int,
    then: int,
    given: dict[str, object],
) -> None:
    check_continues(python_with(packages), tmp_path, name, length, first, then, given)


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_several_processes_of_torchrun(tmp_path: Path, python_with, strategy: str) -> None:
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    given = {"strategy": strategy, "images": 512}
    done = run(python_with("torch-2.13.0"), tmp_path, "torch-ddp", *launch, epochs=2, **given)
    assert sorted(line[:19] for line in done.splitlines() if "done:" in line) == [
        "done: rank 0 of 2 l", "done: rank 1 of 2 l",
    ]  # fmt: skip
    run(python_with("torch-2.13.0"), tmp_path, "torch-ddp", *launch, epochs=3, **given)
    assert [step for step, _ in reports(tmp_path)] == [1, 2, 3]


@pytest.mark.long
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "pipedream"])
def test_a_pipeline_of_two_processes_trains(tmp_path: Path, python_with, schedule: str) -> None:
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    run(python_with("torch-2.13.0"), tmp_path, "torch-pipeline", *launch, schedule=schedule, steps=60)
    losses = [loss for _, loss in reports(tmp_path)]
    assert len(losses) == 60 and sum(losses[-5:]) < 0.8 * sum(losses[:5])


def run_ranks(
    python: str, folder: Path, name: str, variables: list[dict[str, str]], **given: object
) -> list[str]:
    """Run a process for each rank with variables of its own, and return their outputs."""
    program = folder / "program"
    program.write_text(SHIPPED[name].fields["program"])
    words = [python, str(program), *arguments_of(name, **given)]
    ranks = [
        subprocess.Popen(words, cwd=folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                         env=job_variables(folder) | each)
        for each in variables
    ]  # fmt: skip
    try:
        outputs = [rank.communicate(timeout=300)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * len(ranks), "\n".join(
        each[-2000:] for each in outputs
    )
    return outputs


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "tasks"),
    [("tf-multi-worker", ["worker 0", "worker 1"]), ("tf-parameter-server", ["chief 0", "ps 0", "worker 0"])],
)
def test_tensorflow_tasks_find_each_other(tmp_path: Path, python_with, name: str, tasks: list[str]) -> None:
    cluster: dict[str, list[str]] = {}
    for task in tasks:
        cluster.setdefault(task.split()[0], []).append(f"127.0.0.1:{free_port()}")
    variables = [
        {
            "TF_CONFIG": repr({"cluster": cluster, "task": {"type": kind, "index": int(index)}}).replace(
                "'", '"'
            )
        }
        for kind, index in map(str.split, tasks)
    ]
    outputs = run_ranks(python_with("tf"), tmp_path, name, variables, epochs=2, steps=5)
    assert "done:" in outputs[0] and [step for step, _ in reports(tmp_path)] == [1, 2]


@pytest.mark.long
def test_federated_tasks_exchange_only_weights(tmp_path: Path, python_with) -> None:
    port = str(free_port())
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
    variables = [{**common, "RANK": str(rank)} for rank in range(2)]
    outputs = run_ranks(python_with("flwr"), tmp_path, "federated", variables, rounds=2)
    assert "after 2 rounds of 2 tasks" in outputs[0]
    assert [step for step, _ in reports(tmp_path)] == [1, 2] and reports(tmp_path)[-1][1] < 0.1


@pytest.mark.long
def test_jax_processes_use_the_mean_of_their_gradients(tmp_path: Path, python_with) -> None:
    address = f"127.0.0.1:{free_port()}"
    common = {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": "2", "JAX_PLATFORMS": "cpu"}
    variables = [{**common, "JAX_PROCESS_ID": str(rank)} for rank in range(2)]
    outputs = run_ranks(python_with("jax"), tmp_path, "jax", variables, steps=40)
    assert all("of 2" in each for each in outputs)
    assert reports(tmp_path)[-1][1] < 0.1 * reports(tmp_path)[0][1]
