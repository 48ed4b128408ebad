"""Hashes passwords with argon2id, a few at a time per process, to bound memory and CPU use of sign-ins.

Everything that hashes or checks a password holds ``hashing_slot``, which it enters before a transaction: no
connection to the database waits for a slot.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from django.contrib.auth.hashers import Argon2PasswordHasher
from django.utils.translation import gettext as _

from portal.database.pool_middleware import release_connection
from portal.errors import TooManyRequests

MAX_CONCURRENT_HASHES = 2
SLOT_TIMEOUT_S = 0.25
"""About ten hashes; requests without a slot by then are rejected, not queued."""

# Dedicated threads: malloc keeps memory per thread, and each request has a new thread.
_threads = ThreadPoolExecutor(MAX_CONCURRENT_HASHES, thread_name_prefix="hashing")
_slots = threading.BoundedSemaphore(MAX_CONCURRENT_HASHES)
_thread_state = threading.local()


@contextmanager
def hashing_slot() -> Iterator[None]:
    """Hold one of the process's hashing slots; reentrant within a thread.

    The thread's database connection is free meanwhile, unless a transaction is open. Raise TooManyRequests if all
    slots stay in use.
    """
    if getattr(_thread_state, "held", False):
        yield
        return
    release_connection()
    if not _slots.acquire(timeout=SLOT_TIMEOUT_S):
        raise TooManyRequests(_("Too many passwords are being checked at the moment. Try again in a second."))
    _thread_state.held = True
    try:
        yield
    finally:
        _thread_state.held = False
        _slots.release()


class BoundedArgon2(Argon2PasswordHasher):
    """argon2id with OWASP's 19 MiB parameters; other hashes are replaced at the next sign-in."""

    time_cost, memory_cost, parallelism = 2, 19_456, 1

    def encode(self, password: str, salt: str) -> str:
        with hashing_slot():
            release_connection()
            return str(_threads.submit(super().encode, password, salt).result())

    def verify(self, password: str, encoded: str) -> bool:
        with hashing_slot():
            release_connection()
            return bool(_threads.submit(super().verify, password, encoded).result())
