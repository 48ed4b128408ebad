"""Watchdog thread that closes connections that are silent or exceed the time limit of a step."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Iterator
from typing import Protocol

CHECK_INTERVAL_S = 0.5


class WatchedConnection(Protocol):
    """A supervised connection; no method blocks."""

    def inactive_s(self) -> float:
        """Return the seconds since the last received data."""

    def abort(self, reason: str) -> None:
        """Close the connection for all waiting threads; idempotent."""


class Watchdog:
    """Supervises connections for silence, and single steps for their time limit.

    A time limit inside a client library releases only its own caller; closing the connection releases all.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inactivity_timeouts_s: dict[WatchedConnection, float] = {}
        self._deadlines: dict[int, tuple[float, WatchedConnection, str]] = {}
        self._numbers = itertools.count()
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None

    def watch(self, connection: WatchedConnection, inactivity_timeout_s: float) -> None:
        """Close the connection when it is silent for ``inactivity_timeout_s``."""
        with self._lock:
            self._inactivity_timeouts_s[connection] = inactivity_timeout_s
        self._ensure_running()

    def unwatch(self, connection: WatchedConnection) -> None:
        with self._lock:
            self._inactivity_timeouts_s.pop(connection, None)

    @contextlib.contextmanager
    def deadline(self, connection: WatchedConnection, timeout_s: float, step: str) -> Iterator[None]:
        """Close the connection when the block takes longer than ``timeout_s``."""
        number = next(self._numbers)
        with self._lock:
            self._deadlines[number] = (time.monotonic() + timeout_s, connection, step)
        self._ensure_running()
        try:
            yield
        finally:
            with self._lock:
                self._deadlines.pop(number, None)

    def _ensure_running(self) -> None:
        with self._lock:
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="ssh-watchdog", daemon=True)
                self._thread.start()
        self._wake.set()

    def _run(self) -> None:
        while True:
            time.sleep(CHECK_INTERVAL_S)
            now_s = time.monotonic()
            with self._lock:
                idle = not self._inactivity_timeouts_s and not self._deadlines
                silences = list(self._inactivity_timeouts_s.items())
                late = [entry for entry in self._deadlines.values() if entry[0] < now_s]
            for _, connection, step in late:
                connection.abort(f"{step} took too long")
            for connection, limit_s in silences:
                if connection.inactive_s() > limit_s:
                    self.unwatch(connection)
                    connection.abort(f"nothing was received for {limit_s:.0f} s")
            if idle:
                self._wake.clear()
                self._wake.wait()


WATCHDOG = Watchdog()
