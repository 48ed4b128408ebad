"""Composable validators of JSON values.

A validator takes a value and its JSON path, and raises ``InvalidValueError`` with the path.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

Validator = Callable[[Any, str], None]

MAX_COUNT = 10_000


class InvalidValueError(ValueError):
    """An invalid value; ``path`` is its JSON path."""

    def __init__(self, path: str, message: str) -> None:
        super().__init__(f"{path}: {message}")
        self.path = path
        self.message = message


def number(value: Any, path: str) -> None:
    """Accept a finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise InvalidValueError(path, f"{_quote(value)} is not a number")


def integer(value: Any, path: str) -> None:
    """Accept a whole number, also as 2.0."""
    number(value, path)
    if value != int(value):
        raise InvalidValueError(path, f"{value} is not an integer")


def count(value: Any, path: str) -> None:
    """Accept a whole number from 0."""
    integer(value, path)
    if value < 0:
        raise InvalidValueError(path, f"{value} is below 0")


def small_count(value: Any, path: str) -> None:
    """Accept a whole number from 0 to ``MAX_COUNT``: numbers of objects to create."""
    count(value, path)
    if value > MAX_COUNT:
        raise InvalidValueError(path, f"{value} is above {MAX_COUNT}")


def text(value: Any, path: str) -> None:
    """Accept a string."""
    if not isinstance(value, str):
        raise InvalidValueError(path, f"{_quote(value)} is not a string")


def boolean(value: Any, path: str) -> None:
    """Accept a Boolean."""
    if not isinstance(value, bool):
        raise InvalidValueError(path, f"{_quote(value)} is neither true nor false")


def anything(value: Any, path: str) -> None:
    """Accept any value."""


def one_of(*options: str) -> Validator:
    """Accept one of the strings ``options``."""

    def check(value: Any, path: str) -> None:
        if not isinstance(value, str) or value not in options:
            raise InvalidValueError(path, f"{_quote(value)} is not one of {', '.join(options)}")

    return check


def or_null(validator: Validator) -> Validator:
    """Accept null, or what ``validator`` accepts."""

    def check(value: Any, path: str) -> None:
        if value is not None:
            validator(value, path)

    return check


def list_of(validator: Validator) -> Validator:
    """Accept a list whose items ``validator`` accepts."""

    def check(value: Any, path: str) -> None:
        if not isinstance(value, list):
            raise InvalidValueError(path, f"{_quote(value)} is not a list")
        for i, each in enumerate(value):
            validator(each, f"{path}[{i}]")

    return check


def map_of(validator: Validator) -> Validator:
    """Accept an object with any keys whose values ``validator`` accepts."""

    def check(value: Any, path: str) -> None:
        if not isinstance(value, dict):
            raise InvalidValueError(path, f"{_quote(value)} is not an object")
        for key, each in value.items():
            validator(each, f"{path}.{key}")

    return check


def record(
    required: Mapping[str, Validator], optional: Mapping[str, Validator] | None = None, /, **also: Validator
) -> Validator:
    """Accept an object with exactly these fields: ``required``, and optionally ``optional`` and ``also``."""
    known = {**required, **(optional or {}), **also}

    def check(value: Any, path: str) -> None:
        if not isinstance(value, dict):
            raise InvalidValueError(path, f"{_quote(value)} is not an object")
        for key, each in value.items():
            if key not in known:
                raise InvalidValueError(f"{path}.{key}", "this field is unknown")
            known[key](each, f"{path}.{key}")
        for key in required:
            if key not in value:
                raise InvalidValueError(path, f"the field {key} is missing")

    return check


def by_kind(choose: Callable[[Mapping[str, Any]], Validator | None]) -> Validator:
    """Accept an object by the validator that ``choose`` returns for it; None rejects it."""

    def check(value: Any, path: str) -> None:
        if not isinstance(value, dict):
            raise InvalidValueError(path, f"{_quote(value)} is not an object")
        shape = choose(value)
        if shape is None:
            raise InvalidValueError(path, f"no record type has the fields {', '.join(value) or '(none)'}")
        shape(value, path)

    return check


def _quote(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 60 else f"{shown[:60]}…"
