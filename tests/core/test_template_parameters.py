"""Parameters of templates: their declaration, their values, and the fields that they fill."""

from __future__ import annotations

import re

import pytest

from portal.domain.jobs.template_parameters import (
    changed_parameters,
    fill_fields,
    parameter_values,
    read_template_parameters,
    swept_parameters_error,
    template_errors,
)

LR = {"name": "lr", "type": "number", "default": 0.1, "minimum": 0.001, "maximum": 1}
GPUS = {"name": "gpus", "type": "integer", "default": 2, "minimum": 1, "maximum": 8}
MODEL = {"name": "model", "type": "choice", "default": "small", "choices": ["small", "large"]}
DATA = {"name": "data", "type": "text", "default": "/data"}
MIXED = {"name": "mixed", "type": "boolean", "default": False}
ALL = [LR, GPUS, MODEL, DATA, MIXED]
FIELDS = {
    "command": ["train", "--lr={lr}", "--model", "{model}", "{data}", "{{lr}}", "--mixed", "{mixed}"],
    "env": {"RATE": "{lr}"},
    "gpus_per_task": "{gpus}",
}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "list of at most"),
        ([{"type": "number", "default": 1}], "a name, a type and a default"),
        ([{**LR, "name": "Learning rate"}], "is not a name"),
        ([LR, LR], "lr is declared twice"),
        ([{"name": "x", "type": "number"}], "x needs a default"),
        ([{**LR, "type": "real"}], "the type is one of integer, number, text, choice, boolean"),
        ([{**LR, "unit": "s"}], "unknown key unit"),
        ([{**LR, "default": 2}], "the default '2' does not fit. Must be between 0.001 and 1"),
        ([{**LR, "minimum": "a"}], "bounds must be numbers"),
        ([{**GPUS, "default": 2.5}], "Must be a whole number"),
        ([{**MODEL, "choices": []}], "the type choice needs choices"),
        ([{**DATA, "choices": ["a"]}], "the type choice needs choices"),
        ([{**MODEL, "default": "huge"}], "Choose one of small, large"),
        ([{**MIXED, "default": 1}], "Must be true or false"),
        ([{**DATA, "minimum": 1}], "only numbers have bounds"),
        ([{**DATA, "default": "a\0"}], "cannot be stored"),
    ],
)
def test_a_declaration_that_is_wrong_is_refused(given, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        read_template_parameters(given)


def test_values_are_checked_and_completed() -> None:
    declared = read_template_parameters(ALL)
    assert parameter_values(declared, {"lr": 1, "gpus": 8}) == (
        {"lr": 1, "gpus": 8, "model": "small", "data": "/data", "mixed": False},
        {},
    )
    given = {"lr": float("nan"), "gpus": True, "model": "huge", "data": 5, "mixed": "yes", "momentum": 0.9}
    _, wrong = parameter_values(declared, given)
    assert wrong == {
        "lr": "Must be a number.",
        "gpus": "Must be a whole number.",
        "model": "Choose one of small, large.",
        "data": "Must be text.",
        "mixed": "Must be true or false.",
        "momentum": "The template has no such parameter; it has lr, gpus, model, data, mixed.",
    }


def test_values_fill_arguments_variables_and_whole_fields() -> None:
    values = {"lr": 0.5, "gpus": 4, "model": "large", "data": "a b; rm -rf $HOME", "mixed": True}
    assert fill_fields(FIELDS, values) == {
        "command": ["train", "--lr=0.5", "--model", "large", "a b; rm -rf $HOME", "{lr}", "--mixed", "true"],
        "env": {"RATE": "0.5"},
        "gpus_per_task": 4,
    }


def test_a_sweep_keeps_its_placeholders_and_the_program_is_never_filled() -> None:
    fields = {"command": ["train", "{lr}", "{model}", "{{x}}"], "program": "print(f'{model}')"}
    assert fill_fields(fields, {"model": "large"}, of_sweep=True) == {
        "command": ["train", "{lr}", "large", "{{x}}"],
        "program": "print(f'{model}')",
    }


def test_a_sweep_keeps_the_placeholders_of_roles_and_may_vary_them() -> None:
    fields = {"roles": [{"name": "a", "tasks": "{gpus}", "command": ["x", "{lr}", "{{y}}"]}]}
    filled = fill_fields(fields, {"gpus": 3}, of_sweep=True)
    assert filled == {"roles": [{"name": "a", "tasks": 3, "command": ["x", "{lr}", "{{y}}"]}]}
    declared = read_template_parameters([LR, GPUS])
    assert swept_parameters_error(declared, fields, [{"lr": 0.1}]) is None
    assert "fills a field of the job" in str(swept_parameters_error(declared, fields, [{"gpus": [1, 2]}]))


def test_a_role_has_filled_commands() -> None:
    fields = {"roles": [{"name": "a", "tasks": "{gpus}", "command": ["x", "{gpus}"]}]}
    assert fill_fields(fields, {"gpus": 3}) == {"roles": [{"name": "a", "tasks": 3, "command": ["x", "3"]}]}


def test_the_content_of_a_template_is_accepted() -> None:
    assert template_errors(FIELDS, ALL) == {}
    assert template_errors({"command": ["awk", "{print}"]}, []) == {}


@pytest.mark.parametrize(
    ("fields", "parameters", "message"),
    [
        ([], [], "Must be an object"),
        ({"gpu": 1}, [], "gpu is no field"),
        ({"resume_from": "abc"}, [], "resume_from is no field"),
        ({"command": ["a", "{lr}", "{x}"]}, [LR], "{x} is no parameter; write {{x}} for the text itself"),
        ({"command": ["a"]}, [LR], "lr is not used"),
        ({"command": ["sh", "-c", "train {lr}"]}, [LR], "A shell would interpret the value of {lr}"),
        ({"command": ["/bin/bash", "-ec", "train {lr}"]}, [LR], "A shell would interpret"),
        ({"roles": [{"name": "a", "command": ["sh", "-c", "{lr}"]}]}, [LR], "A shell would interpret"),
        ({"command": ["a"], "checkpoint_dir": "runs/{data}"}, [DATA], "can only fill it as a whole"),
        ({"command": ["a"], "launcher_options": {"x": "{gpus}"}}, [GPUS], "can only fill it as a whole"),
        ({"command": ["a"], "gpus_per_task": 100}, [], "gpus_per_task: Must be between 0 and 64"),
        ({"command": ["a"], "gpus_per_task": "{lr}"}, [LR], "gpus_per_task: Must be a whole number"),
        ({"command": "a"}, [], "command: Must be a list of strings"),
        ({"env": ["a"]}, [], "env: Must be an object"),
    ],
)
def test_content_that_is_wrong_is_refused(fields, parameters, message: str) -> None:
    (error,) = template_errors(fields, parameters).values()
    assert message in error


def test_values_may_be_arguments_of_a_script() -> None:
    assert template_errors({"command": ["sh", "-c", 'train "$1"', "sh", "{lr}"]}, [LR]) == {}


@pytest.mark.parametrize(
    ("space", "message"),
    [
        ({"momentum": [0.9]}, "The template has no parameter momentum; it has lr, gpus, model, data, mixed."),
        ({"gpus": [1, 2]}, "gpus fills a field of the job"),
        ({"lr": [0.1]}, "lr fills a field of the job"),
        ({"model": ["small", "huge"]}, "model = huge: Choose one of"),
    ],
)
def test_a_sweep_over_an_unknown_parameter_is_refused(space, message: str) -> None:
    error = swept_parameters_error(read_template_parameters(ALL), FIELDS, [space])
    assert error is not None and message in error


def test_a_sweep_stays_within_the_bounds_of_the_parameters() -> None:
    fields = {"command": ["train", "{lr}", "{gpus}"]}
    declared = read_template_parameters([LR, GPUS])
    assert (
        swept_parameters_error(declared, fields, [{"lr": {"low": 0.01, "high": 0.5}, "gpus": [1, 2]}]) is None
    )
    error = swept_parameters_error(declared, fields, [{"lr": {"low": 0.01, "high": 5.0}}])
    assert error == "lr = 5: Must be between 0.001 and 1."
    error = swept_parameters_error(declared, fields, [{"gpus": 1}, {"gpus": 9}])
    assert error == "gpus = 9: Must be between 1 and 8."


def test_changed_parameters_are_named() -> None:
    assert changed_parameters([LR, GPUS], [{**LR, "maximum": 2}, MODEL]) == ["gpus", "lr", "model"]
    assert changed_parameters([LR], [dict(LR)]) == []
