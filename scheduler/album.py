"""What a process keeps of its last photograph, so that the next one reads only the rows that were written since.

PostgreSQL marks each version of a row with the transaction that wrote it (``xmin``): a row that still bears the
mark of before says what it said before. The marks of all rows are read in the moment of each photograph, so that
nothing is missed and nothing has to be told; what is kept may be lost or dropped at any time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from django.db import connection

Source = TypeVar("Source")
Value = TypeVar("Value")
Fetch = Callable[[Sequence[int] | None], Iterable[tuple[int, Value]]]


class Known(Generic[Value]):
    """Rows as they were last read, by their number, each with its mark."""

    def __init__(self) -> None:
        self._rows: dict[int, tuple[object, Value]] = {}

    def read(self, marks: Iterable[tuple[int, object]], fetch: Fetch[Value]) -> dict[int, Value]:
        """The rows of ``marks`` in their order; ``fetch`` reads those with these numbers, all for None."""
        before = self._rows
        rows: dict[
            int, tuple[object, Value] | None
        ] = {}  # in the order of the marks, None where it must be read
        wanted: dict[int, object] = {}
        for id_, mark in marks:
            known = before.get(id_)
            if known is None or known[0] != mark:
                wanted[id_], known = mark, None
            rows[id_] = known
        if wanted:
            for id_, value in fetch(list(wanted) if len(wanted) < len(rows) else None):
                if id_ in wanted:
                    rows[id_] = (wanted[id_], value)
        self._rows = {id_: known for id_, known in rows.items() if known is not None}
        return {id_: known[1] for id_, known in self._rows.items()}

    def note(self, marks: Iterable[tuple[int, object]], values: Mapping[int, Value]) -> None:
        """Rows that this process wrote itself, with the marks they got; call once they are committed."""
        self._rows.update({id_: (mark, values[id_]) for id_, mark in marks})


class Built(Generic[Source, Value]):
    """What was made of rows: made anew only where they say something else."""

    def __init__(self) -> None:
        self._made: dict[int, tuple[Source, Value]] = {}
        self._context: object = None

    def of(
        self, rows: Mapping[int, Source], context: object, make: Callable[[int, Source], Value]
    ) -> tuple[Value, ...]:
        """``make`` of each row, which follows from the row and ``context`` alone; equal ones are those of before."""
        before, same = self._made, context == self._context
        made: dict[int, tuple[Source, Value]] = {}
        for id_, source in rows.items():
            known = before.get(id_)
            if known is None:
                known = (source, make(id_, source))
            elif not same or (known[0] is not source and known[0] != source):
                value = make(id_, source)
                known = (source, known[1] if known[1] == value else value)
            made[id_] = known
        self._made, self._context = made, context
        return tuple(value for _, value in made.values())


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
