"""Django's PostgreSQL backend with timeouts and an optional pool; Django requires the module name."""

from __future__ import annotations

import time
from typing import Any

import psycopg
from django.db import DEFAULT_DB_ALIAS
from django.db.backends.postgresql import base as postgresql
from django.db.backends.postgresql.psycopg_any import IsolationLevel

from portal.database.connection_pool import ConnectionPool
from portal.database.creation import DatabaseCreation
from portal.database.schema import SchemaEditor
from portal.database.timeouts import DATABASE_BREAKER, TimeoutConnection, raise_if_breaker_open
from portal.database.unfinished_restore import refuse_unfinished_restore


class DatabaseWrapper(postgresql.DatabaseWrapper):
    """The connection of one thread. A pooled one is returned when Django would close it."""

    SchemaEditorClass = SchemaEditor
    creation_class = DatabaseCreation
    connection_pool: ConnectionPool | None = None
    """Shared by the whole process; None: each thread opens its own connections."""

    def get_new_connection(self, conn_params: dict[str, Any]) -> TimeoutConnection:
        """Return a connection. Raise OperationalError after a few seconds without one."""
        raise_if_breaker_open()
        self.isolation_level = IsolationLevel.READ_COMMITTED
        if self.connection_pool is None or self.alias != DEFAULT_DB_ALIAS:
            return _connect(conn_params)
        self.close_at = time.monotonic()  # return the connection to the pool after each unit of work
        target = tuple(str(conn_params.get(name, "")) for name in ("host", "port", "dbname", "user"))
        return self.connection_pool.check_out(target, lambda: _connect(conn_params))

    def return_to_pool(self) -> None:
        """Return a pooled connection before the end of its request, unless a transaction is open."""
        if _is_pooled(self.connection) and not self.in_atomic_block:
            self.close()

    def _close(self) -> None:
        if self.connection_pool is not None and _is_pooled(self.connection):
            connection, self.connection = self.connection, None
            self.connection_pool.check_in(connection)
        else:
            super()._close()  # type: ignore[misc]  # the stubs do not know it

    def close_pool(self) -> None:
        """Close all idle connections, as Django's tests require before they drop a database."""
        if self.connection_pool is not None:
            self.connection_pool.close_idle()


def _is_pooled(connection: Any) -> bool:
    return connection is not None and connection.finalizer is not None


def _connect(conn_params: dict[str, Any]) -> TimeoutConnection:
    try:
        connection = TimeoutConnection.connect(**conn_params)
    except psycopg.errors.ConnectionTimeout:
        DATABASE_BREAKER.trip()
        raise
    refuse_unfinished_restore(connection)
    return connection
