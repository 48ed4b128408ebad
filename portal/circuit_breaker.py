"""A circuit breaker: after a server timed out, callers skip it for a short time instead of waiting again."""

from __future__ import annotations

import time


class CircuitBreaker:
    """The breaker of one server in this process. It stays open for ``open_for_s`` seconds."""

    def __init__(self, lasts_s: float) -> None:
        self.open_for_s = lasts_s
        self._until_s = 0.0

    def trip(self) -> None:
        self._until_s = time.monotonic() + self.open_for_s

    def __bool__(self) -> bool:
        """Return True while the breaker is open."""
        return time.monotonic() < self._until_s
