"""What a process keeps of its last photograph, so that the next one reads only the rows that were written since.

PostgreSQL marks each version of a row with the transaction that wrote it (``xmin``): a row that still bears the
mark of before says what it said before. The marks of all rows are read in the moment of each photograph, so that
nothing is missed and nothing has to be told; what is kept may be lost or dropped at any time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from django.db import connection

Value = TypeVar("Value")
Fetch = Callable[[Sequence[int] | None], Iterable[tuple[int, Value]]]


class Known(Generic[Value]):
    """Rows as they were last read, by their number, each with its mark."""

    def __init__(self) -> None:
        self._rows: dict[int, tuple[object, Value]] = {}

    def read(self, marks: Iterable[tuple[int, object]], fetch: Fetch[Value]) -> dict[int, Value]:
        """The rows of ``marks`` in their order; ``fetch`` reads those with these numbers, all for None."""
        wanted = dict(marks)
        before = self._rows
        rows = {id_: before[id_] for id_, mark in wanted.items() if id_ in before and before[id_][0] == mark}
        if len(rows) < len(wanted):
            missing = [id_ for id_ in wanted if id_ not in rows]
            for id_, value in fetch(missing if rows else None):
                if id_ in wanted:
                    rows[id_] = (wanted[id_], value)
        self._rows = rows
        return {id_: rows[id_][1] for id_ in wanted if id_ in rows}

    def note(self, marks: Iterable[tuple[int, object]], values: Mapping[int, Value]) -> None:
        """Rows that this process wrote itself, with the marks they got; call once they are committed."""
        self._rows.update({id_: (mark, values[id_]) for id_, mark in marks})


class Built(Generic[Value]):
    """What was made of rows: made anew only where what it is made of is something else."""

    def __init__(self) -> None:
        self._made: dict[int, tuple[object, tuple[object, ...], Value]] = {}
        self._next: dict[int, tuple[object, tuple[object, ...], Value]] = {}

    def begin(self) -> None:
        """Another photograph: what it does not ask for is forgotten with the next."""
        self._made, self._next = self._next, {}

    def get(self, id_: int, make: Callable[..., Value], source: object, *rest: object) -> Value:
        """``make(source, *rest)``, or what it gave before for the same object and for equal rest."""
        known = self._made.get(id_)
        if known is None or known[0] is not source or known[1] != rest:
            value = make(source, *rest)
            known = (source, rest, known[2] if known is not None and known[2] == value else value)
        self._next[id_] = known
        return known[2]


def marks_of(sql: str, parameters: Sequence[Any] = ()) -> list[tuple[int, object]]:
    """Row numbers with marks, as a query gives them."""
    with connection.cursor() as cursor:
        cursor.execute(sql, parameters)
        marks: list[tuple[int, object]] = cursor.fetchall()
    return marks


def name_of_record() -> tuple[Any, ...]:
    """Which server and database this is, since when: marks of another one say nothing."""
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT oid, pg_postmaster_start_time() FROM pg_database WHERE datname = current_database()"
        )
        return tuple(cursor.fetchone())
