"""Remembers in Valkey for two minutes when each topic was last announced.

A page that was drawn before its subscription stood asks here what it did not hear.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping

from redis.exceptions import RedisError

from portal.valkey.client import record_valkey_error, valkey_client

log = logging.getLogger(__name__)

TTL_S = 120
CLOCK_TOLERANCE_MS = 1000
"""Clocks of several processes, and the moment between an announcement's note and its sending."""
VALKEY_TIMEOUT_S = 1.0


def now_ms() -> int:
    """This server's clock: milliseconds since 1970."""
    return time.time_ns() // 1_000_000


def mark_announced(topics: Iterable[str]) -> None:
    """Notes that ``topics`` are being announced now. Never raises: without it a page learns of them later."""
    try:
        with valkey_client(VALKEY_TIMEOUT_S).pipeline(transaction=False) as notes:
            for topic in topics:
                notes.set(_key(topic), now_ms(), ex=TTL_S)
            notes.execute()
    except (RedisError, OSError) as problem:
        record_valkey_error(problem)
        log.warning("the time of news is not noted: %s", problem)


def announced_since(since_ms: Mapping[str, int]) -> set[str]:
    """Those of the topics announced at or after their time (milliseconds since 1970), in one round trip.

    Where nobody can know, as before the notes began or without Valkey, a topic counts as missed.
    """
    if not since_ms:
        return set()
    known_from_ms = now_ms() - TTL_S * 1000 + CLOCK_TOLERANCE_MS
    try:
        found = valkey_client(VALKEY_TIMEOUT_S).mget([_key(topic) for topic in since_ms])
    except (RedisError, OSError) as problem:
        log.warning("what was missed is not known, so everything is: %s", problem)
        return set(since_ms)
    return {
        topic
        for (topic, since), told in zip(since_ms.items(), found, strict=True)
        if since - CLOCK_TOLERANCE_MS < known_from_ms
        or (told is not None and int(told) >= since - CLOCK_TOLERANCE_MS)
    }


def _key(topic: str) -> str:
    return f"fw.announced.{topic}"
