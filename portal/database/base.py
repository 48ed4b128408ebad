"""Connections that give up on a database which is there and says nothing (Django asks for a module of this name).

A process that is stopped, or a host that is gone behind an open connection, answers neither yes nor no; libpq
waits for ever on a unix socket, and for the kernel's minutes on TCP. PostgreSQL itself ends a statement after
`statement_timeout`, so whoever hears nothing for longer than that hears nothing at all.
"""

from __future__ import annotations

import time
from typing import Any

import psycopg
from django.db.backends.postgresql import base as postgresql
from django.db.backends.postgresql.psycopg_any import IsolationLevel

SILENCE_S = 12.0
"""Longer than `statement_timeout` in the settings."""
AVOID_S = 2.0
"""So long nobody knocks again at a database that was silent: one request waits, the others are told at once."""
_WAIT_INTERVAL_S = 0.1


class ImpatientConnection(psycopg.Connection[Any]):
    """A connection that closes itself when nothing was heard for ``SILENCE_S``; what it asked may have been done."""

    def wait(self, gen: Any, interval: float = _WAIT_INTERVAL_S, timeout: float | None = None) -> Any:
        """What the server answers. Raises OperationalError when it does not."""
        if timeout is not None:
            return super().wait(gen, interval, timeout)
        try:
            return super().wait(gen, interval, SILENCE_S)
        except psycopg.errors._WaitTimeout as silence:
            self.pgconn.finish()  # what it had not committed ends with the connection
            _Silence.until_s = time.monotonic() + AVOID_S
            raise psycopg.OperationalError(
                f"the database has said nothing for {SILENCE_S:.0f} s"
            ) from silence


class _Silence:
    until_s = 0.0


class DatabaseWrapper(postgresql.DatabaseWrapper):
    """Django's backend with such connections."""

    def get_new_connection(self, conn_params: dict[str, Any]) -> Any:
        """A connection, or OperationalError within `connect_timeout`."""
        if time.monotonic() < _Silence.until_s:
            raise psycopg.OperationalError("the database did not answer a moment ago")
        self.isolation_level = IsolationLevel.READ_COMMITTED
        try:
            return ImpatientConnection.connect(**conn_params)
        except psycopg.errors.ConnectionTimeout:
            _Silence.until_s = time.monotonic() + AVOID_S
            raise
