"""Valkey for those who can do without its answer: each wait has an end, and silence is not waited for again."""

from __future__ import annotations

from functools import cache

import redis
from django.conf import settings
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as Broken
from redis.exceptions import TimeoutError as NoAnswer
from redis.retry import Retry

from portal.circuit_breaker import CircuitBreaker

VALKEY_BREAKER = CircuitBreaker(5.0)
"""Valkey was silent just now: those who would ask it at every step (news, notes, rates) do without."""


@cache
def valkey_client(timeout_s: float) -> redis.Redis:
    """A client, shared by all threads, that gives up after ``within_s`` without an answer.

    A connection that broke meanwhile is opened anew once, without waiting.
    """
    again = Retry(NoBackoff(), 1, supported_errors=(Broken,))
    return redis.Redis.from_url(
        settings.REDIS_URL, socket_timeout=timeout_s, socket_connect_timeout=timeout_s, retry=again
    )


def record_valkey_error(error: BaseException) -> None:
    """Begins the pause when nothing was answered in time. Who is refused knows at once, and may ask again."""
    if isinstance(error, NoAnswer | TimeoutError):
        VALKEY_BREAKER.trip()
