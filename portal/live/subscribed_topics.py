"""Topics that browsers watch now; data of others is neither written nor sent.

Stored as a sorted set in Valkey: topics with the expiry of their mark. Every process that serves browsers
renews its own marks; those of a dead process expire.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from portal.valkey.client import valkey_client

KEY = "fairway:subscribed-topics"
MARK_TTL_S = 30.0
RENEW_INTERVAL_S = 10.0
TIMEOUT_S = 2.0


def mark_subscribed(topics: Iterable[str]) -> None:
    """Mark these topics as watched for the next ``MARK_TTL_S``. Raise RedisError."""
    until_s = time.time() + MARK_TTL_S
    marks = dict.fromkeys(topics, until_s)
    if marks:
        valkey_client(TIMEOUT_S).zadd(KEY, marks)


def subscribed_topics() -> frozenset[str]:
    """Return the topics whose marks have not expired. Raise RedisError."""
    with valkey_client(TIMEOUT_S).pipeline(transaction=False) as pipe:
        pipe.zremrangebyscore(KEY, "-inf", time.time())
        pipe.zrange(KEY, 0, -1)
        _, topics = pipe.execute()
    return frozenset(topic.decode() for topic in topics)
