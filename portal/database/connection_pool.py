"""A bounded pool of connections, shared by the threads of one process.

Under ASGI every request has its own thread, so Django's persistent connections, which belong to a thread, are
never reused; worker-nodes has a thread per node. Both use the pool; all other processes open connections as
usual. See docs/decisions/connection-pool.md.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from queue import Empty, SimpleQueue

import psycopg
from psycopg.pq import TransactionStatus

from portal.database.timeouts import TimeoutConnection

CHECKOUT_TIMEOUT_S = 3.0
"""Default wait for a connection while all are in use."""
PING_TIMEOUT_S = 3.0
"""Time limit for the check that a server answers; with the wait before it, below the request limit of 8 s."""
CHECK_AFTER_S = 0.1
"""A connection that was returned more recently is checked only if its socket has input, as after its end."""
IDLE_TIMEOUT_S = 300.0
"""Connections idle for longer are closed when another one is returned."""


class PoolFullError(psycopg.OperationalError):
    """All connections were in use for the whole wait; nothing was sent to the database."""


class ConnectionPool:
    """At most ``size`` connections, last in, first out."""

    def __init__(self, size: int, wait_s: float = CHECKOUT_TIMEOUT_S) -> None:
        self.size, self.wait_s = size, wait_s
        self._start()
        os.register_at_fork(after_in_child=self._start)

    def _start(self) -> None:
        # A forked child drops its parent's connections without closing them: the sockets belong to the
        # parent, and psycopg does not close connections that another process opened.
        self._idle: deque[tuple[float, TimeoutConnection]] = deque()
        self._lock = threading.Lock()
        # SimpleQueue, because a finalizer can run at any point and must be able to put into it.
        self._turns: SimpleQueue[None] = SimpleQueue()
        for _ in range(self.size):
            self._turns.put(None)

    def check_out(
        self, target: tuple[str, ...], connect: Callable[[], TimeoutConnection]
    ) -> TimeoutConnection:
        """Return a connection to the same database as the same role that has answered within the last 0.1 s.

        Raise PoolFullError if none is free within ``wait_s``, and OperationalError if the server does not answer
        or connecting fails.
        """
        try:
            self._turns.get(timeout=self.wait_s)
        except Empty:
            raise PoolFullError(
                f"all {self.size} connections to the database were in use for {self.wait_s:.0f} s"
            ) from None
        try:
            connection = self._take_idle(target) or connect()
        except BaseException:
            self._turns.put(None)
            raise
        # A connection that is never returned, such as by an abandoned thread, is lost, but its slot is freed.
        connection.finalizer = weakref.finalize(connection, self._turns.put, None)
        connection.pool_id, connection.target = os.getpid(), target
        return connection

    def check_in(self, connection: TimeoutConnection) -> None:
        """Keep the connection for reuse; close it if it is inside a transaction or query, or about to begin one."""
        allowed, connection.finalizer = connection.finalizer, None
        if allowed is None or allowed.detach() is None or connection.pool_id != os.getpid():
            return
        # Without autocommit, the statement that checks it later would begin a transaction.
        if connection.pgconn.transaction_status == TransactionStatus.IDLE and connection.autocommit:
            now_s = time.monotonic()
            with self._lock:
                self._idle.append((now_s, connection))
                old = [
                    self._idle.popleft()
                    for since_s, _ in list(self._idle)
                    if now_s - since_s > IDLE_TIMEOUT_S
                ]
        else:
            old = [(0.0, connection)]
        self._turns.put(None)
        for _, each in old:
            each.close()

    def close_idle(self) -> None:
        with self._lock:
            idle = list(self._idle)
            self._idle.clear()
        for _, each in idle:
            each.close()

    def _take_idle(self, target: tuple[str, ...]) -> TimeoutConnection | None:
        """Return the connection that was returned last, if it is usable."""
        with self._lock:
            if not self._idle:
                return None
            since_s, connection = self._idle.pop()
        try:
            if connection.target == target:
                if time.monotonic() - since_s > CHECK_AFTER_S or connection.has_input():
                    connection.ping(PING_TIMEOUT_S)
                return connection
            connection.close()
        except psycopg.Error:
            connection.close()
            self.close_idle()  # the others have been idle for longer
            if connection.timed_out:
                raise
        return None
