"""Leaves a server alone for a while that said nothing: one waits for it, the others go on without it at once."""

from __future__ import annotations

import time


class CircuitBreaker:
    """The pause after a server gave no answer; one for each server, in each process. ``lasts_s``: how long."""

    def __init__(self, lasts_s: float) -> None:
        self.open_for_s = lasts_s
        self._until_s = 0.0

    def trip(self) -> None:
        """The server was silent just now."""
        self._until_s = time.monotonic() + self.open_for_s

    def __bool__(self) -> bool:
        """True while the server is to be left alone."""
        return time.monotonic() < self._until_s
