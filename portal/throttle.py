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

from portal.valkey import PAUSE, note_trouble, valkey

log = logging.getLogger(__name__)

PREFIX = "fairway:rate"
REDIS_TIMEOUT_S = 1.0


@dataclass(frozen=True)
class Rate:
    """At most ``limit`` in each window of ``period_s`` seconds."""

    name: str
    limit: int
    period_s: int


PERSON_TIMES = 2
"""All tokens and sessions of a person together may do so many times what one of them may: a script that runs wild
leaves room for its owner's browser, and more tokens do not give more."""

ANYTHING = Rate("anything", 1200, 60)
ANONYMOUS = Rate("anonymous", 120, 60)
SUBMIT = Rate("submit", 240, 60)
TOKENS = Rate("tokens", 20, 60)
SIGN_IN = Rate("sign_in", 5, 300)
"""Wrong tries at one name from one address."""
SIGN_IN_ADDRESS = Rate("sign_in_address", 50, 300)
"""Wrong tries at any name from one address: guessing one password for everybody."""
SIGN_IN_NAME = Rate("sign_in_name", 100, 3600)
"""Wrong tries at one name from anywhere; a browser that has signed in as that person before is not counted."""
BAD_TOKENS = Rate("bad_tokens", 60, 60)


def of_a_person(rate: Rate) -> Rate:
    """The rate that all tokens and sessions of a person share."""
    return Rate(f"{rate.name}_of_a_person", rate.limit * PERSON_TIMES, rate.period_s)


def sender(address: str) -> str:
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


def take(rate: Rate, who: str) -> float:
    """Counts one; 0 when it is within the rate, else the seconds until the next window."""
    now_s = time.time()
    window = int(now_s // rate.period_s)
    name = f"{PREFIX}:{rate.name}:{who}:{window}"
    count = _counted(name, rate.period_s)
    return 0.0 if count <= rate.limit else (window + 1) * rate.period_s - now_s


def give_back(rate: Rate, who: str) -> None:
    """Takes back what was just counted: the try was a good one."""
    _counted(f"{PREFIX}:{rate.name}:{who}:{int(time.time() // rate.period_s)}", rate.period_s, -1)


def _counted(name: str, period_s: int, step: int = 1) -> int:
    """What all processes counted, or this one alone while Redis is away: it counts always, to know the half."""
    here = _Local.count(name, step)
    if not PAUSE:
        try:
            pipe = valkey(REDIS_TIMEOUT_S).pipeline(transaction=False)
            pipe.incrby(name, step)
            pipe.expire(name, period_s + 1)
            return max(here, int(pipe.execute()[0]))
        except (RedisError, OSError) as problem:
            log.warning("rates are counted in this process for now: %s", problem)
            note_trouble(problem)
    return here


class _Local:
    """Counts of this process, which are all there is while Redis does not answer."""

    counts: dict[str, int] = {}
    lock = threading.Lock()

    @classmethod
    def count(cls, name: str, step: int) -> int:
        with cls.lock:
            if len(cls.counts) > 10_000:
                cls.counts.clear()
            cls.counts[name] = cls.counts.get(name, 0) + step
            return cls.counts[name]
