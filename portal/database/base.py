"""Django's PostgreSQL backend on impatient connections, shared where the process shares (Django names the module)."""

from __future__ import annotations

import time
from typing import Any

import psycopg
from django.db import DEFAULT_DB_ALIAS
from django.db.backends.postgresql import base as postgresql
from django.db.backends.postgresql.psycopg_any import IsolationLevel

from portal.database.connection_pool import ConnectionPool
from portal.database.timeouts import DATABASE_BREAKER, TimeoutConnection, raise_if_breaker_open


class DatabaseWrapper(postgresql.DatabaseWrapper):
    """One thread's connection; a lent one goes back when Django would close it, which is after each request."""

    pool: ConnectionPool | None = None
    """Of the whole process."""

    def get_new_connection(self, conn_params: dict[str, Any]) -> TimeoutConnection:
        """A connection, or OperationalError after a few seconds."""
        raise_if_breaker_open()
        self.isolation_level = IsolationLevel.READ_COMMITTED
        if self.pool is None or self.alias != DEFAULT_DB_ALIAS:
            return _connect(conn_params)
        self.close_at = time.monotonic()  # a thread keeps none from one piece of work to the next
        return self.pool.check_out(conn_params.get("dbname", ""), lambda: _connect(conn_params))

    def return_to_pool(self) -> None:
        """Gives a lent connection back before the end of its request; a transaction keeps it."""
        if _is_pooled(self.connection) and not self.in_atomic_block:
            self.close()

    def _close(self) -> None:
        if self.pool is not None and _is_pooled(self.connection):
            connection, self.connection = self.connection, None
            self.pool.check_in(connection)
        else:
            super()._close()  # type: ignore[misc]  # the stubs do not know it

    def close_pool(self) -> None:
        """Leaves nobody connected, as Django's tests ask before they drop a database."""
        if self.pool is not None:
            self.pool.close_idle()


def _is_pooled(connection: Any) -> bool:
    return connection is not None and connection.lent is not None


def _connect(conn_params: dict[str, Any]) -> TimeoutConnection:
    try:
        return TimeoutConnection.connect(**conn_params)
    except psycopg.errors.ConnectionTimeout:
        DATABASE_BREAKER.trip()
        raise
