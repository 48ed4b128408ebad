"""Thread pool of an actor that runs at most one piece of work per key at a time."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable

from django.db import connection

MAX_THREADS = 4


class KeyedPool:
    """A small thread pool, so that one slow call to a node does not delay the others."""

    def __init__(
        self, name: str, on_error: Callable[[BaseException], None], on_done: Callable[[], None]
    ) -> None:
        self._name = name
        self._on_error = on_error
        self._on_done = on_done
        self._work: queue.SimpleQueue[tuple[object, Callable[[], None]] | None] = queue.SimpleQueue()
        self._busy: set[object] = set()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()

    def submit(self, key: object, work: Callable[[], None]) -> None:
        """Start ``work`` unless work with the same key is running or queued."""
        with self._lock:
            if key in self._busy:
                return
            self._busy.add(key)
            if len(self._threads) < min(len(self._busy), MAX_THREADS):
                thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._threads.append(thread)
                thread.start()
        self._work.put((key, work))

    def shut_down(self, within_s: float = 2.0) -> None:
        """Accept no more work; wait up to ``within_s`` for running work."""
        for _ in self._threads:
            self._work.put(None)
        deadline_s = time.monotonic() + within_s
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))

    def _run(self) -> None:
        while (item := self._work.get()) is not None:
            key, work = item
            try:
                work()
            except BaseException as error:  # the actor decides what to do
                self._on_error(error)
            finally:
                connection.close_if_unusable_or_obsolete()
                with self._lock:
                    self._busy.discard(key)
                self._on_done()
        connection.close()
