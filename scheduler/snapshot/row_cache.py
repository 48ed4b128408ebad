"""Row cache: rereads only the rows written since the last snapshot.

PostgreSQL stamps each row version with the transaction that wrote it (``xmin``); a row with the same version
is unchanged. The versions of all rows are read in each snapshot, so no invalidation is needed, and the cache
may be dropped at any time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Generic, LiteralString, TypeVar

from django.db import connection

Source = TypeVar("Source")
Value = TypeVar("Value")
BLOCK_SIZE = 256
"""Primary keys per block of versions."""

Fetch = Callable[[Sequence[int] | None], Iterable[tuple[int, Value]]]

INVALID_DATA = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""Errors of code that reads an invalid value, such as a list in a column for objects."""


class RowCache(Generic[Value]):
    """Rows by primary key as last read, each with its version; unordered."""

    def __init__(self) -> None:
        self._rows: dict[int, tuple[object, Value]] = {}
        self._blocks: dict[int, str] = {}
        self._written: set[int] = set()  # after the blocks were read

    def refresh(self, versions: Iterable[tuple[int, object]], fetch: Fetch[Value]) -> dict[int, Value]:
        """Return the rows of ``versions``; ``fetch`` reads those with the given keys, or all for None."""
        now = dict(versions)
        return self._update(now, self._rows.keys() - now.keys(), fetch)

    def refresh_blocks(self, blocks: Iterable[tuple[int, str]], fetch: Fetch[Value]) -> dict[int, Value]:
        """Like ``refresh``, with versions in blocks (``row_version_blocks``); skip unchanged blocks."""
        before, now = self._blocks, dict(blocks)
        came = _parse_versions(text for block, text in now.items() if before.get(block) != text)
        left = _parse_versions(text for block, text in before.items() if now.get(block) != text)
        found = self._update(came, (left.keys() | self._written) - came.keys(), fetch)
        self._blocks, self._written = now, set()
        return found

    def _update(
        self, versions: Mapping[int, object], gone: Iterable[int], fetch: Fetch[Value]
    ) -> dict[int, Value]:
        """Return all rows without ``gone``; fetch those whose version in ``versions`` changed."""
        rows = dict(self._rows)
        for id_ in gone:
            rows.pop(id_, None)
        wanted = {
            id_: version for id_, version in versions.items() if id_ not in rows or rows[id_][0] != version
        }
        for id_ in wanted:
            rows.pop(id_, None)
        if wanted:
            for id_, value in fetch(list(wanted) if rows else None):
                if id_ in wanted:
                    rows[id_] = (wanted[id_], value)
        self._rows = rows
        return self.rows

    @property
    def rows(self) -> dict[int, Value]:
        return {id_: value for id_, (_, value) in self._rows.items()}

    def put(self, versions: Iterable[tuple[int, object]], values: Mapping[int, Value]) -> None:
        """Store rows that this process wrote, with their new versions. Call after commit."""
        written = {id_: (version, values[id_]) for id_, version in versions}
        self._rows.update(written)
        self._written.update(written)


class DerivedCache(Generic[Source, Value]):
    """Values built from rows, rebuilt only when the row changes."""

    def __init__(self) -> None:
        self._built: dict[int, tuple[Source, Value]] = {}
        self._context: object = None
        self.invalid: dict[int, str] = {}
        """Error messages of rows that ``make`` could not read, by primary key."""

    def map(
        self,
        rows: Mapping[int, Source],
        context: object,
        make: Callable[[int, Source], Value],
        fallback: Callable[[int, Source], Value] | None = None,
    ) -> tuple[Value, ...]:
        """Return ``make`` of each row; equal values are the earlier objects.

        ``make`` must depend on the row and ``context`` only. ``fallback`` builds the value of a row with
        invalid JSON.
        """
        make = make if fallback is None else self._guarded(make, fallback)
        before, same = self._built, context == self._context
        made: dict[int, tuple[Source, Value]] = {}
        for id_, source in rows.items():
            known = before.get(id_)
            if known is None:
                known = (source, make(id_, source))
            elif not same or (known[0] is not source and known[0] != source):
                value = make(id_, source)
                known = (source, known[1] if known[1] == value else value)
            made[id_] = known
        self._built, self._context = made, context
        if self.invalid:
            self.invalid = {id_: fault for id_, fault in self.invalid.items() if id_ in made}
        return tuple(value for _, value in made.values())

    @property
    def row_ids(self) -> Collection[int]:
        """Return the keys of the rows of the last ``map``, in the order of its values."""
        return self._built.keys()

    def _guarded(
        self, make: Callable[[int, Source], Value], fallback: Callable[[int, Source], Value]
    ) -> Callable[[int, Source], Value]:
        def guarded(id_: int, source: Source) -> Value:
            self.invalid.pop(id_, None)
            try:
                return make(id_, source)
            except INVALID_DATA as error:
                self.invalid[id_] = (
                    f"{error}" if type(error) is ValueError else f"{type(error).__name__}: {error}"
                )
                return fallback(id_, source)

        return guarded


def _parse_versions(blocks: Iterable[str]) -> dict[int, object]:
    pairs = (pair.split(":", 1) for text in blocks for pair in text.split())
    return {int(id_): version for id_, version in pairs}


def row_version_blocks(
    table: LiteralString, key: LiteralString, where: LiteralString = "TRUE", parameters: Sequence[Any] = ()
) -> list[tuple[int, str]]:
    """Return the row versions of a table in blocks of text such as ``7:901 8:933``; ``key`` is the primary
    key.

    Fetching and comparing 10 000 single versions takes longer than the rest of a snapshot. Versions within a
    block are unsorted, because sorting costs more than parsing a block again when only the order differs.
    """
    query = (  # only constants are interpolated
        f"SELECT {key} / {BLOCK_SIZE}, string_agg({key}::text || ':' || xmin::text, ' ')"  # noqa: S608
        f" FROM {table} WHERE {where} GROUP BY 1"
    )
    return row_versions(query, parameters)


def row_versions(sql: str, parameters: Sequence[Any] = ()) -> list[tuple[int, str]]:
    with connection.cursor() as cursor:
        cursor.execute(sql, parameters)
        versions: list[tuple[int, str]] = cursor.fetchall()
    return versions


def database_identity() -> tuple[Any, ...]:
    """Return the server start time and database oid; versions of another database are not comparable."""
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT oid, pg_postmaster_start_time() FROM pg_database WHERE datname = current_database()"
        )
        return tuple(cursor.fetchone())
