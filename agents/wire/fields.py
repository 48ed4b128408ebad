"""Validating readers for the fields of an object from a node: type, length, range and characters."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Self, TypeVar, get_type_hints

T = TypeVar("T")

MAX_QUANTITY = 1e15
"""Upper bound of all measured quantities."""
MAX_INT32 = 2**31 - 1
"""Upper bound of most integer columns."""
MAX_SAFE_INTEGER = 2**53 - 1
"""The largest integer that every JSON parser represents exactly."""
MAX_NAME_LENGTH = 256
MAX_TEXT_LENGTH = 1000
_MAX_REPR_LENGTH = 40
_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\u202a-\u202e\u2066-\u2069]")


class InvalidMessageError(ValueError):
    """A message of a node violates the protocol; the error names the field."""


def check_number(value: Any, minimum: float = -MAX_QUANTITY, maximum: float = MAX_QUANTITY) -> Any:
    """Return a number within bounds, or None. Raise InvalidMessageError otherwise, also for NaN."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not minimum <= value <= maximum:
        raise InvalidMessageError(f"{_short_repr(value)} is not a number")
    return value


def clean_text(value: Any, max_length: int = MAX_TEXT_LENGTH) -> str:
    """Return display text: control characters and lone surrogates replaced, truncated to ``max_length``.

    Users of the node choose parts of it, such as process names, so its content never invalidates a message.
    """
    if not isinstance(value, str):
        raise InvalidMessageError(f"{_short_repr(value)} is not a string")
    return _UNPRINTABLE.sub("\ufffd", value[:max_length])


class FieldReader:
    """The fields of one object; a missing field is null. All readers raise InvalidMessageError."""

    __slots__ = ("_row",)

    def __init__(self, row: object) -> None:
        if not isinstance(row, Mapping):
            raise InvalidMessageError(f"{_short_repr(row)} is not an object")
        self._row = row

    def __contains__(self, key: str) -> bool:
        return self._row.get(key) is not None

    def name(self, key: str, max_length: int = MAX_NAME_LENGTH) -> str:
        """Return an identifier: printable, not blank, unchanged."""
        found = self.name_or_none(key, max_length)
        if not found:
            raise InvalidMessageError(f"{key} is missing")
        return found

    def name_or_none(
        self, key: str, max_length: int = MAX_NAME_LENGTH, pattern: re.Pattern[str] | None = None
    ) -> str | None:
        value = self._row.get(key)
        if value is None:
            return None
        found = _check_name(key, value, max_length)
        if pattern is not None and not pattern.fullmatch(found):
            raise InvalidMessageError(
                f"{key} is {_short_repr(found)}, which does not match {pattern.pattern}"
            )
        return found

    def choice(self, key: str, allowed: tuple[str, ...]) -> str:
        value = self._row.get(key)
        if value not in allowed:
            raise InvalidMessageError(f"{key} is {_short_repr(value)}, not one of {', '.join(allowed)}")
        return str(value)

    def text(self, key: str, max_length: int = MAX_TEXT_LENGTH) -> str:
        """Return display text (``clean_text``); blank when missing."""
        return self.text_or_none(key, max_length) or ""

    def text_or_none(self, key: str, max_length: int = MAX_TEXT_LENGTH) -> str | None:
        value = self._row.get(key)
        return None if value is None else self._with_field_name(key, clean_text, value, max_length)

    def integer(self, key: str, minimum: int = 0, maximum: int = MAX_INT32) -> int:
        found = self.integer_or_none(key, minimum, maximum)
        if found is None:
            raise InvalidMessageError(f"{key} is missing")
        return found

    def integer_or_none(self, key: str, minimum: int = 0, maximum: int = MAX_INT32) -> int | None:
        value = self._row.get(key)
        return None if value is None else _check_integer(key, value, minimum, maximum)

    def number(self, key: str, minimum: float = -MAX_QUANTITY, maximum: float = MAX_QUANTITY) -> float:
        found = self.number_or_none(key, minimum, maximum)
        if found is None:
            raise InvalidMessageError(f"{key} is missing")
        return float(found)

    def number_or_none(self, key: str, minimum: float = -MAX_QUANTITY, maximum: float = MAX_QUANTITY) -> Any:
        return self._with_field_name(key, check_number, self._row.get(key), minimum, maximum)

    def boolean(self, key: str, default: bool = False) -> bool:
        value = self._row.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise InvalidMessageError(f"{key} is {_short_repr(value)}, not true or false")
        return value

    def object_or_none(self, key: str, parse: Callable[[Any], T]) -> T | None:
        value = self._row.get(key)
        return None if value is None else self._with_field_name(key, parse, value)

    def list_of(self, key: str, parse: Callable[[Any], T], max_items: int) -> tuple[T, ...]:
        """Return the list items parsed by ``parse``; empty when missing."""
        return tuple(self._with_field_name(key, parse, each) for each in self._elements(key, max_items))

    def valid_items(self, key: str, parse: Callable[[Any], T], max_items: int) -> Iterator[T]:
        """Like ``list_of`` without invalid items, for objects that users create on the node."""
        for each in self._elements(key, max_items):
            with contextlib.suppress(InvalidMessageError):
                yield parse(each)

    def names(self, key: str, max_items: int, max_length: int = MAX_NAME_LENGTH) -> tuple[str, ...]:
        return self.list_of(key, lambda each: _check_name(key, each, max_length), max_items)

    def mapping_of(self, key: str, parse: Callable[[Any], T], max_items: int) -> dict[str, T]:
        """Return the values of an object by name; empty when missing."""
        value = self._row.get(key)
        if value is None:
            return {}
        if not isinstance(value, Mapping) or len(value) > max_items:
            raise InvalidMessageError(f"{key} is not an object with at most {max_items} fields")
        return {
            _check_name(key, name, 64): self._with_field_name(key, parse, each)
            for name, each in value.items()
        }

    def _elements(self, key: str, max_items: int) -> Sequence[Any]:
        value = self._row.get(key)
        if value is None:
            return ()
        if not isinstance(value, list | tuple):
            raise InvalidMessageError(f"{key} is {_short_repr(value)}, not a list")
        if len(value) > max_items:
            raise InvalidMessageError(f"{key} has {len(value)} elements, more than {max_items}")
        return value

    @staticmethod
    def _with_field_name(key: str, parse: Callable[..., T], *arguments: Any) -> T:
        try:
            return parse(*arguments)
        except ValueError as error:
            raise InvalidMessageError(f"{key}: {error}") from error


class WireField(NamedTuple):
    """How a field of a message is read: ``read(reader, key, *arguments)``."""

    read: Callable[..., Any]
    arguments: tuple[Any, ...]


def wire(read: Callable[..., Any], *arguments: Any) -> WireField:
    """Declare how an ``Annotated`` field is read: by a method of FieldReader or a function like it."""
    return WireField(read, arguments)


class Message:
    """Base of dataclasses that mirror an object on the wire.

    Each field is ``Annotated`` with how it is read (:func:`wire`), which defines what the object may contain.
    """

    @classmethod
    def from_wire(cls, row: object) -> Self:
        """Return the message of a JSON object. Raise InvalidMessageError when it contains anything else."""
        reader = FieldReader(row)
        fields = _wire_fields(cls)  # type: ignore[arg-type]  # a class is hashable
        return cls(**{key: read(reader, key, *arguments) for key, (read, arguments) in fields})


@functools.cache
def _wire_fields(message: type[Message]) -> tuple[tuple[str, WireField], ...]:
    hints = get_type_hints(message, include_extras=True)
    return tuple((key, hint.__metadata__[0]) for key, hint in hints.items())


def check_integer(value: Any, minimum: int = 0, maximum: int = MAX_INT32) -> int:
    return _check_integer("it", value, minimum, maximum)


def _check_name(key: str, value: Any, max_length: int) -> str:
    if not isinstance(value, str) or len(value) > max_length or not value.isprintable():
        raise InvalidMessageError(
            f"{key} is {_short_repr(value)}, not a name of at most {max_length} characters"
        )
    return value


def _check_integer(key: str, value: Any, minimum: int, maximum: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= maximum:
        raise InvalidMessageError(
            f"{key} is {_short_repr(value)}, not an integer from {minimum} to {maximum}"
        )
    return value


def _short_repr(value: Any) -> str:
    """Return a short, printable representation for messages."""
    if isinstance(value, int) and abs(value) > MAX_SAFE_INTEGER:
        return "a huge number"  # it may have too many digits to print
    if isinstance(value, str):
        return ascii(value[:_MAX_REPR_LENGTH])
    if value is None or isinstance(value, bool | int | float):
        return ascii(value)
    return f"of the type {type(value).__name__}"
