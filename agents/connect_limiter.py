"""How many links one process opens at the same time, so that each of hundreds comes about within its limits.

A key exchange costs processor time here and a process there. All at once, at the start of a portal or after its
network was away, none of them would end in time, and all would begin again.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

MAX_CONNECTING = 12
MAX_RETRYING = 12
SWITCH_INTERVAL_S = 0.05
"""`sys.setswitchinterval` of a process with a thread for each node: each of those that wait for their turn wakes up
so often to ask for it, and with hundreds that was most of what the process did."""


class ConnectLimiter:
    """Turns of one process. Nodes whose last try failed wait for each other only: some of them answer nothing."""

    def __init__(self) -> None:
        self._first_attempts = threading.BoundedSemaphore(MAX_CONNECTING)
        self._retries = threading.BoundedSemaphore(MAX_RETRYING)

    @contextlib.contextmanager
    def acquire(self, *, last_attempt_failed: bool) -> Iterator[None]:
        """Waits for a turn to open a link; ``doubtful`` is a node of which the last try failed."""
        with self._retries if last_attempt_failed else self._first_attempts:
            yield
