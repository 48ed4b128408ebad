"""Connections that give up on a database which is there and says nothing.

A process that is stopped, or a host that is gone behind an open connection, answers neither yes nor no; libpq
waits for ever on a unix socket, and for the kernel's minutes on TCP. PostgreSQL itself ends a statement after
`statement_timeout`, so whoever hears nothing for longer than that hears nothing at all.
"""

from __future__ import annotations

import weakref
from typing import Any

import psycopg

from portal.circuit_breaker import CircuitBreaker

SERVER_TIMEOUT_S = 12.0
"""Longer than `statement_timeout` in the settings."""
DATABASE_BREAKER = CircuitBreaker(2.0)
"""So long nobody knocks again at a database that was silent: one request waits, the others are told at once."""
_WAIT_INTERVAL_S = 0.1


class TimeoutConnection(psycopg.Connection[Any]):
    """A connection that closes itself when nothing was heard for ``SILENCE_S``; what it asked may have been done."""

    finalizer: weakref.finalize[Any, Any] | None = None
    """Set while it is given out by ``portal.database.connection_pool``, in the process ``lent_by``."""
    pool_id = 0
    timed_out = False
    _timeout_s: float | None = None

    def wait(self, gen: Any, interval: float = _WAIT_INTERVAL_S, timeout: float | None = None) -> Any:
        """What the server answers. Raises OperationalError when it does not."""
        if timeout is not None:
            return super().wait(gen, interval, timeout)
        patience_s = self._timeout_s or SERVER_TIMEOUT_S
        try:
            return super().wait(gen, interval, patience_s)
        except psycopg.errors._WaitTimeout as silence:
            self.pgconn.finish()  # what it had not committed ends with the connection
            self.timed_out = True
            DATABASE_BREAKER.trip()
            raise psycopg.OperationalError(
                f"the database has said nothing for {patience_s:.0f} s"
            ) from silence

    def ping(self, timeout_s: float) -> None:
        """Returns when the server has answered. Raises OperationalError when it has gone, or is silent."""
        self._timeout_s = timeout_s
        try:
            self.execute("")
        finally:
            self._timeout_s = None


def raise_if_breaker_open() -> None:
    """Raises OperationalError when the database was silent a moment ago."""
    if DATABASE_BREAKER:
        raise psycopg.OperationalError("the database did not answer a moment ago")
