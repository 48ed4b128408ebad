"""Readers for the fields of an object that a node sent: type, length, range and characters, each declared once."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

Read = TypeVar("Read")

LARGEST = 1e15
"""No quantity that a node measures is larger."""
LARGEST_INT4 = 2**31 - 1
"""The largest whole number of most columns that such values are written to."""
LARGEST_EXACT = 2**53 - 1
"""The largest whole number that every JSON reader keeps exactly."""
NAME_CHARACTERS = 256
SENTENCE_CHARACTERS = 1000
_SHOWN_CHARACTERS = 40
_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\u202a-\u202e\u2066-\u2069]")


class Malformed(ValueError):
    """A node sent something that the protocol does not allow; the message names the field."""


def measured(value: Any, least: float = -LARGEST, most: float = LARGEST) -> Any:
    """A number within bounds, or None for an unknown one. Malformed for anything else, NaN and infinity included."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise Malformed(f"{_shown(value)} is no measurement")
    return value


def sentence(value: Any, most: int = SENTENCE_CHARACTERS) -> str:
    """Text for people: control characters and lone surrogates are replaced, and what is too long is cut.

    Parts of it, such as the name of a process, are chosen by users of the node, so none of it makes a frame invalid.
    """
    if not isinstance(value, str):
        raise Malformed(f"{_shown(value)} is no text")
    return _UNPRINTABLE.sub("\ufffd", value[:most])


class Fields:
    """The fields of one object. A missing field is null. Each reader raises Malformed for what does not fit."""

    __slots__ = ("_row",)

    def __init__(self, row: object) -> None:
        if not isinstance(row, Mapping):
            raise Malformed(f"{_shown(row)} is no object")
        self._row = row

    def __contains__(self, key: str) -> bool:
        return self._row.get(key) is not None

    def name(self, key: str, most: int = NAME_CHARACTERS) -> str:
        """An identifier: printable, not blank, and exactly as it was sent."""
        found = self.name_or_none(key, most)
        if not found:
            raise Malformed(f"{key} is missing")
        return found

    def name_or_none(
        self, key: str, most: int = NAME_CHARACTERS, pattern: re.Pattern[str] | None = None
    ) -> str | None:
        value = self._row.get(key)
        if value is None:
            return None
        found = _name(key, value, most)
        if pattern is not None and not pattern.fullmatch(found):
            raise Malformed(f"{key} is {_shown(found)}, which does not match {pattern.pattern}")
        return found

    def one_of(self, key: str, allowed: tuple[str, ...]) -> str:
        value = self._row.get(key)
        if value not in allowed:
            raise Malformed(f"{key} is {_shown(value)}, not one of {', '.join(allowed)}")
        return str(value)

    def sentence(self, key: str, most: int = SENTENCE_CHARACTERS) -> str:
        """Text for people, blank where it is missing; see the function of this name."""
        return self.sentence_or_none(key, most) or ""

    def sentence_or_none(self, key: str, most: int = SENTENCE_CHARACTERS) -> str | None:
        value = self._row.get(key)
        return None if value is None else self._named(key, sentence, value, most)

    def whole(self, key: str, least: int = 0, most: int = LARGEST_INT4) -> int:
        found = self.whole_or_none(key, least, most)
        if found is None:
            raise Malformed(f"{key} is missing")
        return found

    def whole_or_none(self, key: str, least: int = 0, most: int = LARGEST_INT4) -> int | None:
        value = self._row.get(key)
        return None if value is None else _whole(key, value, least, most)

    def number(self, key: str, least: float = -LARGEST, most: float = LARGEST) -> float:
        found = self.number_or_none(key, least, most)
        if found is None:
            raise Malformed(f"{key} is missing")
        return float(found)

    def number_or_none(self, key: str, least: float = -LARGEST, most: float = LARGEST) -> Any:
        return self._named(key, measured, self._row.get(key), least, most)

    def flag(self, key: str, *, default: bool = False) -> bool:
        value = self._row.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise Malformed(f"{key} is {_shown(value)}, neither true nor false")
        return value

    def list_of(self, key: str, read: Callable[[Any], Read], most: int) -> tuple[Read, ...]:
        """Each element of a list as ``read`` gives it; empty where the list is missing."""
        return tuple(self._named(key, read, each) for each in self._elements(key, most))

    def readable(self, key: str, read: Callable[[Any], Read], most: int) -> Iterator[Read]:
        """As ``list_of`` without the elements that are malformed: of things that users of the node make there."""
        for each in self._elements(key, most):
            with contextlib.suppress(Malformed):
                yield read(each)

    def names(self, key: str, most: int, characters: int = NAME_CHARACTERS) -> tuple[str, ...]:
        return self.list_of(key, lambda each: _name(key, each, characters), most)

    def pairs_of(self, key: str, read: Callable[[Any], Read], most: int) -> dict[str, Read]:
        """The values of an object by their names; empty where it is missing."""
        value = self._row.get(key)
        if value is None:
            return {}
        if not isinstance(value, Mapping) or len(value) > most:
            raise Malformed(f"{key} is no object with at most {most} fields")
        return {_name(key, name, 64): self._named(key, read, each) for name, each in value.items()}

    def _elements(self, key: str, most: int) -> Sequence[Any]:
        value = self._row.get(key)
        if value is None:
            return ()
        if not isinstance(value, list | tuple):
            raise Malformed(f"{key} is {_shown(value)}, not a list")
        if len(value) > most:
            raise Malformed(f"{key} has {len(value)} elements, more than {most}")
        return value

    @staticmethod
    def _named(key: str, read: Callable[..., Read], *arguments: Any) -> Read:
        try:
            return read(*arguments)
        except ValueError as problem:
            raise Malformed(f"{key}: {problem}") from problem


def whole_number(value: Any, least: int = 0, most: int = LARGEST_INT4) -> int:
    """A single whole number within bounds."""
    return _whole("it", value, least, most)


def _name(key: str, value: Any, most: int) -> str:
    if not isinstance(value, str) or len(value) > most or not value.isprintable():
        raise Malformed(f"{key} is {_shown(value)}, not a name of at most {most} characters")
    return value


def _whole(key: str, value: Any, least: int, most: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise Malformed(f"{key} is {_shown(value)}, not a whole number from {least} to {most}")
    return value


def _shown(value: Any) -> str:
    """A value for a message: short, and of printable characters."""
    if isinstance(value, int) and abs(value) > LARGEST_EXACT:
        return "a huge number"  # its digits may be too many to be written
    if isinstance(value, str):
        return ascii(value[:_SHOWN_CHARACTERS])
    if value is None or isinstance(value, bool | int | float):
        return ascii(value)
    return f"of the type {type(value).__name__}"
