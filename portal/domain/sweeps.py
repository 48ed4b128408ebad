"""A sweep, declared once for form, REST and files: searcher, budget, and the parameters of its trials. Pure."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from portal.domain.job_spec import JobField, declare, job_fields

MAX_TRIALS = 10_000
MAX_PARALLEL = 1000
MAX_PARAMETERS = 50
MAX_CHOICES = 1000
MAX_REPORTS = 1000
"""Reports stored of one trial; beyond, every second one is deleted."""

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}")
PLACEHOLDER = re.compile(rf"(?<![${{])\{{({_NAME.pattern})\}}|\{{\{{({_NAME.pattern})\}}\}}")
_RANGE = re.compile(r"(\S+?)\.\.(\S+)((?:\s+log)?)((?:\s+step\s+\S+)?)")
Value = bool | int | float | str


class Searcher(StrEnum):
    """How the parameters of the next trial are chosen. A sweep with ``list`` or ``grid`` is an array."""

    LIST = "list"
    GRID = "grid"
    RANDOM = "random"
    TPE = "tpe"
    ASHA = "asha"
    HYPERBAND = "hyperband"
    POPULATION = "population"


ARRAY_SEARCHERS = frozenset({Searcher.LIST, Searcher.GRID})
PRUNING_SEARCHERS = frozenset({Searcher.ASHA, Searcher.HYPERBAND})
METRIC_SEARCHERS = PRUNING_SEARCHERS | {Searcher.TPE, Searcher.POPULATION}
SEARCHER_LABELS = {
    Searcher.LIST: "List: each line is a trial",
    Searcher.GRID: "Grid: all combinations",
    Searcher.RANDOM: "Random",
    Searcher.TPE: "TPE: samples where the metric is good",
    Searcher.ASHA: "ASHA: random, stops bad trials early",
    Searcher.HYPERBAND: "Hyperband: ASHA with several first rungs",
    Searcher.POPULATION: "Population: bad trials continue from good ones",
}


class Direction(StrEnum):
    MINIMIZE = "minimize"
    MAXIMIZE = "maximize"


class SweepState(StrEnum):
    RUNNING = "RUNNING"
    PAUSED = "PAUSED"
    COMPLETED = "COMPLETED"
    STOPPED = "STOPPED"


class TrialState(StrEnum):
    """State of a trial. A WAITING trial has no job yet; a PAUSED one has a suspended job."""

    WAITING = "WAITING"
    RUNNING = "RUNNING"
    PAUSED = "PAUSED"
    COMPLETED = "COMPLETED"
    PRUNED = "PRUNED"
    FAILED = "FAILED"
    STOPPED = "STOPPED"


ACTIVE_TRIAL_STATES = frozenset({TrialState.WAITING, TrialState.RUNNING})
LIVE_TRIAL_STATES = ACTIVE_TRIAL_STATES | {TrialState.PAUSED}
REPEATABLE_TRIAL_STATES = frozenset({TrialState.FAILED, TrialState.STOPPED, TrialState.PRUNED})


@dataclass(frozen=True, kw_only=True)
class SweepSpec:
    """What a sweep searches and how much it may run, without its job."""

    searcher: str = declare(
        Searcher.RANDOM.value,
        JobField(
            choices=tuple(Searcher), label="Searcher", section="sweep",
            help="list and grid run each combination once, as an array of jobs; the others search.",
        ),
    )  # fmt: skip
    metric: str = declare(
        "",
        JobField(
            max_length=100,
            label="Metric",
            section="sweep",
            help="Name of the value that trials report, such as loss.",
        ),
    )
    direction: str = declare(
        Direction.MINIMIZE.value,
        JobField(choices=tuple(Direction), label="Direction", section="sweep", help="What is better."),
    )
    max_trials: int | None = declare(
        None,
        JobField(
            minimum=1, maximum=MAX_TRIALS, label="Trials", section="sweep", if_null="all",
            help="Budget of trials; lists and grids need none.",
        ),
    )  # fmt: skip
    max_parallel: int = declare(
        4,
        JobField(
            minimum=1,
            maximum=MAX_PARALLEL,
            label="In parallel",
            section="sweep",
            help="Trials that may run at once.",
        ),
    )
    max_steps: int | None = declare(
        None,
        JobField(
            minimum=1, maximum=1_000_000_000, label="Steps of a trial", section="sweep", if_null="unknown",
            help="Length of a trial in reported steps, such as epochs; of one generation for population.",
        ),
    )  # fmt: skip
    min_steps: int = declare(
        1,
        JobField(
            minimum=1, maximum=1_000_000_000, label="First rung", section="sweep",
            help="Steps after which ASHA and Hyperband first compare trials.",
        ),
    )  # fmt: skip
    reduction_factor: int = declare(
        4,
        JobField(
            minimum=2, maximum=100, label="Reduction factor", section="sweep",
            help="ASHA and Hyperband let the best of this many trials pass a rung; rungs are this factor apart.",
        ),
    )  # fmt: skip
    pause_pruned: bool = declare(
        False,
        JobField(
            label="Pause instead of stopping", section="sweep",
            help="ASHA suspends a trial that does not pass a rung, and resumes it if it passes later.",
        ),
    )  # fmt: skip
    population: int = declare(
        8,
        JobField(
            minimum=2, maximum=1000, label="Population", section="sweep", help="Members of a population."
        ),
    )
    seed: int | None = declare(
        None,
        JobField(
            minimum=0, maximum=2**31 - 1, label="Seed", section="sweep", if_null="chosen",
            help="The same seed and results give the same parameters.",
        ),
    )  # fmt: skip
    reads_environment: bool = declare(
        False,
        JobField(
            label="The program reads its parameters itself", section="sweep",
            help="From FAIRWAY_PARAM_NAME or FAIRWAY_PARAMETERS; otherwise the command must name each parameter.",
        ),
    )  # fmt: skip


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


@dataclass(frozen=True)
class TrialRecord:
    """A trial as the search sees it. ``reports``: those (step, value) that are not judged yet, oldest first.

    A value of None is not a number. ``search_state`` is what earlier decisions remembered.
    """

    number: int
    parameters: Mapping[str, Value]
    state: TrialState
    step: float | None = None
    value: float | None = None
    search_state: Mapping[str, Any] = field(default_factory=dict)
    reports: Sequence[tuple[float, float | None]] = ()

    @property
    def is_active(self) -> bool:
        return self.state in ACTIVE_TRIAL_STATES


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


# -- notation of the launch form ---------------------------------------------------------------------


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


def parse_point_lines(text: str) -> list[dict[str, Value]]:
    """Return the points of lines ``lr=0.1 layers=2``. Raise ValueError."""
    points = []
    for line in filter(None, map(str.strip, text.splitlines())):
        pairs = [word.partition("=") for word in line.split()]
        if not all(name and sign for name, sign, _ in pairs):
            raise ValueError(f"“{line[:40]}” is not NAME=VALUE NAME=VALUE.")
        points.append({name: _parse_value(value) for name, _, value in pairs})
    return points


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


# -- how parameters reach a trial --------------------------------------------------------------------


def format_value(value: Value) -> str:
    """Return a value as a program reads it: ``true``, ``3``, ``0.1``, text."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"{value:.12g}" if isinstance(value, float) else str(value)


def variable_name(parameter: str) -> str:
    return "FAIRWAY_PARAM_" + re.sub(r"[.-]", "_", parameter).upper()


def trial_variables(number: int, parameters: Mapping[str, Value], max_steps: int | None) -> dict[str, str]:
    found = {variable_name(name): format_value(value) for name, value in parameters.items()}
    found |= {"FAIRWAY_TRIAL": str(number), "FAIRWAY_PARAMETERS": json.dumps(parameters)}
    return found | ({"FAIRWAY_TRIAL_MAX_STEPS": str(max_steps)} if max_steps else {})


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


def sweep_errors(spec: SweepSpec, parameters: Any, points: Any) -> dict[str, str]:
    """Return what is wrong with a sweep, by field; its job is checked elsewhere."""
    wrong = {
        name: error
        for name, rule in job_fields(SweepSpec).items()
        if (error := rule.error_of(getattr(spec, name)))
    }
    if wrong:
        return wrong
    searcher = Searcher(spec.searcher)
    try:
        if searcher is Searcher.LIST:
            if parameters:
                wrong["parameters"] = "A list has points instead of parameters."
            read_points(points)
        elif points:
            wrong["points"] = "Only the searcher list has points."
    except ValueError as problem:
        wrong["points"] = str(problem)
    try:
        if searcher is not Searcher.LIST:
            found = read_parameters(parameters)
            if not found and searcher is not Searcher.RANDOM:
                wrong["parameters"] = "Name at least one parameter."
            if searcher is Searcher.GRID:
                grid_points(found)
    except ValueError as problem:
        wrong["parameters"] = str(problem)
    if searcher not in ARRAY_SEARCHERS and spec.max_trials is None:
        wrong["max_trials"] = f"The searcher {searcher} needs a number of trials."
    if searcher in METRIC_SEARCHERS and not spec.metric:
        wrong["metric"] = f"The searcher {searcher} needs a metric that the trials report."
    if searcher in METRIC_SEARCHERS - {Searcher.TPE} and spec.max_steps is None:
        wrong["max_steps"] = f"The searcher {searcher} needs the number of steps of a trial."
    elif searcher in PRUNING_SEARCHERS and spec.max_steps is not None and spec.min_steps >= spec.max_steps:
        wrong["min_steps"] = "The first rung must come before the last step."
    if spec.pause_pruned and searcher is not Searcher.ASHA:
        wrong["pause_pruned"] = "Only ASHA can pause trials."
    if searcher is Searcher.POPULATION and (spec.max_trials or 0) < spec.population:
        wrong["population"] = "The population must not be larger than the number of trials."
    return wrong
