"""Templates: scopes, categories, and parameters that fill the fields of a job. Pure.

A placeholder is ``{name}``. In a command and in variables it is replaced as text, within one argument or value.
Any other field that is exactly one placeholder gets the value with its type.
"""

from __future__ import annotations

import datetime as dt
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from typing import Any

from portal.domain.jobs.job_spec import JobField, job_fields, time_error
from portal.domain.jobs.parameters import (
    MAX_PARAMETERS,
    PLACEHOLDER,
    Value,
    fill_text,
    format_value,
    read_parameters,
)

MAX_TEXT_LENGTH = 1000
MAX_NUMBER = 1e15
_NAME = re.compile(r"[a-z]([a-z0-9_]{0,38}[a-z0-9])?")
_SHELLS = frozenset({"sh", "bash", "dash", "zsh"})
_TEXT_FIELDS = frozenset({"command", "env"})
FILLED_AS_TEXT = _TEXT_FIELDS | {"roles"}
"""Fields in which placeholders may be part of a text."""
NOT_IN_TEMPLATES = frozenset({"kind", "template_version", "parameters", "resume_from", "held", "start_after"})


class ParameterType(StrEnum):
    INTEGER = "integer"
    NUMBER = "number"
    TEXT = "text"
    CHOICE = "choice"
    BOOLEAN = "boolean"


class TemplateScope(StrEnum):
    """Who sees a template and may use it."""

    SELF = "self"
    PROJECT = "project"
    EVERYONE = "everyone"


class TemplateCategory(StrEnum):
    VISION = "vision"
    LANGUAGE = "language"
    SEARCH = "search"
    ROBOTICS = "robotics"
    TABULAR = "tabular"
    DEPLOY = "deploy"
    OTHER = "other"


VALUE_TYPES: Mapping[ParameterType, type] = {
    ParameterType.INTEGER: int,
    ParameterType.NUMBER: float,
    ParameterType.TEXT: str,
    ParameterType.CHOICE: str,
    ParameterType.BOOLEAN: bool,
}


@dataclass(frozen=True, kw_only=True)
class TemplateParameter:
    """A parameter as it is stored; the default has its type, and bounds are inclusive."""

    name: str
    type: str
    default: Value
    label: str = ""
    help: str = ""
    minimum: float | None = None
    maximum: float | None = None
    choices: Sequence[str] = ()

    @property
    def rule(self) -> JobField:
        """Return the parameter as a field of a request, from which forms and REST derive theirs."""
        value_type = VALUE_TYPES[ParameterType(self.type)]
        bounds: tuple[float | None, float | None] = (None, None)
        if value_type in (int, float):
            low = -MAX_NUMBER if self.minimum is None else self.minimum
            high = MAX_NUMBER if self.maximum is None else self.maximum
            bounds = (int(low), int(high)) if value_type is int else (low, high)
        return JobField(
            name=self.name, value_type=value_type, default=self.default, help=self.help, choices=tuple(self.choices),
            label=self.label or self.name.replace("_", " ").capitalize(), minimum=bounds[0], maximum=bounds[1],
            max_length=MAX_TEXT_LENGTH,
        )  # fmt: skip

    def error_of(self, value: object) -> str | None:
        """Return what is wrong with a value, or None."""
        rule = self.rule
        if rule.value_type in (int, float):
            accepted: type | tuple[type, ...] = int if rule.value_type is int else (int, float)
            if isinstance(value, bool) or not isinstance(value, accepted) or not _is_finite(value):
                return "Must be a whole number." if rule.value_type is int else "Must be a number."
        elif not isinstance(value, rule.value_type):
            return "Must be true or false." if rule.value_type is bool else "Must be text."
        elif isinstance(value, str) and re.search("[\x00\ud800-\udfff]", value):
            return "Contains a character that cannot be stored."
        return rule.error_of(value)


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def read_template_parameters(given: object) -> tuple[TemplateParameter, ...]:
    """Return the declared parameters of JSON. Raise ValueError with a message for the user."""
    if not isinstance(given, list | tuple) or len(given) > MAX_PARAMETERS:
        raise ValueError(f"Must be a list of at most {MAX_PARAMETERS} parameters.")
    found = tuple(_read_parameter(each) for each in given)
    if twice := [each.name for each in found if [other.name for other in found].count(each.name) > 1]:
        raise ValueError(f"{twice[0]} is declared twice.")
    return found


def _read_parameter(given: object) -> TemplateParameter:
    if not isinstance(given, Mapping) or not isinstance(name := given.get("name"), str):
        raise ValueError("Each parameter is an object with a name, a type and a default.")
    if not _NAME.fullmatch(name):
        raise ValueError(
            f"{name[:60]!r} is not a name: use up to 40 lower-case letters, digits and _; begin with a letter."
        )
    if missing := sorted({"type", "default"} - given.keys()):
        raise ValueError(f"{name} needs a {missing[0]}.")
    if unknown := sorted(map(str, given.keys() - TemplateParameter.__dataclass_fields__.keys())):
        raise ValueError(f"{name} has the unknown key {unknown[0][:60]}.")
    if given["type"] not in set(ParameterType):
        raise ValueError(f"{name}: the type is one of {', '.join(ParameterType)}.")
    texts = [given.get(key, "") for key in ("label", "help")]
    if not all(isinstance(text, str) and len(text) <= MAX_TEXT_LENGTH for text in texts):
        raise ValueError(f"{name}: label and help are texts of at most {MAX_TEXT_LENGTH} characters.")
    choices = given.get("choices", ())
    is_choice = given["type"] == ParameterType.CHOICE
    if not isinstance(choices, list | tuple) or not all(isinstance(each, str) for each in choices):
        raise ValueError(f"{name}: choices must be a list of texts.")
    if is_choice != bool(choices):
        raise ValueError(f"{name}: the type choice needs choices, and no other type has them.")
    bounds = [given[key] for key in ("minimum", "maximum") if given.get(key) is not None]
    if bounds and given["type"] not in (ParameterType.INTEGER, ParameterType.NUMBER):
        raise ValueError(f"{name}: only numbers have bounds.")
    if any(isinstance(each, bool) or not isinstance(each, int | float) for each in bounds):
        raise ValueError(f"{name}: bounds must be numbers.")
    found = TemplateParameter(**{**given, "choices": tuple(choices)})
    if error := found.error_of(found.default):
        raise ValueError(f"{name}: the default {format_value(found.default)!r} does not fit. {error}")
    return found


def parameter_values(
    parameters: Sequence[TemplateParameter], given: Mapping[str, object]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return all values, with defaults for those not given, and what is wrong by parameter."""
    values = {each.name: given.get(each.name, each.default) for each in parameters}
    wrong = {each.name: error for each in parameters if (error := each.error_of(values[each.name]))}
    names = ", ".join(values) or "none"
    wrong |= dict.fromkeys(given.keys() - values, f"The template has no such parameter; it has {names}.")
    return values, wrong


def fill_fields(
    fields: Mapping[str, Any], values: Mapping[str, Value], *, of_sweep: bool = False
) -> dict[str, Any]:
    """Return fields of a job with the placeholders of ``values`` replaced; others stay.

    ``of_sweep``: commands are filled again for each trial, so ``{{name}}`` in them stays as it is.
    """
    if not values and not of_sweep:
        return dict(fields)
    filled_again = {"command", "roles"} if of_sweep else set()
    return {
        name: value
        if name == "program"
        else _fill(value, values, as_text=name in _TEXT_FIELDS, unescape=name not in filled_again)
        for name, value in fields.items()
    }


def _fill(value: Any, values: Mapping[str, Value], *, as_text: bool, unescape: bool) -> Any:
    if isinstance(value, Mapping):
        return {
            key: _fill(item, values, as_text=as_text or key in _TEXT_FIELDS, unescape=unescape)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [_fill(item, values, as_text=as_text, unescape=unescape) for item in value]
    if not isinstance(value, str):
        return value
    if not as_text and (match := PLACEHOLDER.fullmatch(value)) and match[1] in values:
        return values[match[1]]
    return fill_text(value, values, unescape=unescape)


def placeholders(value: Any) -> set[str]:
    """Return the names of the placeholders anywhere in fields of a job."""
    if isinstance(value, Mapping):
        return set().union(*(placeholders(item) for name, item in value.items() if name != "program"))
    if isinstance(value, list | tuple):
        return set().union(*map(placeholders, value))
    return (
        {match[1] for match in PLACEHOLDER.finditer(value) if match[1]} if isinstance(value, str) else set()
    )


def field_parameters(fields: Mapping[str, Any]) -> dict[str, str]:
    """Return the parameter that fills each field of the job with its type."""
    found = {}
    for name, value in fields.items():
        if name not in _TEXT_FIELDS and isinstance(value, str) and (match := PLACEHOLDER.fullmatch(value)):
            found[name] = match[1]
    return found


def template_errors(fields: object, parameters: object) -> dict[str, str]:
    """Return what is wrong with the content of a template: ``fields`` or ``parameters``."""
    try:
        declared = read_template_parameters(parameters)
    except ValueError as error:
        return {"parameters": str(error)}
    if not isinstance(fields, Mapping):
        return {"fields": "Must be an object of job fields by name."}
    known = {name: rule for name, rule in job_fields().items() if name not in NOT_IN_TEMPLATES}
    if unknown := sorted(map(str, fields.keys() - known)):
        return {"fields": f"{unknown[0][:60]} is no field that a template can have."}
    used, names = placeholders(fields), [each.name for each in declared]
    if declared and (strange := sorted(used - set(names))):
        return {
            "fields": f"{{{strange[0]}}} is no parameter; write {{{{{strange[0]}}}}} for the text itself."
        }
    if unused := [name for name in names if name not in used]:
        return {"parameters": f"{unused[0]} is not used: write {{{unused[0]}}} in a field of the job."}
    for name, value in fields.items():
        whole = isinstance(value, str) and PLACEHOLDER.fullmatch(value)
        if (
            declared
            and name not in FILLED_AS_TEXT | {"program"}
            and placeholders({name: value})
            and not whole
        ):
            return {"fields": f"{name}: a parameter can only fill it as a whole."}
    if message := shell_error(fields):
        return {"fields": message}
    filled = fill_fields(fields, {each.name: each.default for each in declared})
    for name, value in filled.items():
        if message := field_error(known[name], value):
            return {"fields": f"{name}: {message}"}
    return {}


def shell_error(fields: Mapping[str, Any]) -> str | None:
    """Return an error if a placeholder is in the script of a shell, which would interpret the value."""
    roles = fields.get("roles") or ()
    commands = [fields.get("command"), *(each.get("command") for each in roles if isinstance(each, Mapping))]
    for command in commands:
        if not isinstance(command, list | tuple) or not all(isinstance(word, str) for word in command):
            continue
        for before, word in pairwise(command):
            is_script = re.fullmatch(r"-[a-z]*c", before) and command[0].rpartition("/")[2] in _SHELLS
            if is_script and (found := sorted(placeholders(word))):
                return (
                    f"A shell would interpret the value of {{{found[0]}}}. Pass it as an argument after the script, "
                    f"as in sh -c 'train \"$1\"' sh {{{found[0]}}}."
                )
    return None


_TYPE_NAMES: dict[type, str] = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}


def field_error(rule: JobField, value: object) -> str | None:
    """Return what is wrong with a field; nested ones are checked when the job is submitted."""
    if rule.is_scalar:
        if value is None and rule.nullable:
            return None
        if rule.value_type is dt.datetime:
            return time_error(value)
        accepted = (int, float) if rule.value_type is float else rule.value_type
        if not isinstance(value, accepted) or (isinstance(value, bool) and rule.value_type is not bool):
            return f"Must be {_TYPE_NAMES[rule.value_type]}."
        return rule.error_of(value)
    if rule.name == "command":
        right = isinstance(value, list | tuple) and all(isinstance(word, str) for word in value)
        return None if right else "Must be a list of strings."
    shape = (
        Mapping if isinstance(rule.default, Mapping) or rule.name == "topology_constraint" else (list, tuple)
    )
    if not isinstance(value, shape):
        return "Must be an object." if shape is Mapping else "Must be a list."
    return rule.error_of(value) if rule.is_list else None


def swept_parameters_error(
    parameters: Sequence[TemplateParameter], fields: Mapping[str, Any], spaces: Sequence[Mapping[str, Any]]
) -> str | None:
    """Return why a sweep cannot vary the parameters of ``spaces`` (its search space, or its points), or None."""
    known = {each.name: each for each in parameters}
    roles = [
        {key: value for key, value in role.items() if key != "command"} for role in fields.get("roles") or ()
    ]
    elsewhere = placeholders({**fields, "command": (), "roles": roles})
    for space in spaces:
        for name, given in read_parameters(space).items():
            if name not in known:
                return f"The template has no parameter {name}; it has {', '.join(known) or 'none'}."
            if name in elsewhere:
                return f"{name} fills a field of the job; a sweep can only vary parameters of commands."
            for value in given.choices or (given.number(given.low), given.number(given.high)):
                is_text = VALUE_TYPES[ParameterType(known[name].type)] is str
                if error := known[name].error_of(format_value(value) if is_text else value):
                    return f"{name} = {format_value(value)}: {error}"
    return None


def changed_parameters(before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the names of parameters that were added, removed or declared differently."""
    was, now = ({each["name"]: dict(each) for each in side} for side in (before, after))
    return sorted(name for name in was.keys() | now.keys() if was.get(name) != now.get(name))
