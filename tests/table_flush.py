"""Empties the tables between tests by DELETE.

TRUNCATE, Django's way, makes new files for each table and index; with fifty tables of a few rows that costs more
than most tests do.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from django.db import connections
from django.db.backends.postgresql.operations import DatabaseOperations

_flush_by_truncate = DatabaseOperations.sql_flush


@cache
def _may_skip_triggers(alias: str) -> bool:
    """Only a superuser may; foreign keys, and rows that are kept for ever, are the business of triggers."""
    with connections[alias].cursor() as cursor:
        cursor.execute("SELECT rolsuper FROM pg_roles WHERE rolname = current_user")
        return bool(cursor.fetchone()[0])


def _flush_by_delete(
    self: DatabaseOperations, style: Any, tables: Sequence[str], *, reset_sequences: bool = False, **rest: Any
) -> list[str]:
    if reset_sequences or not tables or not _may_skip_triggers(self.connection.alias):
        truncations = _flush_by_truncate(self, style, tables, reset_sequences=reset_sequences, **rest)
        audit = "ALTER TABLE portal_auditentry {} TRIGGER USER"
        return [audit.format("DISABLE"), *truncations, audit.format("ENABLE")]
    deletions = [f"DELETE FROM {self.quote_name(table)}" for table in tables]
    return ["; ".join(["SET LOCAL session_replication_role = replica", *deletions])]


def flush_by_delete() -> None:
    """From here on, in this process."""
    DatabaseOperations.sql_flush = _flush_by_delete  # type: ignore[method-assign]
