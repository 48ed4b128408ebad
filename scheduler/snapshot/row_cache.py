"""What a process keeps of its last photograph, so that the next one reads only the rows that were written since.

PostgreSQL marks each version of a row with the transaction that wrote it (``xmin``): a row that still bears the
version of before says what it said before. The marks of all rows are read in the moment of each photograph, so that
nothing is missed and nothing has to be told; what is kept may be lost or dropped at any time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Generic, LiteralString, TypeVar

from django.db import connection

Source = TypeVar("Source")
Value = TypeVar("Value")
BLOCK_SIZE = 256
"""Row numbers to a block of marks."""

Fetch = Callable[[Sequence[int] | None], Iterable[tuple[int, Value]]]

INVALID_DATA = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""What code raises that meets a value which cannot be, such as a list where a JSON column should hold an object."""


class RowCache(Generic[Value]):
    """Rows as they were last read, by their number, each with its version; they come in no order."""

    def __init__(self) -> None:
        self._rows: dict[int, tuple[object, Value]] = {}
        self._blocks: dict[int, str] = {}
        self._written: set[int] = set()  # since blocks were read, which do not know of them

    def refresh(self, versions: Iterable[tuple[int, object]], fetch: Fetch[Value]) -> dict[int, Value]:
        """The rows of ``versions``; ``fetch`` reads those with these numbers, all for None."""
        now = dict(versions)
        return self._update(now, self._rows.keys() - now.keys(), fetch)

    def refresh_blocks(self, blocks: Iterable[tuple[int, str]], fetch: Fetch[Value]) -> dict[int, Value]:
        """The same where marks come in blocks, as of ``blocks_of``: one that says the same is not looked into."""
        before, now = self._blocks, dict(blocks)
        came = _parse_versions(text for block, text in now.items() if before.get(block) != text)
        left = _parse_versions(text for block, text in before.items() if now.get(block) != text)
        found = self._update(came, (left.keys() | self._written) - came.keys(), fetch)
        self._blocks, self._written = now, set()
        return found

    def _update(
        self, versions: Mapping[int, object], gone: Iterable[int], fetch: Fetch[Value]
    ) -> dict[int, Value]:
        """All rows, those of ``versions`` read anew where they bear another one, without those that are ``gone``."""
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
        """As they were last read, and noted since."""
        return {id_: value for id_, (_, value) in self._rows.items()}

    def put(self, versions: Iterable[tuple[int, object]], values: Mapping[int, Value]) -> None:
        """Rows that this process wrote itself, with the marks they got; call once they are committed."""
        written = {id_: (version, values[id_]) for id_, version in versions}
        self._rows.update(written)
        self._written.update(written)


class DerivedCache(Generic[Source, Value]):
    """What was made of rows: made anew only where they say something else."""

    def __init__(self) -> None:
        self._built: dict[int, tuple[Source, Value]] = {}
        self._context: object = None
        self.invalid: dict[int, str] = {}
        """What is wrong with the rows that ``make`` could not read, by number."""

    def map(
        self,
        rows: Mapping[int, Source],
        context: object,
        make: Callable[[int, Source], Value],
        fallback: Callable[[int, Source], Value] | None = None,
    ) -> tuple[Value, ...]:
        """``make`` of each row, which follows from the row and ``context`` alone; equal ones are those of before.

        ``fallback`` makes the value of a row that ``make`` cannot read, from the columns that are typed.
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
        """The numbers of the rows that were made last, in the order of their values."""
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
    """The marks by row number that blocks tell."""
    pairs = (pair.split(":", 1) for text in blocks for pair in text.split())
    return {int(id_): version for id_, version in pairs}


def row_version_blocks(
    table: LiteralString, key: LiteralString, where: LiteralString = "TRUE", parameters: Sequence[Any] = ()
) -> list[tuple[int, str]]:
    """The marks of many rows of a table, some hundred to a text such as ``7:901 8:933``; ``key`` is their key.

    Ten thousand marks one by one take longer to fetch and compare than all else that is read of them. They stand in
    no order, which would take longer still: where only that differs, a block is looked into for nothing.
    """
    query = (  # every word of it stands in our own code
        f"SELECT {key} / {BLOCK_SIZE}, string_agg({key}::text || ':' || xmin::text, ' ')"  # noqa: S608
        f" FROM {table} WHERE {where} GROUP BY 1"
    )
    with connection.cursor() as cursor:
        cursor.execute(query, parameters)
        blocks: list[tuple[int, str]] = cursor.fetchall()
    return blocks


def row_versions(sql: str, parameters: Sequence[Any] = ()) -> list[tuple[int, object]]:
    """Row numbers with marks, as a query gives them."""
    with connection.cursor() as cursor:
        cursor.execute(sql, parameters)
        versions: list[tuple[int, object]] = cursor.fetchall()
    return versions


def database_identity() -> tuple[Any, ...]:
    """Which server and database this is, since when: marks of another one say nothing."""
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT oid, pg_postmaster_start_time() FROM pg_database WHERE datname = current_database()"
        )
        return tuple(cursor.fetchone())
