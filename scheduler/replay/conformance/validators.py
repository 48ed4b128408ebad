"""What a JSON value must look like, said once as a value and checked with the path of every mistake.

Each shape is a function of the value and its JSON path; it raises ``InvalidValueError`` naming the path.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

Validator = Callable[[Any, str], None]

MAX_COUNT = 10_000


class InvalidValueError(ValueError):
    """A value that does not look as it should; ``path`` is its JSON path."""

    def __init__(self, path: str, message: str) -> None:
        super().__init__(f"{path}: {message}")
        self.path = path
        self.message = message


def number(value: Any, path: str) -> None:
    """A finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise InvalidValueError(path, f"{_quote(value)} is no number")


def integer(value: Any, path: str) -> None:
    """A whole number, also written as 2.0."""
    number(value, path)
    if value != int(value):
        raise InvalidValueError(path, f"{value} is no whole number")


def count(value: Any, path: str) -> None:
    """A whole number from 0 on."""
    integer(value, path)
    if value < 0:
        raise InvalidValueError(path, f"{value} is below 0")


def small_count(value: Any, path: str) -> None:
    """A whole number from 0 to ``FEW``: what is made one by one."""
    count(value, path)
    if value > MAX_COUNT:
        raise InvalidValueError(path, f"{value} is above {MAX_COUNT}")


def text(value: Any, path: str) -> None:
    """A string."""
    if not isinstance(value, str):
        raise InvalidValueError(path, f"{_quote(value)} is no text")


def boolean(value: Any, path: str) -> None:
    """True or false."""
    if not isinstance(value, bool):
        raise InvalidValueError(path, f"{_quote(value)} is neither true nor false")


def anything(value: Any, path: str) -> None:
    """Carried along and never looked into."""


def one_of(*options: str) -> Validator:
    """One of a few words."""

    def check(value: Any, path: str) -> None:
        if not isinstance(value, str) or value not in options:
            raise InvalidValueError(path, f"{_quote(value)} is none of {', '.join(options)}")

    return check


def or_null(validator: Validator) -> Validator:
    """The shape, or null."""

    def check(value: Any, path: str) -> None:
        if value is not None:
            validator(value, path)

    return check


def list_of(validator: Validator) -> Validator:
    """A list of equals."""

    def check(value: Any, path: str) -> None:
        if not isinstance(value, list):
            raise InvalidValueError(path, f"{_quote(value)} is no list")
        for i, each in enumerate(value):
            validator(each, f"{path}[{i}]")

    return check


def map_of(validator: Validator) -> Validator:
    """An object whose keys are names."""

    def check(value: Any, path: str) -> None:
        if not isinstance(value, dict):
            raise InvalidValueError(path, f"{_quote(value)} is no object")
        for key, each in value.items():
            validator(each, f"{path}.{key}")

    return check


def record(
    required: Mapping[str, Validator], optional: Mapping[str, Validator] | None = None, /, **also: Validator
) -> Validator:
    """An object with these fields and no other: ``required`` must be there, ``optional`` and ``also`` can."""
    known = {**required, **(optional or {}), **also}

    def check(value: Any, path: str) -> None:
        if not isinstance(value, dict):
            raise InvalidValueError(path, f"{_quote(value)} is no object")
        for key, each in value.items():
            if key not in known:
                raise InvalidValueError(f"{path}.{key}", "this field is unknown")
            known[key](each, f"{path}.{key}")
        for key in required:
            if key not in value:
                raise InvalidValueError(path, f"the field {key} is missing")

    return check


def by_kind(choose: Callable[[Mapping[str, Any]], Validator | None]) -> Validator:
    """A record of several kinds: ``choose`` names the shape by the fields it sees, None is no known kind."""

    def check(value: Any, path: str) -> None:
        if not isinstance(value, dict):
            raise InvalidValueError(path, f"{_quote(value)} is no object")
        shape = choose(value)
        if shape is None:
            raise InvalidValueError(path, f"no kind of record has the fields {', '.join(value) or '(none)'}")
        shape(value, path)

    return check


def _quote(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 60 else f"{shown[:60]}…"
