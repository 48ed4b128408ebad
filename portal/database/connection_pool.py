"""A bounded set of connections that the threads of one process take in turns, instead of opening one each.

Under ASGI every request has a thread of its own, so Django's own way to keep a connection, which is to leave it with
the thread, keeps none; and worker-nodes has a thread for each node. Both share; every other process opens its
connections as before. See docs/decisions/connection-pool.md.
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
"""For a turn, when all connections are in use, unless the process says otherwise."""
PING_TIMEOUT_S = 3.0
"""So long a server may take to say that it is there: with the wait before it less than a request's eight seconds."""
IDLE_TIMEOUT_S = 300.0
"""A connection that nobody has taken for so long is closed when another comes back."""


class ConnectionPool:
    """At most ``size`` connections; the one that came back last is given out first."""

    def __init__(self, size: int, wait_s: float = CHECKOUT_TIMEOUT_S) -> None:
        self.size, self.wait_s = size, wait_s
        self._start()
        os.register_at_fork(after_in_child=self._start)

    def _start(self) -> None:
        # A child of a fork lets go of its parent's connections without a word: the sockets are the parent's, and
        # psycopg ends none of them in a process that did not open it.
        self._idle: deque[tuple[float, TimeoutConnection]] = deque()
        self._lock = threading.Lock()
        # A queue that may be filled from a finalizer, which can come in the midst of anything.
        self._turns: SimpleQueue[None] = SimpleQueue()
        for _ in range(self.size):
            self._turns.put(None)

    def check_out(self, name: str, connect: Callable[[], TimeoutConnection]) -> TimeoutConnection:
        """A connection to the database of this name that has just answered.

        Raises OperationalError when there is no turn within ``wait_s``, no answer, or no new connection.
        """
        try:
            self._turns.get(timeout=self.wait_s)
        except Empty:
            raise psycopg.OperationalError(
                f"all {self.size} connections to the database were in use for {self.wait_s:.0f} s"
            ) from None
        try:
            connection = self._take_idle(name) or connect()
        except BaseException:
            self._turns.put(None)
            raise
        # Who forgets to give it back, such as a thread that was left behind, loses it, but not the turn.
        connection.finalizer = weakref.finalize(connection, self._turns.put, None)
        connection.pool_id = os.getpid()
        return connection

    def check_in(self, connection: TimeoutConnection) -> None:
        """Keeps it for the next; one that is in the midst of anything is closed instead."""
        lent, connection.finalizer = connection.finalizer, None
        if lent is None or lent.detach() is None or connection.pool_id != os.getpid():
            return
        if connection.pgconn.transaction_status == TransactionStatus.IDLE:
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
        """Closes what nobody uses."""
        with self._lock:
            idle = list(self._idle)
            self._idle.clear()
        for _, each in idle:
            each.close()

    def checked_out_count(self) -> int:
        """Connections that are given out at the moment."""
        return self.size - self._turns.qsize()

    def idle_count(self) -> int:
        """Connections that wait for a request."""
        return len(self._idle)

    def _take_idle(self, name: str) -> TimeoutConnection | None:
        """The one that came back last, if it answers."""
        with self._lock:
            if not self._idle:
                return None
            _, connection = self._idle.pop()
        try:
            if connection.info.dbname == name:
                connection.ping(PING_TIMEOUT_S)
                return connection
            connection.close()
        except psycopg.Error:
            connection.close()
            self.close_idle()  # they heard from the server before this one did
            if connection.timed_out:
                raise
        return None
