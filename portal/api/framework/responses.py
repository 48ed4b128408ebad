"""Serializers of answers: one declaration writes the JSON and describes it in the OpenAPI document."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from inspect import getattr_static
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

from django.db.models import Manager
from rest_framework import serializers

_Convert = Callable[[Any, Any], Any]
"""Converts a value that is not None to JSON; the second argument is the context."""


class ResponseSerializer(serializers.Serializer[Any]):
    """An answer, or a part of one.

    Each field is read from the attribute path ``source``, by default the field's name; ``"*"`` is the row
    itself, a path that begins with ``context.`` is read from the context, and None on the way gives None.
    A static method ``get_<field>(row, context)`` replaces the read.
    A dict stands for a nested serializer as it is: JSON columns are stored as they are served.
    The OpenAPI document requires every property except ``optional_fields`` and allows no others.
    """

    optional_fields: frozenset[str] = frozenset()
    """Keys that a stored JSON document may lack."""

    @classmethod
    def represent(cls, row: Any, context: Any = None) -> dict[str, Any]:
        """Return the JSON object of ``row``. Every ``get_`` method, also of nested rows, gets ``context``."""
        raise NotImplementedError

    @classmethod
    def compose(cls, context: Any = None, **values: Any) -> dict[str, Any]:
        """Return the JSON object of a row with these attributes."""
        return cls.represent(SimpleNamespace(**values), context)

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.represent = staticmethod(_compile(cls))  # type: ignore[method-assign]


def timestamp(at: dt.datetime | None) -> str | None:
    """Return RFC 3339 in UTC, or null."""
    return at.astimezone(dt.UTC).isoformat().replace("+00:00", "Z") if at else None


def _compile(declaration: type[ResponseSerializer]) -> Callable[..., dict[str, Any]]:
    """Return the function that writes a row.

    Rows of long lists are as fast as hand-written dicts: one ``attrgetter`` reads all attributes, and only
    values that are no JSON yet are visited again. ``zip`` without ``strict`` is twice as fast.
    """
    fields = declaration._declared_fields
    read: dict[str, str] = {}  # field: attribute of the row
    times: list[str] = []
    convert: list[tuple[str, _Convert]] = []
    compute: list[tuple[str, _Convert, _Convert | None]] = []
    for name, field in fields.items():
        getter = getattr_static(declaration, f"get_{name}", None)
        to_json = _field_conversion(field)
        head, *path = (field.source or name).split(".")
        if isinstance(getter, staticmethod):
            compute.append((name, getter.__func__, to_json))
        elif head == "*":
            compute.append((name, lambda row, context: row, to_json))
        elif head == "context":
            compute.append((name, _read_context(_follow(path, to_json)), None))
        else:
            read[name] = head
            if path:
                convert.append((name, _follow(path, to_json)))
            elif isinstance(field, serializers.DateTimeField):
                times.append(name)
            elif to_json is not None:
                convert.append((name, to_json))

    names, values_of = tuple(read), _read_all(tuple(read.values()))
    blank: dict[str, Any] = dict.fromkeys(fields)

    def represent_pair(row: Any, context: Any = None) -> dict[str, Any]:
        try:
            first, second = values_of(row)
        except AttributeError:
            if isinstance(row, dict):
                return row
            raise
        return {names[0]: first, names[1]: second}

    def represent(row: Any, context: Any = None) -> dict[str, Any]:
        try:
            values = values_of(row)
        except AttributeError:
            if isinstance(row, dict):
                return row
            raise
        answer = blank.copy()
        for name, value in zip(names, values):  # noqa: B905
            answer[name] = value
        for name in times:
            answer[name] = timestamp(answer[name])
        for name, to_json in convert:
            value = answer[name]
            if value is not None:
                answer[name] = to_json(value, context)
        for name, get, to_json_of in compute:
            value = get(row, context)
            answer[name] = value if value is None or to_json_of is None else to_json_of(value, context)
        return answer

    if len(names) == 2 and not (times or convert or compute):
        return represent_pair
    return represent


def _read_all(attributes: tuple[str, ...]) -> Callable[[Any], tuple[Any, ...]]:
    if len(attributes) > 1:
        return attrgetter(*attributes)
    return lambda row: tuple(getattr(row, name) for name in attributes)


def _follow(path: list[str], to_json: _Convert | None) -> _Convert:
    def follow(value: Any, context: Any) -> Any:
        for name in path:
            value = getattr(value, name)
            if value is None:
                return None
        return value if to_json is None else to_json(value, context)

    return follow


def _read_context(follow: _Convert) -> _Convert:
    return lambda row, context: follow(context, context)


def _field_conversion(field: Any) -> _Convert | None:
    """Return the conversion of a field's values; None where values are JSON already."""
    match field:
        case serializers.DateTimeField():
            return lambda value, context: timestamp(value)
        case ResponseSerializer():
            return type(field).represent
        case serializers.ListField() | serializers.ListSerializer():
            return _list_conversion(_field_conversion(field.child))
    return None


def _list_conversion(to_json: _Convert | None) -> _Convert:
    def each(value: Any, context: Any) -> list[Any]:
        rows = value.all() if isinstance(value, Manager) else value
        if to_json is None:
            return list(rows)
        return [None if row is None else to_json(row, context) for row in rows]

    return each
