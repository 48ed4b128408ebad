"""Which topics some browser watches at this moment: what nobody watches is neither written nor sent.

A sorted set in Valkey: topics, each with the time until which the mark holds. Every process that serves browsers
renews the marks of its own; one that dies leaves marks that run out.
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
    """Says that these topics are watched for the next ``LIFE_S``. Raises RedisError."""
    until_s = time.time() + MARK_TTL_S
    marks = dict.fromkeys(topics, until_s)
    if marks:
        valkey_client(TIMEOUT_S).zadd(KEY, marks)


def subscribed_topics() -> frozenset[str]:
    """The topics whose marks hold. Raises RedisError."""
    with valkey_client(TIMEOUT_S).pipeline(transaction=False) as pipe:
        pipe.zremrangebyscore(KEY, "-inf", time.time())
        pipe.zrange(KEY, 0, -1)
        _, topics = pipe.execute()
    return frozenset(topic.decode() for topic in topics)
