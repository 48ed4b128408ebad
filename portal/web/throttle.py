"""Slows down guessing: failures are counted for a name from an address, and for an address; nobody else is locked out."""

from __future__ import annotations

import hashlib
import logging

from django.core.cache import cache
from redis.exceptions import RedisError

log = logging.getLogger(__name__)

TRIES = 5
PAUSE_S = 300
ADDRESS_TRIES = 50


def tries_left(name: str, address: str) -> int:
    """How many more failures are taken before a pause; 0 means pause now. Without Redis nobody is locked out."""
    try:
        one, all_of_address = (int(cache.get(key) or 0) for key in _keys(name, address))
    except (RedisError, OSError) as problem:
        log.warning("sign-in tries are not counted: %s", problem)
        return TRIES
    if all_of_address >= ADDRESS_TRIES:
        return 0
    return max(0, TRIES - one)


def note_failure(name: str, address: str) -> None:
    """Counts one failure; the counters vanish after the pause."""
    try:
        for key in _keys(name, address):
            cache.add(key, 0, PAUSE_S)
            try:
                cache.incr(key)
            except ValueError:  # it ran out between the two
                cache.set(key, 1, PAUSE_S)
    except (RedisError, OSError) as problem:
        log.warning("a failed sign-in was not counted: %s", problem)


def forget(name: str, address: str) -> None:
    """A success ends the count of this name from this address."""
    try:
        cache.delete(_keys(name, address)[0])
    except (RedisError, OSError) as problem:
        log.warning("sign-in tries stay counted: %s", problem)


def _keys(name: str, address: str) -> tuple[str, str]:
    one = hashlib.sha256(f"{name.lower()}\0{address}".encode()).hexdigest()[:32]
    return f"sign-in:{one}", f"sign-in-from:{address}"
