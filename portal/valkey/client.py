"""Valkey client for callers that can continue without an answer: time limits and a circuit breaker."""

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
"""Open after a timeout: frequent callers (events, announcements, rate limits) skip Valkey."""


@cache
def valkey_client(timeout_s: float) -> redis.Redis:
    """Return a client, shared by all threads, with a time limit of ``timeout_s`` for each answer.

    A broken connection is reopened once, without delay.
    """
    again = Retry(NoBackoff(), 1, supported_errors=(Broken,))
    return redis.Redis.from_url(
        settings.REDIS_URL, socket_timeout=timeout_s, socket_connect_timeout=timeout_s, retry=again
    )


def record_valkey_error(error: BaseException) -> None:
    """Trip the breaker if the error is a timeout. A refused connection fails at once and may be retried."""
    if isinstance(error, NoAnswer | TimeoutError):
        VALKEY_BREAKER.trip()
