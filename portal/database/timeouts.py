"""Connections with a time limit for databases that accept a query and never answer.

A stopped process, or a host that is lost behind an open connection, sends no error; libpq waits forever on a
unix socket, and for minutes on TCP. PostgreSQL ends a statement after `statement_timeout`, so a longer
silence means that no answer will come.
"""

from __future__ import annotations

import select
import weakref
from typing import Any

import psycopg

from portal.circuit_breaker import CircuitBreaker

SERVER_TIMEOUT_S = 12.0
"""Longer than `statement_timeout` in the settings."""
DATABASE_BREAKER = CircuitBreaker(2.0)
"""After a timeout, requests within this time fail at once instead of waiting too."""
_WAIT_INTERVAL_S = 0.1


class TimeoutConnection(psycopg.Connection[Any]):
    """A connection that closes itself after ``SERVER_TIMEOUT_S`` without an answer.

    Its last statement may have been executed.
    """

    finalizer: weakref.finalize[Any, Any] | None = None
    """Set while ``portal.database.connection_pool`` has it checked out, in the process ``pool_id``."""
    pool_id = 0
    target: tuple[str, ...] = ()
    """The server, database and role that it was opened for."""
    timed_out = False
    _timeout_s: float | None = None

    def wait(self, gen: Any, interval: float = _WAIT_INTERVAL_S, timeout: float | None = None) -> Any:
        """Return the server's answer. Raise OperationalError after the time limit."""
        if timeout is not None:
            return super().wait(gen, interval, timeout)
        patience_s = self._timeout_s or SERVER_TIMEOUT_S
        try:
            return super().wait(gen, interval, patience_s)
        except psycopg.errors._WaitTimeout as error:
            self.pgconn.finish()  # the server rolls back on disconnect
            self.timed_out = True
            DATABASE_BREAKER.trip()
            raise psycopg.OperationalError(
                f"the database has not responded for {patience_s:.0f} s"
            ) from error

    def wait_longer(self, timeout_s: float) -> None:
        """Wait this long for each further answer, such as to a statement that removes many tables."""
        self._timeout_s = timeout_s

    def has_input(self) -> bool:
        """Return True if its socket can be read although no answer is due: the server closed it, or sent a notice."""
        poll = select.poll()
        poll.register(self.pgconn.socket, select.POLLIN)
        return bool(poll.poll(0))

    def ping(self, timeout_s: float) -> None:
        """Return when the server has answered.

        Raise OperationalError if it has gone or does not answer in time.
        """
        self._timeout_s = timeout_s
        try:
            self.execute("")
        finally:
            self._timeout_s = None


def raise_if_breaker_open() -> None:
    """Raise OperationalError if the database has just timed out."""
    if DATABASE_BREAKER:
        raise psycopg.OperationalError("the database did not respond a moment ago")
