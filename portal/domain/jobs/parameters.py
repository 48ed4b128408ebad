"""Parameters of sweeps and templates: ranges and choices, their notation, and how they reach a program. Pure."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MAX_TRIALS = 10_000


MAX_PARAMETERS = 50


MAX_CHOICES = 1000


_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}")


PLACEHOLDER = re.compile(rf"(?<![${{])\{{({_NAME.pattern})\}}|\{{\{{({_NAME.pattern})\}}\}}")


_RANGE = re.compile(r"(\S+?)\.\.(\S+)((?:\s+log)?)((?:\s+step\s+\S+)?)")


Value = bool | int | float | str


@dataclass(frozen=True)
class Parameter:
    """A range of numbers, or ``choices``. ``step`` is None for a continuous range."""

    name: str
    choices: tuple[Value, ...] = ()
    low: float = 0.0
    high: float = 0.0
    log: bool = False
    step: float | None = None
    is_integer: bool = False

    @property
    def is_range(self) -> bool:
        return not self.choices

    def grid_values(self) -> tuple[Value, ...]:
        """Return all values. Raise ValueError if it is continuous or has too many."""
        if self.choices:
            return self.choices
        step = self.step or (1 if self.is_integer and not self.log else None)
        if step is None:
            raise ValueError(f"{self.name} needs a step or a list of values for a grid.")
        count = math.floor((self.high - self.low) / step + 1e-9) + 1
        if count > MAX_TRIALS:
            raise ValueError(f"{self.name} has {count} values; a grid has at most {MAX_TRIALS} trials.")
        return tuple(self.number(self.low + index * step) for index in range(count))

    def number(self, value: float) -> int | float:
        """Return the value of the parameter's type, within its range."""
        bounded = min(self.high, max(self.low, value))
        return round(bounded) if self.is_integer else float(f"{bounded:.12g}")


def read_parameters(given: Any) -> dict[str, Parameter]:
    """Return the parameters of JSON by name. Raise ValueError with a message for the user.

    Each is ``{low, high, log, step, integer}`` or ``{choices}``, or a list of choices, or one constant.
    """
    if not isinstance(given, Mapping):
        raise ValueError("Must be an object of parameters by name.")
    if len(given) > MAX_PARAMETERS:
        raise ValueError(f"A sweep has at most {MAX_PARAMETERS} parameters.")
    variables: dict[str, str] = {}
    for name in given:
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise ValueError(f"{str(name)[:64]!r} is not a name of letters, digits and _.- (at most 64).")
        other = variables.setdefault(variable_name(name), name)
        if other != name:
            raise ValueError(f"{other} and {name} have the same variable {variable_name(name)}.")
    return {name: _read_parameter(name, each) for name, each in given.items()}


def _read_parameter(name: str, given: Any) -> Parameter:
    if not isinstance(given, Mapping):
        given = {"choices": list(given) if isinstance(given, list | tuple) else [given]}
    if unknown := given.keys() - {"low", "high", "log", "step", "integer", "choices"}:
        raise ValueError(f"{name} has the unknown key {sorted(map(str, unknown))[0][:64]}.")
    if "choices" in given:
        choices = given["choices"]
        if len(given) > 1 or not isinstance(choices, list) or not 1 <= len(choices) <= MAX_CHOICES:
            raise ValueError(f"{name} needs a list of 1 to {MAX_CHOICES} choices and nothing else.")
        return Parameter(name, choices=tuple(_read_value(name, each) for each in choices))
    low, high, step = given.get("low"), given.get("high"), given.get("step")
    for value in (low, high, *([step] if step is not None else [])):
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= 1e15:
            raise ValueError(f"{name} needs numbers for low, high and step.")
    log, integer = given.get("log", False), given.get("integer")
    if not isinstance(log, bool) or not isinstance(integer, bool | None):
        raise ValueError(f"{name} needs true or false for log and integer.")
    if integer is None:
        integer = all(isinstance(each, int) for each in (low, high, *([step] if step is not None else [])))
    if not low < high or (step is not None and not 0 < step <= high - low):
        raise ValueError(f"{name} needs low below high, and a step between them.")
    if integer and any(float(each) != int(each) for each in (low, high, step or 1)):
        raise ValueError(f"{name} is an integer and needs whole numbers.")
    if log and (low <= 0 or step is not None):
        raise ValueError(f"{name} is logarithmic: low must be above 0, without a step.")
    return Parameter(name, low=low, high=high, log=log, step=step, is_integer=integer)


def _read_value(name: str, value: Any) -> Value:
    if isinstance(value, str) and len(value) <= 1000 and "\0" not in value:
        return value
    if isinstance(value, bool | int | float) and abs(value) <= 1e15:
        return value
    raise ValueError(f"The values of {name} must be texts, numbers or flags.")


def parse_parameter_lines(text: str) -> dict[str, Any]:
    """Return parameters of lines ``lr = 1e-5..1e-3 log``, ``layers = 2..8 step 2``, ``opt = sgd, adam`` as JSON.

    Raise ValueError.
    """
    found: dict[str, Any] = {}
    for line in filter(None, map(str.strip, text.splitlines())):
        name, sign, value = (part.strip() for part in line.partition("="))
        if not sign or not value:
            raise ValueError(f"“{line[:40]}” is not NAME = LOW..HIGH or NAME = VALUE, VALUE.")
        if name in found:
            raise ValueError(f"{name} is given twice.")
        if match := _RANGE.fullmatch(value):
            low, high, log, step = match.groups()
            found[name] = {"low": _parse_value(low), "high": _parse_value(high)}
            found[name] |= {"log": True} if log else {}
            found[name] |= {"step": _parse_value(step.split()[1])} if step else {}
        else:
            found[name] = {"choices": [_parse_value(each.strip()) for each in value.split(",")]}
    return found


def _parse_value(text: str) -> Value:
    for parse in (int, float):
        try:
            return parse(text)
        except ValueError:
            continue
    return {"true": True, "false": False}.get(text.lower(), text)


def describe_parameter(parameter: Parameter) -> str:
    """Return the parameter as the launch form reads it, without its name."""
    if parameter.choices:
        return ", ".join(map(format_value, parameter.choices))
    suffix = " log" if parameter.log else f" step {parameter.step:g}" if parameter.step else ""
    return f"{format_value(parameter.low)}..{format_value(parameter.high)}{suffix}"


def format_value(value: Value) -> str:
    """Return a value as a program reads it: ``true``, ``3``, ``0.1``, text."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"{value:.12g}" if isinstance(value, float) else str(value)


def variable_name(parameter: str) -> str:
    return "FAIRWAY_PARAM_" + re.sub(r"[.-]", "_", parameter).upper()


def fill_command(
    command: Sequence[str], parameters: Mapping[str, Value], *, unescape: bool = True
) -> list[str]:
    """Return the command with ``{name}`` replaced; ``{{name}}`` stands for ``{name}`` itself."""
    return [fill_text(word, parameters, unescape=unescape) for word in command]


def fill_text(text: str, parameters: Mapping[str, Value], *, unescape: bool = True) -> str:
    """Return the text with placeholders replaced; those of other names stay."""

    def fill(match: re.Match[str]) -> str:
        if match[2]:
            return f"{{{match[2]}}}" if unescape else match[0]
        return format_value(parameters[match[1]]) if match[1] in parameters else match[0]

    return PLACEHOLDER.sub(fill, text)


def read_points(given: Any) -> list[dict[str, Value]]:
    """Return the trials of a list sweep. Raise ValueError with a message for the user."""
    if not isinstance(given, list) or not 1 <= len(given) <= MAX_TRIALS:
        raise ValueError(f"A list needs 1 to {MAX_TRIALS} points.")
    for number, point in enumerate(given):
        if not isinstance(point, Mapping) or point.keys() != given[0].keys():
            raise ValueError(f"Point {number} does not have the parameters of the first one.")
        read_parameters(point)
    return [{name: _read_value(name, value) for name, value in point.items()} for point in given]


def grid_points(parameters: Mapping[str, Parameter]) -> list[dict[str, Value]]:
    """Return all combinations, the last parameter changing fastest. Raise ValueError."""
    values = [parameter.grid_values() for parameter in parameters.values()]
    count = math.prod(map(len, values))
    if count > MAX_TRIALS:
        raise ValueError(f"The grid has {count} combinations; a sweep has at most {MAX_TRIALS} trials.")
    return [dict(zip(parameters, each, strict=True)) for each in itertools.product(*values)]


def parse_point_lines(text: str) -> list[dict[str, Value]]:
    """Return the points of lines ``lr=0.1 layers=2``. Raise ValueError."""
    points = []
    for line in filter(None, map(str.strip, text.splitlines())):
        pairs = [word.partition("=") for word in line.split()]
        if not all(name and sign for name, sign, _ in pairs):
            raise ValueError(f"“{line[:40]}” is not NAME=VALUE NAME=VALUE.")
        points.append({name: _parse_value(value) for name, _, value in pairs})
    return points


def trial_variables(number: int, parameters: Mapping[str, Value], max_steps: int | None) -> dict[str, str]:
    found = {variable_name(name): format_value(value) for name, value in parameters.items()}
    found |= {"FAIRWAY_TRIAL": str(number), "FAIRWAY_PARAMETERS": json.dumps(parameters)}
    return found | ({"FAIRWAY_TRIAL_MAX_STEPS": str(max_steps)} if max_steps else {})


def parameter_use_error(
    command: Sequence[str], environment: Iterable[str], names: Iterable[str], *, reads_environment: bool
) -> str | None:
    """Return what is wrong with the use of parameters by a command and its variables (values), or None."""
    known = list(names)
    placeholders = {match[1] for word in command for match in PLACEHOLDER.finditer(word) if match[1]}
    if missing := sorted(placeholders - set(known)):
        return (
            f"The command uses {{{missing[0]}}}, which is no parameter of the sweep; "
            f"write {{{{{missing[0]}}}}} for the text itself."
        )
    text = "\n".join([*command, *environment])
    if reads_environment or "FAIRWAY_PARAMETERS" in text:
        return None
    for name in known:
        if name not in placeholders and variable_name(name) not in text:
            return (
                f"The command does not use the parameter {name}: write {{{name}}} where it belongs, or declare "
                f"that the program reads {variable_name(name)} itself."
            )
    return None
