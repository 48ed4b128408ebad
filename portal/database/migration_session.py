"""The database session of a migration: patient with large tables, brief where other processes wait for its locks."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

from django.db import DEFAULT_DB_ALIAS, OperationalError, connections
from psycopg import errors

STATEMENT_LIMIT_S = 3_600
LOCK_WAIT_S = 2
"""Others that want the table queue behind a waiting migration, so it gives up before their requests do."""
ATTEMPTS = 20
PAUSE_S = 1.0
"""Between two attempts, in which those that queued go on."""
_RETRIED = (errors.LockNotAvailable, errors.DeadlockDetected)


def retry_for_locks(migrate: Callable[[], object]) -> None:
    """Call `migrate` until it gets its locks, for about a minute; each of its migrations is one transaction.

    Processes of the release before may use the tables meanwhile. Raise OperationalError.
    """
    for remaining in reversed(range(ATTEMPTS)):
        try:
            with _migration_limits():
                migrate()
            return
        except OperationalError as error:
            if not remaining or not isinstance(error.__cause__, _RETRIED):
                raise
        time.sleep(PAUSE_S)


@contextlib.contextmanager
def _migration_limits() -> Iterator[None]:
    """Replace the limits of requests, which would end a statement on a large table after 10 s."""
    wrapper = connections[DEFAULT_DB_ALIAS]
    wrapper.ensure_connection()
    wrapper.connection.wait_longer(STATEMENT_LIMIT_S)
    with wrapper.cursor() as cursor:
        cursor.execute(f"SET statement_timeout = '{STATEMENT_LIMIT_S}s'")
        cursor.execute(f"SET lock_timeout = '{LOCK_WAIT_S}s'")
        cursor.execute("SET idle_in_transaction_session_timeout = 0")
    try:
        yield
    finally:
        wrapper.close()  # the next connection has the usual limits
        wrapper.close_pool()  # type: ignore[attr-defined]  # the stubs do not know it
