"""Counts requests per person, token or address, so that nobody can flood a door; kept in Redis for all.

Without Redis each process counts for itself: a limit is never lifted because something is down.
"""

from __future__ import annotations

import ipaddress
import logging
import threading
import time
from dataclasses import dataclass

from redis.exceptions import RedisError

from portal.valkey.client import VALKEY_BREAKER, record_valkey_error, valkey_client

log = logging.getLogger(__name__)

PREFIX = "fairway:rate"
REDIS_TIMEOUT_S = 1.0


@dataclass(frozen=True)
class RateLimit:
    """At most ``limit`` in each window of ``period_s`` seconds."""

    name: str
    limit: int
    period_s: int


USER_LIMIT_FACTOR = 2
"""All tokens and sessions of a person together may do so many times what one of them may: a script that runs wild
leaves room for its owner's browser, and more tokens do not give more."""

REQUESTS = RateLimit("anything", 1200, 60)
ANONYMOUS_REQUESTS = RateLimit("anonymous", 120, 60)
JOB_SUBMITS = RateLimit("submit", 240, 60)
TOKEN_CREATIONS = RateLimit("tokens", 20, 60)
SIGN_IN = RateLimit("sign_in", 5, 300)
"""Wrong tries at one name from one address."""
SIGN_IN_ADDRESS = RateLimit("sign_in_address", 50, 300)
"""Wrong tries at any name from one address: guessing one password for everybody."""
SIGN_IN_NAME = RateLimit("sign_in_name", 100, 3600)
"""Wrong tries at one name from anywhere; a browser that has signed in as that person before is not counted."""
INVALID_TOKENS = RateLimit("bad_tokens", 60, 60)


def shared_by_user(rate: RateLimit) -> RateLimit:
    """The rate that all tokens and sessions of a person share."""
    return RateLimit(f"{rate.name}_of_a_person", rate.limit * USER_LIMIT_FACTOR, rate.period_s)


def rate_limit_address(address: str) -> str:
    """What an address counts as: for IPv6 its /64, since one machine has as many addresses there as it likes."""
    try:
        known = ipaddress.ip_address(address)
    except ValueError:
        return address or "unknown"
    if isinstance(known, ipaddress.IPv4Address):
        return str(known)
    if known.ipv4_mapped:
        return str(known.ipv4_mapped)
    return str(ipaddress.ip_network((int(known), 64), strict=False))


def consume(rate: RateLimit, key: str) -> float:
    """Counts one; 0 when it is within the rate, else the seconds until the next window."""
    now_s = time.time()
    window = int(now_s // rate.period_s)
    name = f"{PREFIX}:{rate.name}:{key}:{window}"
    count = _increment(name, rate.period_s)
    return 0.0 if count <= rate.limit else (window + 1) * rate.period_s - now_s


def refund(rate: RateLimit, key: str) -> None:
    """Takes back what was just counted: the try was a good one."""
    _increment(f"{PREFIX}:{rate.name}:{key}:{int(time.time() // rate.period_s)}", rate.period_s, -1)


def _increment(name: str, period_s: int, delta: int = 1) -> int:
    """What all processes counted, or this one alone while Redis is away: it counts always, to know the half."""
    here = _LocalCounter.increment(name, delta)
    if not VALKEY_BREAKER:
        try:
            pipe = valkey_client(REDIS_TIMEOUT_S).pipeline(transaction=False)
            pipe.incrby(name, delta)
            pipe.expire(name, period_s + 1)
            return max(here, int(pipe.execute()[0]))
        except (RedisError, OSError) as problem:
            log.warning("rates are counted in this process for now: %s", problem)
            record_valkey_error(problem)
    return here


class _LocalCounter:
    """Counts of this process, which are all there is while Redis does not answer."""

    counts: dict[str, int] = {}
    lock = threading.Lock()

    @classmethod
    def increment(cls, name: str, delta: int) -> int:
        with cls.lock:
            if len(cls.counts) > 10_000:
                cls.counts.clear()
            cls.counts[name] = cls.counts.get(name, 0) + delta
            return cls.counts[name]
