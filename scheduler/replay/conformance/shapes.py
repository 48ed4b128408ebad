"""What a JSON value must look like, said once as a value and checked with the place of every mistake.

Each shape is a function of the value and its JSON path; it raises ``Misshapen`` naming the path.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

Shape = Callable[[Any, str], None]

FEW = 10_000


class Misshapen(ValueError):
    """A value that does not look as it should; ``place`` is its JSON path."""

    def __init__(self, place: str, message: str) -> None:
        super().__init__(f"{place}: {message}")
        self.place = place
        self.message = message


def number(value: Any, place: str) -> None:
    """A finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise Misshapen(place, f"{_shown(value)} is no number")


def whole(value: Any, place: str) -> None:
    """A whole number, also written as 2.0."""
    number(value, place)
    if value != int(value):
        raise Misshapen(place, f"{value} is no whole number")


def count(value: Any, place: str) -> None:
    """A whole number from 0 on."""
    whole(value, place)
    if value < 0:
        raise Misshapen(place, f"{value} is below 0")


def few(value: Any, place: str) -> None:
    """A whole number from 0 to ``FEW``: what is made one by one."""
    count(value, place)
    if value > FEW:
        raise Misshapen(place, f"{value} is above {FEW}")


def text(value: Any, place: str) -> None:
    """A string."""
    if not isinstance(value, str):
        raise Misshapen(place, f"{_shown(value)} is no text")


def flag(value: Any, place: str) -> None:
    """True or false."""
    if not isinstance(value, bool):
        raise Misshapen(place, f"{_shown(value)} is neither true nor false")


def anything(value: Any, place: str) -> None:
    """Carried along and never looked into."""


def one_of(*options: str) -> Shape:
    """One of a few words."""

    def check(value: Any, place: str) -> None:
        if not isinstance(value, str) or value not in options:
            raise Misshapen(place, f"{_shown(value)} is none of {', '.join(options)}")

    return check


def or_null(shape: Shape) -> Shape:
    """The shape, or null."""

    def check(value: Any, place: str) -> None:
        if value is not None:
            shape(value, place)

    return check


def list_of(shape: Shape) -> Shape:
    """A list of equals."""

    def check(value: Any, place: str) -> None:
        if not isinstance(value, list):
            raise Misshapen(place, f"{_shown(value)} is no list")
        for i, each in enumerate(value):
            shape(each, f"{place}[{i}]")

    return check


def map_of(shape: Shape) -> Shape:
    """An object whose keys are names."""

    def check(value: Any, place: str) -> None:
        if not isinstance(value, dict):
            raise Misshapen(place, f"{_shown(value)} is no object")
        for key, each in value.items():
            shape(each, f"{place}.{key}")

    return check


def record(needs: Mapping[str, Shape], may: Mapping[str, Shape] | None = None, **also: Shape) -> Shape:
    """An object with these fields and no other: ``needs`` must be there, ``may`` and ``also`` can."""
    known = {**needs, **(may or {}), **also}

    def check(value: Any, place: str) -> None:
        if not isinstance(value, dict):
            raise Misshapen(place, f"{_shown(value)} is no object")
        for key, each in value.items():
            if key not in known:
                raise Misshapen(f"{place}.{key}", "this field is unknown")
            known[key](each, f"{place}.{key}")
        for key in needs:
            if key not in value:
                raise Misshapen(place, f"the field {key} is missing")

    return check


def first_that_fits(choose: Callable[[Mapping[str, Any]], Shape | None]) -> Shape:
    """A record of several kinds: ``choose`` names the shape by the fields it sees, None is no known kind."""

    def check(value: Any, place: str) -> None:
        if not isinstance(value, dict):
            raise Misshapen(place, f"{_shown(value)} is no object")
        shape = choose(value)
        if shape is None:
            raise Misshapen(place, f"no kind of record has the fields {', '.join(value) or '(none)'}")
        shape(value, place)

    return check


def _shown(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 60 else f"{shown[:60]}…"
