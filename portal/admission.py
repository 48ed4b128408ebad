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
    """``at_once`` requests are worked on; up to ``MAX_WAITING`` others wait, first come, first served."""

    def __init__(self, at_once: int) -> None:
        self._turns = asyncio.Semaphore(at_once)
        self._waiting = 0
        self._refused = 0
        self._logged_s = float("-inf")

    async def enter(self) -> bool:
        """Wait for a turn. Return False if there is none in time; after True, call ``leave``."""
        if self._waiting >= MAX_WAITING:
            return self._refuse()
        self._waiting += 1
        try:
            async with asyncio.timeout(WAIT_S):
                await self._turns.acquire()
        except TimeoutError:
            return self._refuse()
        finally:
            self._waiting -= 1
        return True

    def leave(self) -> None:
        self._turns.release()

    def _refuse(self) -> bool:
        self._refused += 1
        now_s = time.monotonic()
        if now_s - self._logged_s >= LOG_PERIOD_S:
            log.warning(
                "too many requests: %d were refused before any work, %d wait", self._refused, self._waiting
            )
            self._refused, self._logged_s = 0, now_s
        return False
