"""What a sweep may search, the notation of the launch form, and how parameters reach a trial."""

from __future__ import annotations

from typing import Any

import pytest

from portal.domain.jobs.parameters import (
    describe_parameter,
    fill_command,
    grid_points,
    parameter_use_error,
    parse_parameter_lines,
    parse_point_lines,
    read_parameters,
    read_points,
    trial_variables,
)
from portal.domain.sweeps.sweeps import SweepSpec, sweep_errors


@pytest.mark.parametrize(
    ("line", "given", "described"),
    [
        ("lr = 1e-5..1e-3 log", {"low": 1e-5, "high": 1e-3, "log": True}, "1e-05..0.001 log"),
        ("n=1..8", {"low": 1, "high": 8}, "1..8"),
        ("n = -4..4 step 2", {"low": -4, "high": 4, "step": 2}, "-4..4 step 2"),
        ("opt = sgd, adam", {"choices": ["sgd", "adam"]}, "sgd, adam"),
        ("size = 16, 32.5, true", {"choices": [16, 32.5, True]}, "16, 32.5, true"),
    ],
)
def test_a_line_of_the_form_is_a_parameter_and_back(line: str, given: Any, described: str) -> None:
    ((name, value),) = parse_parameter_lines(line).items()
    assert value == given
    parameter = read_parameters({name: value})[name]
    assert describe_parameter(parameter) == described
    assert read_parameters(parse_parameter_lines(f"{name} = {described}"))[name] == parameter


@pytest.mark.parametrize("text", ["lr", "lr =", "lr = 1\nlr = 2"])
def test_other_lines_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="lr"):
        parse_parameter_lines(text)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"lr": {"low": 1, "high": 1}}, "low below high"),
        ({"lr": {"low": 0, "high": 1, "log": True}}, "above 0"),
        ({"lr": {"low": 1, "high": float("nan")}}, "numbers"),
        ({"lr": {"low": 1, "high": 1e300}}, "numbers"),
        ({"lr": {"low": 1.5, "high": 3, "integer": True}}, "whole numbers"),
        ({"lr": {"low": 1, "high": 3, "step": 5}}, "step between"),
        ({"lr": {"choices": []}}, "1 to 1000 choices"),
        ({"lr": {"choices": [None]}}, "texts, numbers or flags"),
        ({"lr": {"min": 1}}, "unknown key min"),
        ({"1r": [1]}, "is not a name"),
        ({"a.b": [1], "a-b": [1]}, "same variable FAIRWAY_PARAM_A_B"),
        ({f"p{n}": [1] for n in range(51)}, "at most 50"),
        ([], "object of parameters"),
    ],
)
def test_an_impossible_parameter_is_refused_with_its_name(given: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_parameters(given)


def test_a_grid_has_all_combinations_and_a_bound() -> None:
    parameters = read_parameters({"a": {"low": 0.1, "high": 0.3, "step": 0.1}, "b": {"low": 1, "high": 2}})
    assert [tuple(each.values()) for each in grid_points(parameters)] == [
        (0.1, 1), (0.1, 2), (0.2, 1), (0.2, 2), (0.3, 1), (0.3, 2),
    ]  # fmt: skip
    with pytest.raises(ValueError, match="1000000 combinations"):
        grid_points(read_parameters({"a": {"low": 1, "high": 1000}, "b": {"low": 1, "high": 1000}}))
    with pytest.raises(ValueError, match="a needs a step"):
        grid_points(read_parameters({"a": {"low": 0.0, "high": 1.0}}))


def test_points_have_the_same_parameters() -> None:
    assert parse_point_lines("lr=0.1 layers=2\n\nlr=0.2 layers=3") == [
        {"lr": 0.1, "layers": 2}, {"lr": 0.2, "layers": 3},
    ]  # fmt: skip
    with pytest.raises(ValueError, match="Point 1 does not have"):
        read_points(parse_point_lines("lr=0.1\nwd=0.1"))
    with pytest.raises(ValueError, match="is not NAME=VALUE"):
        parse_point_lines("0.1 0.2")


def test_parameters_reach_a_trial_in_command_and_variables() -> None:
    values = {"lr": 1e-4, "opt.name": "adam", "nesterov": True}
    command = ["sh", "-c", "train --lr {lr} --{opt.name} {{lr}} ${HOME} ${lr} {} {nesterov}"]
    assert fill_command(command, values)[2] == "train --lr 0.0001 --adam {lr} ${HOME} ${lr} {} true"
    assert trial_variables(7, values, 27) == {
        "FAIRWAY_PARAM_LR": "0.0001",
        "FAIRWAY_PARAM_OPT_NAME": "adam",
        "FAIRWAY_PARAM_NESTEROV": "true",
        "FAIRWAY_PARAMETERS": '{"lr": 0.0001, "opt.name": "adam", "nesterov": true}',
        "FAIRWAY_TRIAL": "7",
        "FAIRWAY_TRIAL_MAX_STEPS": "27",
    }


@pytest.mark.parametrize(
    ("command", "names", "reads", "message"),
    [
        (["train", "{lr}"], ["lr"], False, None),
        (["train", "{lr}"], ["lr", "wd"], False, "does not use the parameter wd"),
        (["train", "{lr} $FAIRWAY_PARAM_WD"], ["lr", "wd"], False, None),
        (["train", "--json $FAIRWAY_PARAMETERS"], ["lr", "wd"], False, None),
        (["train"], ["lr"], False, "does not use the parameter lr"),
        (["train"], ["lr"], True, None),
        (["train", "{lr} {momentum}"], ["lr"], True, "uses {momentum}, which is no parameter"),
        (["awk", "{{print}}"], [], False, None),
    ],
)
def test_unused_parameters_and_unknown_placeholders_are_refused(
    command: list[str], names: list[str], reads: bool, message: str | None
) -> None:
    found = parameter_use_error(command, [], names, reads_environment=reads)
    assert found is None if message is None else message in (found or "")


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        ({"searcher": "asha", "metric": "loss", "max_trials": 9}, "max_steps"),
        (
            {"searcher": "asha", "metric": "loss", "max_trials": 9, "max_steps": 4, "min_steps": 4},
            "min_steps",
        ),
        ({"searcher": "tpe", "max_trials": 9}, "metric"),
        ({"searcher": "random"}, "max_trials"),
        ({"searcher": "random", "max_trials": 9, "pause_pruned": True}, "pause_pruned"),
        ({"searcher": "population", "metric": "a", "max_steps": 3, "max_trials": 4}, "population"),
        ({"searcher": "list"}, "points"),
        ({"searcher": "guess"}, "searcher"),
        ({"searcher": "random", "max_trials": 9, "max_parallel": 0}, "max_parallel"),
    ],
)
def test_a_sweep_that_cannot_run_is_refused_at_its_field(spec: dict[str, Any], field: str) -> None:
    space = {} if spec["searcher"] == "list" else {"lr": [1, 2]}
    assert list(sweep_errors(SweepSpec(**spec), space, [])) == [field]
