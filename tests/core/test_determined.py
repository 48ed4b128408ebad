"""Experiment files of Determined AI: what becomes a sweep, what has no counterpart, and what is refused."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from portal.domain.jobs.parameters import fill_command, parameter_use_error, read_parameters
from portal.domain.sweeps.sweeps import SweepSpec, sweep_errors
from portal.errors import InvalidRequest
from portal.services.sweeps.determined import read_experiment, read_keys

ASHA = """
name: mnist_asha
entrypoint: python3 train.py
hyperparameters:
  learning_rate: {type: log, base: 10, minval: -4, maxval: -1}
  filters: {type: int, minval: 8, maxval: 64}
  dropout: {type: double, minval: 0.2, maxval: 0.8}
  optimizer:
    name: {type: categorical, vals: [sgd, adam]}
    momentum: {type: const, val: 0.9}
  global_batch_size: 64
searcher:
  name: adaptive_asha
  metric: validation_loss
  smaller_is_better: true
  max_length: {epochs: 64}
  max_trials: 20
  max_concurrent_trials: 6
  mode: aggressive
resources: {slots_per_trial: 2, shm_size: 1073741824, resource_pool: a100}
max_restarts: 2
environment:
  image: example/image:1
  environment_variables: [A=b, C=d=e]
reproducibility: {experiment_seed: 42}
bind_mounts: [{host_path: /data, container_path: /data}]
workspace: research
"""


def test_an_asha_experiment_becomes_a_sweep() -> None:
    found = read_experiment(ASHA)
    assert found.job == {
        "name": "mnist_asha",
        "command": ["/bin/sh", "-c", "python3 train.py"],
        "gpus_per_task": 2,
        "shm_mib": 1024,
        "max_attempts": 3,
        "retry_on": ["node_failure", "command_failure"],
        "env": {"A": "b", "C": "d=e"},
    }
    assert found.sweep == {
        "searcher": "asha",
        "reads_environment": True,
        "metric": "validation_loss",
        "direction": "minimize",
        "max_trials": 20,
        "max_parallel": 6,
        "max_steps": 64,
        "min_steps": 1,
        "reduction_factor": 4,
        "pause_pruned": False,
        "seed": 42,
    }
    parameters = read_parameters(found.parameters)
    assert {
        name: (each.low, each.high, each.log, each.is_integer)
        for name, each in parameters.items()
        if each.is_range
    } == {
        "learning_rate": (1e-4, 0.1, True, False),
        "filters": (8, 64, False, True),
        "dropout": (0.2, 0.8, False, False),
    }
    assert parameters["optimizer.name"].choices == ("sgd", "adam")
    assert parameters["optimizer.momentum"].choices == (0.9,) and parameters["global_batch_size"].choices == (
        64,
    )
    assert sweep_errors(SweepSpec(**found.sweep), found.parameters, []) == {}
    assert parameter_use_error(found.job["command"], [], parameters, reads_environment=True) is None


def test_keys_without_a_counterpart_are_listed() -> None:
    assert read_experiment(ASHA).ignored == {
        "resources.resource_pool": "The pool is chosen at the import.",
        "environment.image": "Choose an environment with this image.",
        "bind_mounts": "Give volumes instead.",
        "workspace": "The project is chosen at the import.",
    }


SINGLE = "entrypoint: t\nsearcher: {name: single}\nhyperparameters: "
RANGE = "{type: int, minval: 1, maxval: 3}"


@pytest.mark.parametrize(
    ("searcher", "expected"),
    [
        ("{name: single, metric: loss}", {"searcher": "random", "max_trials": 1}),
        ("{name: random, metric: acc, smaller_is_better: false, max_trials: 9}",
         {"max_trials": 9, "direction": "maximize"}),
        ("{name: grid, metric: loss}", {"searcher": "grid", "max_parallel": 16}),
        ("{name: adaptive_asha, metric: l, max_trials: 9, max_time: 81, time_metric: a, divisor: 3, max_rungs: 3}",
         {"max_steps": 81, "min_steps": 9, "reduction_factor": 3}),
    ],
)  # fmt: skip
def test_searchers_are_translated(searcher: str, expected: dict[str, object]) -> None:
    found = read_experiment(
        f"entrypoint: [python3, t.py]\nhyperparameters: {{a: {RANGE}}}\nsearcher: {searcher}"
    )
    assert found.job["command"] == ["python3", "t.py"] and found.job["gpus_per_task"] == 1
    assert expected.items() <= found.sweep.items()
    assert sweep_errors(SweepSpec(**found.sweep), found.parameters, []) == {}


def test_a_grid_uses_the_counts_of_its_ranges() -> None:
    found = read_experiment(
        "entrypoint: t.py\nsearcher: {name: grid, metric: loss}\nhyperparameters:\n"
        "  a: {type: double, minval: 0, maxval: 1, count: 3}\n  b: {type: log, minval: -3, maxval: -1, count: 3}\n"
    )
    assert found.parameters == {"a": {"choices": [0.0, 0.5, 1.0]}, "b": {"choices": [0.001, 0.01, 0.1]}}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- a", "its keys are missing"),
        ("a: [", "not valid YAML"),
        ("a: &x [1]\nb: *x", "Aliases"),
        ("a: !!python/object/apply:os.system ['true']", "is neither text, number"),
        ("a: " + "[" * 5000, "nested deeper than 32 levels"),
        ("a: " + "x" * 300_000, "larger than 256 KiB"),
        ("searcher: {name: random}", "no entrypoint"),
        ("entrypoint: model_def:MNistTrial\nsearcher: {name: random}", "Trial class of Determined"),
        ("entrypoint: t\nsearcher: {name: custom}", "searcher 'custom' is not known"),
        ("entrypoint: t\nsearcher: {name: random}", "searcher.max_trials is missing"),
        ("entrypoint: t\nsearcher: {name: random, max_trials: .inf}", "too large"),
        ("entrypoint: t\nresources: {slots_per_trial: -1}\nsearcher: {name: single}", "slots_per_trial"),
        (f"{SINGLE}{{a: {{type: log, minval: -4}}}}", "a.maxval is missing"),
        (f"{SINGLE}{{a: {{type: normal}}}}", "unknown type normal"),
        (f"{SINGLE}{{a: {{type: log, minval: 1, maxval: 99999}}}}", "above 1e15"),
    ],
)  # fmt: skip
def test_a_file_that_is_not_an_experiment_is_refused(text: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        read_experiment(text)


# -- every key is used, or listed --------------------------------------------------------------------

HYPERPARAMETERS = {
    "plain": 64,
    "words": ["a", "b"],
    "range": {"type": "int", "minval": 1, "maxval": 9, "count": 3},
    "decimal": {"type": "double", "minval": 0.5, "maxval": 2.5, "count": 3},
    "rate": {"type": "log", "base": 10, "minval": -4, "maxval": -1, "count": 4},
    "group": {
        "choice": {"type": "categorical", "vals": ["sgd", "adam"]},
        "fixed": {"type": "const", "val": 0.9},
    },
}
COMMON: dict[str, Any] = {
    "name": "digits",
    "description": "text",
    "labels": ["a"],
    "entrypoint": "python3 train.py",
    "hyperparameters": HYPERPARAMETERS,
    "resources": {
        "slots_per_trial": 2, "shm_size": "4g", "is_single_node": False, "priority": 50, "max_slots": 8,
        "resource_pool": "a100", "weight": 2, "native_parallel": False, "devices": [], "slots": 3,
    },
    "max_restarts": 2,
    "preemption_timeout": 60,
    "environment": {
        "image": {"cuda": "i", "cpu": "c"}, "force_pull_image": True, "ports": {"a": 1},
        "environment_variables": {"cuda": ["A=b", "C=d=e"], "cpu": ["X=1"], "rocm": ["Y=1"]},
    },
    "reproducibility": {"experiment_seed": 42},
    "bind_mounts": [{"host_path": "/data", "container_path": "/data"}],
    "checkpoint_policy": "best",
    "checkpoint_storage": {"type": "shared_fs", "host_path": "/x", "save_trial_best": 1},
    "min_validation_period": {"batches": 10},
    "records_per_epoch": 100,
    "profiling": {"enabled": True},
    "workspace": "w",
    "project": "p",
    "log_policies": [{"pattern": "x", "action": {"type": "exclude_node"}}],
}  # fmt: skip
METRIC = {"metric": "loss", "smaller_is_better": False, "source_trial_id": 3}
FILES: dict[str, dict[str, Any]] = {
    "asha": COMMON | {"searcher": {
        "name": "adaptive_asha", **METRIC, "max_length": {"epochs": 81}, "time_metric": "epochs", "max_time": 5,
        "max_trials": 20, "max_concurrent_trials": 0, "mode": "aggressive", "divisor": 3, "max_rungs": 3,
        "stop_once": False,
    }},
    "brackets": COMMON | {"searcher": {
        "name": "adaptive_asha", **METRIC, "max_time": 729, "max_trials": 20, "bracket_rungs": [3],
    }},
    "halving": COMMON | {"searcher": {
        "name": "async_halving", **METRIC, "max_length": 6561, "max_trials": 20, "divisor": 3, "num_rungs": 3,
    }},
    "random": COMMON | {"searcher": {
        "name": "random", **METRIC, "max_length": {"batches": 90}, "max_trials": 9, "max_rungs": 4,
    }},
    "grid": COMMON | {"searcher": {
        "name": "grid", **METRIC, "max_trials": 9, "divisor": 4, "max_concurrent_trials": 2,
    }},
    "single": COMMON | {"searcher": {
        "name": "single", **METRIC, "max_length": {"records": 9000}, "max_trials": 2, "mode": "standard",
        "max_rungs": 3, "stop_once": True, "time_metric": "t",
    }},
    "list of variables": COMMON | {
        "environment": {"environment_variables": ["A=b", "C=d=e"]}, "searcher": {"name": "single"},
        "resources": {"slots": 4, "shm_size": 2**30},
        "entrypoint": "python3 -m determined.launch.torch_distributed --max_restarts 2 -- python3 train.py",
    },
    "generic task": {key: value for key, value in COMMON.items() if key != "hyperparameters"},
}  # fmt: skip
DIFFERENT = {"entrypoint", "searcher", "hyperparameters", "resources", "environment"}
"""Keys that the files above have in different forms."""
VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, 2, 3, 7, -1, 1.5, 3.7, 600, 601, 2**31, 2**31 + 1, 10**16, "", "a", "b c", "3", "4g",
    "1.5 GiB", "256m", "1e-2", "false", "A=b", [], {}, [1], [2, 3], ["x"], ["A=b"], ["A=b", "A=c"], ["B"], {"a": 1},
    {"epochs": 4}, {"batches": 4}, {"batches": True}, {"cuda": ["Z=1"]}, {"cpu": ["Z=1"]}, [None], [[1]],
    {"type": "int"}, {"type": "const", "val": None}, {"type": "const", "val": [1]},
    {"type": "categorical", "vals": [1, None]},
    "standard", "conservative", "aggressive", "x" * 120, "model:Trial", "exec true", ["python3", 1], "{plain}",
)  # fmt: skip


def keys_of(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    if isinstance(value, dict):
        for key, each in value.items():
            yield (*path, key)
            yield from keys_of(each, (*path, key))


def with_value(file: dict[str, Any], path: tuple[str, ...], value: Any) -> dict[str, Any]:
    inner = with_value(file[path[0]], path[1:], value) if len(path) > 1 else value
    return {**file, path[0]: inner}


def outcome(file: dict[str, Any]) -> tuple[str, set[str]] | None:
    """Return the sweep as text with the listed keys, or None if the file is refused by a sentence."""
    try:
        found = read_keys(file)
    except InvalidRequest as error:
        assert error.fields and all(len(message) > 10 for message in error.fields.values())
        return None
    sweep = json.dumps([found.job, found.sweep, found.parameters, found.is_single_node], sort_keys=True)
    return sweep, {*found.ignored, *found.changed}


def is_listed(path: tuple[str, ...], listed: set[str]) -> bool:
    """Return True if a key, one of those that contain it, or part of its value is listed."""
    name = ".".join(path)
    return any(name == each or name.startswith(f"{each}.") or each.startswith(f"{name}.") for each in listed)


@pytest.mark.parametrize("name", FILES)
def test_every_key_is_used_or_listed_whatever_its_value(name: str) -> None:
    file = FILES[name]
    original = outcome(file)
    assert original is not None
    for path in keys_of(file):
        if name != "asha" and path[0] not in DIFFERENT:
            continue
        read: dict[str, Any] = {}
        for value in VALUES:
            changed = outcome(with_value(file, path, value))
            if changed is None or is_listed(path, changed[1]):
                continue
            # a key that is not listed is used: two values never give the same sweep, unless they are equal
            other = read.setdefault(changed[0], value)
            is_same = other == value or {json.dumps(other), json.dumps(value)} <= {"null", "[]", "{}", '""'}
            is_default = value is None or other is None  # null is the default, which may be any of them
            assert is_same or is_default, f"{'.'.join(path)}: {other!r} and {value!r} are the same"


@pytest.mark.parametrize("name", FILES)
def test_every_key_can_be_left_out_and_unknown_keys_are_listed(name: str) -> None:
    file = FILES[name]
    for path in keys_of(file):
        without = copy.deepcopy(file)
        inner: Any = without
        for key in path[:-1]:
            inner = inner[key]
        del inner[path[-1]]
        outcome(without)
    for section in ((), ("searcher",), ("resources",), ("environment",), ("reproducibility",)):
        if not section or section[0] in file:
            unknown = outcome(with_value(file, (*section, "new_key"), {"x": 1}))
            assert unknown is not None and is_listed((*section, "new_key"), unknown[1])
    for parameter in ("range", "decimal", "rate"):
        if "hyperparameters" in file:
            unknown = outcome(with_value(file, ("hyperparameters", parameter, "step"), 2))
            assert unknown is not None and f"hyperparameters.{parameter}.step" in unknown[1]


@pytest.mark.parametrize(
    ("entrypoint", "launcher", "command"),
    [
        ("python3 -m determined.launch.torch_distributed python3 train.py --lr 1", "torchrun",
         ["python3", "train.py", "--lr", "1"]),
        ("python -m determined.launch.torch_distributed\n", None, "no script"),
        ("A=1 exec python3.9 -m determined.launch.deepspeed python3 train.py $DATA", "deepspeed",
         ["/bin/sh", "-c", "A=1 exec python3 train.py $DATA"]),
        ("python3 -m determined.launch.horovod --cycle-time-ms 2 -- python3 train.py", "horovod",
         ["python3", "train.py"]),
        ("python3 -m determined.launch.tensorflow --port 3 python3 t.py", "tensorflow", ["python3", "t.py"]),
        ("python3 -m determined.launch.tensorflow -- python3 t.py", "tensorflow", ["python3", "t.py"]),
        (["python3", "-m", "determined.launch.deepspeed", "python3", "t.py", "a b"], "deepspeed",
         ["python3", "t.py", "a b"]),
        ("python3 -m determined.launch.torch_distributed --trial model_def:T", None, "Trial class"),
        (["python3", "-m", "determined.launch.torch_distributed", "--trial", "m:T"], None, "Trial class"),
        ("python3 -m determined.launch.autohorovod t.py", None, "launcher autohorovod"),
        ("pip install x && python3 -m determined.launch.torch_distributed python3 t.py", None, "determined.launch"),
        ("python3 -m determined.exec.harness --train", None, "determined.exec.harness"),
        ("python3 t.py --config '{plain}' {{x}}", "none", ["/bin/sh", "-c", "python3 t.py --config '{plain}' {{x}}"]),
    ],
)  # fmt: skip
def test_launchers_of_determined_are_ours_and_commands_run_unchanged(
    entrypoint: str | list[str], launcher: str | None, command: Any
) -> None:
    file = {"entrypoint": entrypoint, "hyperparameters": {"plain": 3}, "searcher": {"name": "single"}}
    if launcher is None:
        with pytest.raises(InvalidRequest, match=command):
            read_experiment(yaml.safe_dump(file))
        return
    found = read_experiment(yaml.safe_dump(file))
    assert found.job.get("launcher", "none") == launcher
    assert fill_command(found.job["command"], {"plain": 3}) == command


def test_options_of_a_launcher_are_used_or_listed() -> None:
    found = read_experiment(yaml.safe_dump(FILES["list of variables"]))
    assert (found.job["launcher"], found.job["launcher_options"]) == ("torchrun", {"max_restarts": 2})
    line = "python3 -m determined.launch.torch_distributed --rdzv_id=3 --nproc-per-node 4 -- python3 t.py | tee x"
    found = read_experiment(yaml.safe_dump({"entrypoint": line}))
    assert found.job["launcher_options"] == {"processes_per_task": 4}
    assert "entrypoint --rdzv_id" in found.ignored and "entrypoint" in found.changed


@pytest.mark.parametrize(
    ("slots", "largest", "single_node", "expected"),
    [(16, 8, False, (2, 8)), (12, 8, False, (2, 6)), (7, 4, False, (7, 1)), (8, 8, False, (1, 8)),
     (16, 8, True, (1, 16)), (16, 0, False, (1, 16)), (0, 8, False, (1, 0))],
)  # fmt: skip
def test_slots_that_no_node_has_are_spread(
    slots: int, largest: int, single_node: bool, expected: tuple[int, int]
) -> None:
    resources = {"slots_per_trial": slots, "is_single_node": single_node}
    found = read_experiment(yaml.safe_dump({"entrypoint": "t", "resources": resources}))
    found.spread(largest)
    assert (found.job.get("tasks", 1), found.job["gpus_per_task"]) == expected
    assert ("resources.slots_per_trial" in found.changed) == (expected[0] > 1)


def test_defaults_are_those_of_determined() -> None:
    found = read_experiment("entrypoint: t\nsearcher: {name: single, metric: x}")
    assert found.job["max_attempts"] == 6 and found.job["retry_on"] == ["node_failure", "command_failure"]
    task = read_experiment("entrypoint: [echo, ran]")
    assert (task.sweep["searcher"], task.sweep["max_trials"]) == ("random", 1)
    assert "max_attempts" not in task.job and task.changed == {"searcher": "There is none: one trial runs."}


def test_numbers_are_those_of_yaml_as_determined_reads_it() -> None:
    found = read_experiment(f"{SINGLE}{{a: {{type: double, minval: 1e-4, maxval: 1e2}}, b: 5e-3, c: '5e-3'}}")
    assert (found.parameters["a"]["low"], found.parameters["a"]["high"]) == (1e-4, 100.0)
    assert (found.parameters["b"], found.parameters["c"]) == ({"choices": [0.005]}, {"choices": ["5e-3"]})


def test_a_parameter_and_a_group_with_the_same_name_are_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"a\.b is given twice"):
        read_experiment(f"{SINGLE}{{a.b: 1, a: {{b: 2}}}}")


def experiment(keys: str) -> str:
    return f"name: a\nentrypoint: python3 a.py\nsearcher: {{name: single, metric: loss}}\n{keys}"


@pytest.mark.parametrize("slots", [999_999_999_999_989, 10**15, 2 * 7919, 1025])
def test_more_slots_than_a_job_may_have_are_left_to_its_check_at_once(slots: int) -> None:
    """A number without a divisor that fits is not searched to its end."""
    found = read_experiment(experiment(f"resources: {{slots_per_trial: {slots}}}"))
    found.spread(1)
    assert found.job["gpus_per_task"] == slots and "tasks" not in found.job and not found.changed


def test_values_that_stand_for_another_one_are_listed() -> None:
    keys = "environment: {environment_variables: {cpu: [A=1]}}"
    assert read_experiment(experiment(keys)).ignored == {
        "environment.environment_variables.cpu": "Trials use the variables for cuda."
    }
    text = (
        experiment("")
        .replace("single", "random")
        .replace("loss", "loss, max_trials: 2, max_concurrent_trials: 0")
    )
    assert "searcher.max_concurrent_trials" in read_experiment(text).changed
    with pytest.raises(InvalidRequest, match="max_length"):
        read_experiment(experiment("").replace("loss", "loss, max_length: {epochs: null}"))
