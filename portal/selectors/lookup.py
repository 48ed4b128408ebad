"""Finds rows by public id or name."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from django.db.models import Model, Q, QuerySet

from portal.errors import NotFound

Row = TypeVar("Row", bound=Model)


def matches_key(key: str, relation: str = "", *, name: str = "name") -> Q:
    """Select rows by public id or name, of themselves or of a ``relation``; ``name`` is the column of the name."""
    prefix = f"{relation}__" if relation else ""
    return Q((f"{prefix}public_id", key)) | Q((f"{prefix}{name}", key))


def get_first(rows: QuerySet[Row], missing: str | None = None) -> Row:
    """Return the first row. Raise NotFound with the message ``missing``."""
    row = rows.first()
    if row is None:
        raise NotFound(missing) if missing else NotFound
    return row


def get_by_key(rows: QuerySet[Row], key: str, missing: str | None = None) -> Row:
    """Return the row by public id or name. Raise NotFound with the message ``missing``."""
    return get_first(rows.filter(matches_key(key)), missing)


def get_rows_by_key(rows: QuerySet[Row], keys: Iterable[str]) -> tuple[list[Row], str | None]:
    """Return the rows of these names or public ids, each once, and the first key without a row."""
    keys = list(dict.fromkeys(keys))
    found = list(rows.filter(Q(name__in=keys) | Q(public_id__in=keys)))
    known = {key for row in found for key in (getattr(row, "name"), getattr(row, "public_id"))}  # noqa: B009
    return found, next((key for key in keys if key not in known), None)
