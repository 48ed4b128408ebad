"""The mark of a restore that has not ended: until it has, no process but the restore uses the database.

A database is restored in several transactions. The first one creates a schema, the last one drops it. While the
schema exists, every new connection is refused with one sentence.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import psycopg

RESTORE_SCHEMA = "fairway_restore"
UNFINISHED_RESTORE = (
    "A restore into this database is running or was interrupted, and nothing else may use it. "
    "If none is running, run manage.py restore again: it removes what the interrupted one left."
)
_restoring = False


class UnfinishedRestore(psycopg.OperationalError):
    """The database is being restored, or was restored in part."""


@contextlib.contextmanager
def restoring() -> Iterator[None]:
    """Allow connections of this process to a database that is being restored."""
    global _restoring
    _restoring = True
    try:
        yield
    finally:
        _restoring = False


def is_restoring() -> bool:
    """Return whether this process restores the database."""
    return _restoring


def refuse_unfinished_restore(connection: psycopg.Connection[Any]) -> None:
    """Close a new connection and raise UnfinishedRestore if the database was restored in part."""
    if _restoring:
        return
    try:
        connection.autocommit = True  # begins no transaction
        row = connection.execute(f"SELECT to_regnamespace('{RESTORE_SCHEMA}') IS NOT NULL").fetchone()
        if row is not None and row[0]:
            raise UnfinishedRestore(UNFINISHED_RESTORE)
        connection.autocommit = False
    except BaseException:
        connection.close()
        raise
