"""Limits how many connections one process opens at the same time, so that each completes within its time
limit.

Every key exchange costs CPU time on both sides. Opened all at once, after a start or a network outage,
hundreds of connections would all time out and be retried.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

MAX_CONNECTING = 12
MAX_RETRYING = 12
SWITCH_INTERVAL_S = 0.05
"""``sys.setswitchinterval`` of a process with a thread per node. Waiting threads request the GIL once per
interval; with hundreds of threads the default interval used most of the CPU time.
"""


class ConnectLimiter:
    """Connection slots of one process. Retries have their own, because failed nodes may never answer."""

    def __init__(self) -> None:
        self._first_attempts = threading.BoundedSemaphore(MAX_CONNECTING)
        self._retries = threading.BoundedSemaphore(MAX_RETRYING)

    @contextlib.contextmanager
    def acquire(self, *, last_attempt_failed: bool) -> Iterator[None]:
        """Hold a connection slot; ``last_attempt_failed`` takes one of those for retries."""
        with self._retries if last_attempt_failed else self._first_attempts:
            yield
