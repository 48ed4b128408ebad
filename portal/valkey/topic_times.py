"""Stores in Valkey, for two minutes, when each topic was last announced.

A page that was rendered before it subscribed checks here for announcements that it missed.
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
"""Covers clock differences between processes, and the time between storing and sending an announcement."""
VALKEY_TIMEOUT_S = 1.0


def now_ms() -> int:
    """Return this server's clock, milliseconds since 1970."""
    return time.time_ns() // 1_000_000


def mark_announced(topics: Iterable[str]) -> None:
    """Store that ``topics`` are announced now. Never raises: pages also poll."""
    try:
        with valkey_client(VALKEY_TIMEOUT_S).pipeline(transaction=False) as notes:
            for topic in topics:
                notes.set(_key(topic), now_ms(), ex=TTL_S)
            notes.execute()
    except (RedisError, OSError) as error:
        record_valkey_error(error)
        log.warning("the time of an announcement was not stored: %s", error)


def announced_since(since_ms: Mapping[str, int]) -> set[str]:
    """Return the topics announced at or after their time (milliseconds since 1970), in one round trip.

    If this is unknown, because the time is too old or Valkey does not answer, the topic is returned too.
    """
    if not since_ms:
        return set()
    known_from_ms = now_ms() - TTL_S * 1000 + CLOCK_TOLERANCE_MS
    try:
        found = valkey_client(VALKEY_TIMEOUT_S).mget([_key(topic) for topic in since_ms])
    except (RedisError, OSError) as error:
        log.warning("missed announcements are unknown, so all topics are refreshed: %s", error)
        return set(since_ms)
    return {
        topic
        for (topic, since), reported in zip(since_ms.items(), found, strict=True)
        if since - CLOCK_TOLERANCE_MS < known_from_ms
        or (reported is not None and int(reported) >= since - CLOCK_TOLERANCE_MS)
    }


def _key(topic: str) -> str:
    return f"fw.announced.{topic}"
