"""Limits the requests that the web process works on at once; the others wait, or are refused before any work."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar

from django.db import connection

from portal.database.pool_middleware import release_connection

log = logging.getLogger(__name__)

WAIT_S = 3.0
"""A request waits for this long at most: it then has 5 of the 8 s of a request left (`portal.request_timeout`)."""
MAX_WAITING = 500
"""Their bodies are kept in memory or in temporary files."""
MAX_PAUSED = 200
"""Requests that wait for other processes without a slot, each in a thread; further ones keep their slot."""
LOG_PERIOD_S = 10.0


class Admission:
    """``slots`` requests are worked on at once; up to ``MAX_WAITING`` others wait, in the order of their arrival.

    Only for the thread of the event loop.
    """

    def __init__(self, slots: int) -> None:
        self._slots = asyncio.Semaphore(slots)
        self._waiting = 0
        self._refused = 0
        self._logged_s = float("-inf")
        self.paused = 0

    async def acquire(self) -> bool:
        """Wait for a slot. Return False if none becomes free in time; after True, call ``release``."""
        if self._waiting >= MAX_WAITING or not await self._wait():
            return self._refuse()
        return True

    async def reacquire(self) -> bool:
        """Wait for a slot again; a request that has begun is never refused."""
        return await self._wait()

    def release(self) -> None:
        self._slots.release()

    async def _wait(self) -> bool:
        self._waiting += 1
        try:
            async with asyncio.timeout(WAIT_S):
                await self._slots.acquire()
        except TimeoutError:
            return False
        finally:
            self._waiting -= 1
        return True

    def _refuse(self) -> bool:
        self._refused += 1
        now_s = time.monotonic()
        if now_s - self._logged_s >= LOG_PERIOD_S:
            log.warning(
                "too many requests: %d were refused before any work, %d wait", self._refused, self._waiting
            )
            self._refused, self._logged_s = 0, now_s
        return False


class Slot:
    """The slot of one request. Its methods run in the event loop, except ``paused``."""

    def __init__(self, admission: Admission) -> None:
        self._admission, self._loop = admission, asyncio.get_running_loop()
        self._held = self._is_paused = self._over = False

    async def acquire(self) -> bool:
        """Return False if no slot becomes free in time."""
        self._held = await self._admission.acquire()
        return self._held

    def release(self) -> None:
        """Release the slot for good: the response has started, or the application has ended."""
        self._over = True
        self._release_held()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Release the slot while the block waits, in the request's thread; then wait at most ``WAIT_S`` for one."""
        self._loop.call_soon_threadsafe(self._pause)
        try:
            yield
        finally:
            resumed = asyncio.run_coroutine_threadsafe(self._resume(), self._loop)
            with suppress(TimeoutError):  # the process ends
                resumed.result(WAIT_S + 1)

    def _release_held(self) -> None:
        if self._held:
            self._held = False
            self._admission.release()

    def _release_if_over(self) -> None:
        if self._over:
            self._release_held()

    def _pause(self) -> None:
        if self._held and self._admission.paused < MAX_PAUSED:
            self._admission.paused += 1
            self._is_paused = True
            self._release_held()

    async def _resume(self) -> None:
        if not self._is_paused:
            return
        self._is_paused = False
        self._admission.paused -= 1
        if self._over:
            return
        self._held = await self._admission.reacquire()
        self._release_if_over()


_current_slot: ContextVar[Slot | None] = ContextVar("slot of this request", default=None)


def set_slot(slot: Slot | None) -> None:
    """Declare the slot of the requests that are begun in this context."""
    _current_slot.set(slot)


@contextmanager
def waiting_for_others() -> Iterator[None]:
    """Use neither a slot nor a connection to the database while the block waits for another process or machine.

    Else a few requests that wait for a worker, a node or the tracking server, whatever is wrong with it, would
    keep all pages waiting. Changes nothing inside a transaction, and in processes without slots.
    """
    slot = _current_slot.get()
    if slot is None or connection.in_atomic_block:
        yield
        return
    release_connection()
    with slot.paused():
        yield
