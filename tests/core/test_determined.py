"""Experiment files of Determined AI: what becomes a sweep, what has no counterpart, and what is refused."""

from __future__ import annotations

import pytest

from portal.domain.sweeps import SweepSpec, parameter_use_error, read_parameters, sweep_errors
from portal.errors import InvalidRequest
from portal.services.sweeps.determined import read_experiment

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
        "searcher.mode": "It has no counterpart and is ignored.",
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
        ("a: !!python/object/apply:os.system ['true']", "is no text, number"),
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
