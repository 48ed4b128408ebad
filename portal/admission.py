"""Limits the requests that the web process works on at once; the others wait, or are refused before any work."""

from __future__ import annotations

import asyncio
import logging
import time

log = logging.getLogger(__name__)

WAIT_S = 3.0
"""A request waits for this long at most: it then has 5 of the 8 s of a request left (`portal.request_timeout`)."""
MAX_WAITING = 500
"""Their bodies are kept in memory or in temporary files."""
LOG_PERIOD_S = 10.0


class Admission:
    """``slots`` requests are worked on at once; up to ``MAX_WAITING`` others wait, in the order of their arrival."""

    def __init__(self, slots: int) -> None:
        self._slots = asyncio.Semaphore(slots)
        self._waiting = 0
        self._refused = 0
        self._logged_s = float("-inf")

    async def acquire(self) -> bool:
        """Wait for a slot. Return False if none becomes free in time; after True, call ``release``."""
        if self._waiting >= MAX_WAITING:
            return self._refuse()
        self._waiting += 1
        try:
            async with asyncio.timeout(WAIT_S):
                await self._slots.acquire()
        except TimeoutError:
            return self._refuse()
        finally:
            self._waiting -= 1
        return True

    def release(self) -> None:
        self._slots.release()

    def _refuse(self) -> bool:
        self._refused += 1
        now_s = time.monotonic()
        if now_s - self._logged_s >= LOG_PERIOD_S:
            log.warning(
                "too many requests: %d were refused before any work, %d wait", self._refused, self._waiting
            )
            self._refused, self._logged_s = 0, now_s
        return False
