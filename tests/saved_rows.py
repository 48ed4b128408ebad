"""Data sets that are made once in a process: later their rows and logs are written again, with times relative to now.

Making one takes a second, because each job passes through the services of the portal. Writing its rows takes a
twentieth of that.
"""

from __future__ import annotations

import copy
import datetime as dt
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import redis
from django.conf import settings
from django.db import connection, transaction
from django.utils import timezone

from tests.table_flush import emptied_tables, owner_may_skip_triggers
from tests.table_owner import execute_as_owner

Made = TypeVar("Made")
_TIME = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(\.\d+)?\+00")
_TIME_TYPES = ("timestamp with time zone", "tstzrange")
_MINUTE = dt.timedelta(minutes=1)


@dataclass(frozen=True)
class SavedTable:
    """The rows of a table in PostgreSQL's text format, one a line."""

    name: str
    columns: tuple[str, ...]
    times: tuple[int, ...]
    """Positions of the columns with times."""
    lines: tuple[str, ...]

    def shifted(self, shift: Callable[[re.Match[str]], str]) -> str:
        if not self.times:
            return "".join(f"{line}\n" for line in self.lines)
        rows = [line.split("\t") for line in self.lines]
        for row in rows:
            for position in self.times:
                row[position] = _TIME.sub(shift, row[position])
        return "".join("\t".join(row) + "\n" for row in rows)


@dataclass(frozen=True)
class SavedDataset:
    """What a function has returned and written."""

    made: Any
    at: dt.datetime
    tables: tuple[SavedTable, ...]
    logs: dict[str, bytes]

    def restore(self) -> None:
        """Write the rows and logs again. The tables must be empty."""
        shift = _shift(self.at, timezone.now())
        with transaction.atomic(), connection.cursor() as cursor:
            execute_as_owner("SET LOCAL session_replication_role = replica")
            for table in self.tables:
                with cursor.copy(f"COPY {_target(table.name, table.columns)} FROM STDIN") as rows:
                    rows.write(table.shifted(shift))
            execute_as_owner("SET LOCAL session_replication_role = origin")
        for name, content in self.logs.items():
            path = Path(settings.LOG_DIR, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)


_saved: dict[Callable[[], Any], SavedDataset] = {}


def make_once(make: Callable[[], Made]) -> Made:
    """Return what ``make`` returns, with its rows in the empty tables and its logs in ``LOG_DIR``."""
    if not owner_may_skip_triggers():
        return make()
    saved = _saved.get(make)
    if saved is None:
        made = make()
        _saved[make] = SavedDataset(copy.deepcopy(made), timezone.now(), _read_tables(), _read_logs())
        return made
    redis.Redis.from_url(settings.REDIS_URL).flushdb()  # counts of the same users in earlier tests
    saved.restore()
    result: Made = copy.deepcopy(saved.made)
    return result


def _shift(since: dt.datetime, now: dt.datetime) -> Callable[[re.Match[str]], str]:
    """Return the replacement of a time; a full minute stays one."""
    exact, minutes = now - since, _full_minute(now) - _full_minute(since)

    def shift(found: re.Match[str]) -> str:
        time = dt.datetime.fromisoformat(f"{found[0]}:00")
        return str(time + (minutes if time == _full_minute(time) else exact))

    return shift


def _full_minute(time: dt.datetime) -> dt.datetime:
    return time.replace(second=0, microsecond=0)


def _read_tables() -> tuple[SavedTable, ...]:
    tables = []
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT table_name, column_name, data_type FROM information_schema.columns"
            " WHERE table_schema = 'public' AND is_generated = 'NEVER' ORDER BY ordinal_position"
        )
        columns: dict[str, list[tuple[str, str]]] = {}
        for table, column, kind in cursor.fetchall():
            columns.setdefault(table, []).append((column, kind))
        for table in emptied_tables():
            names = tuple(name for name, _ in columns[table])
            with cursor.copy(f"COPY {_target(table, names)} TO STDOUT") as rows:
                text = b"".join(rows).decode()
            if text:
                times = tuple(at for at, (_, kind) in enumerate(columns[table]) if kind in _TIME_TYPES)
                tables.append(SavedTable(table, names, times, tuple(text.removesuffix("\n").split("\n"))))
    return tuple(tables)


def _read_logs() -> dict[str, bytes]:
    folder = Path(settings.LOG_DIR)
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def _target(table: str, columns: tuple[str, ...]) -> str:
    quote = connection.ops.quote_name
    return f"{quote(table)} ({', '.join(map(quote, columns))})"
