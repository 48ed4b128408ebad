"""Rate limits per user, token or address, counted in Redis for all processes.

Without Redis each process counts for itself, so a limit is never lifted by an outage.
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
"""All tokens and sessions of a user together may use this many times the limit of one.

A runaway script leaves room for its owner's browser, and more tokens do not raise the limit.
"""

REQUESTS = RateLimit("anything", 1200, 60)
ANONYMOUS_REQUESTS = RateLimit("anonymous", 120, 60)
JOB_SUBMITS = RateLimit("submit", 240, 60)
START_ALTERNATIVES = RateLimit("alternatives", 60, 60)
"""Each request makes several previews."""
TOKEN_CREATIONS = RateLimit("tokens", 20, 60)
SIGN_IN = RateLimit("sign_in", 5, 300)
"""Failed sign-ins for one name from one address."""
SIGN_IN_ADDRESS = RateLimit("sign_in_address", 50, 300)
"""Failed sign-ins for any name from one address: password spraying."""
SIGN_IN_NAME = RateLimit("sign_in_name", 100, 3600)
"""Failed sign-ins for one name from any address; browsers that signed in as that user before do not count."""
INVALID_TOKENS = RateLimit("bad_tokens", 60, 60)


def shared_by_user(rate: RateLimit) -> RateLimit:
    """Return the limit that all tokens and sessions of a user share."""
    return RateLimit(f"{rate.name}_of_a_person", rate.limit * USER_LIMIT_FACTOR, rate.period_s)


def rate_limit_address(address: str) -> str:
    """Return the address to count by: the /64 of an IPv6 address, since one machine can use all of it."""
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
    """Count one request. Return 0 if it is within the limit, else the seconds until the next window."""
    now_s = time.time()
    window = int(now_s // rate.period_s)
    name = f"{PREFIX}:{rate.name}:{key}:{window}"
    count = _increment(name, rate.period_s)
    return 0.0 if count <= rate.limit else (window + 1) * rate.period_s - now_s


def refund(rate: RateLimit, key: str) -> None:
    """Undo the last ``consume``, for example after a successful sign-in."""
    _increment(f"{PREFIX}:{rate.name}:{key}:{int(time.time() // rate.period_s)}", rate.period_s, -1)


def _increment(name: str, period_s: int, delta: int = 1) -> int:
    """Return the count of all processes, or of this process while Redis does not answer.

    The local count is always kept, so that an outage does not start from zero.
    """
    here = _increment_locally(name, delta)
    if not VALKEY_BREAKER:
        try:
            pipe = valkey_client(REDIS_TIMEOUT_S).pipeline(transaction=False)
            pipe.incrby(name, delta)
            pipe.expire(name, period_s + 1)
            return max(here, int(pipe.execute()[0]))
        except (RedisError, OSError) as error:
            log.warning("rate limits are counted per process for now: %s", error)
            record_valkey_error(error)
    return here


_local_counts: dict[str, int] = {}
_local_lock = threading.Lock()


def _increment_locally(name: str, delta: int) -> int:
    with _local_lock:
        if len(_local_counts) > 10_000:
            _local_counts.clear()
        _local_counts[name] = _local_counts.get(name, 0) + delta
        return _local_counts[name]
