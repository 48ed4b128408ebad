"""Samples in Redis, with a time to live: what a page shows before live updates.

The last frame of each node, and each second of attempts that have not run for long.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping
from typing import Any

from redis.exceptions import RedisError

from portal.valkey.client import valkey_client

log = logging.getLogger(__name__)

TTL_S = 30
VALKEY_TIMEOUT_S = 2.0
_PREFIX = "fairway:latest:"
CLUSTER_KEY = "cluster"
SECONDS_TTL_S = 900
_SECONDS_PREFIX = "fairway:seconds:"


def frame_key(name: str) -> str:
    """Return the key of the last frame of a node (public id) or of the cluster."""
    return _PREFIX + name


def store_frames(frames: Mapping[str, str], seconds: Mapping[tuple[str, int], str]) -> None:
    """Store encoded frames by name, and a row of each attempt (job, number), in one round trip. Raise RedisError."""
    with valkey_client(VALKEY_TIMEOUT_S).pipeline(transaction=False) as pipe:
        for name, text in frames.items():
            pipe.set(frame_key(name), text, ex=TTL_S)
        for attempt, text in seconds.items():
            pipe.rpush(_seconds_key(*attempt), text)
            pipe.expire(_seconds_key(*attempt), SECONDS_TTL_S)
        pipe.execute()


def latest_frames(names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return the last frames that have not expired; empty while Redis does not answer."""
    wanted = list(names)
    if not wanted:
        return {}
    try:
        found = valkey_client(VALKEY_TIMEOUT_S).mget([frame_key(name) for name in wanted])
    except RedisError as error:
        log.warning("no last samples: %s", error)
        return {}
    texts = zip(wanted, found, strict=True)
    return {name: json.loads(text) for name, text in texts if text is not None}


def attempt_seconds(job: str, attempt: int) -> list[dict[str, Any]]:
    """Return the rows of an attempt, oldest first; empty while Redis does not answer."""
    try:
        found = valkey_client(VALKEY_TIMEOUT_S).lrange(_seconds_key(job, attempt), 0, -1)
    except RedisError as error:
        log.warning("no samples of %s: %s", job, error)
        return []
    return [json.loads(text) for text in found]


def delete_attempt_seconds(attempts: Iterable[tuple[str, int]]) -> None:
    """Delete the rows of attempts. Raise RedisError."""
    valkey_client(VALKEY_TIMEOUT_S).delete(*(_seconds_key(*attempt) for attempt in attempts))


def _seconds_key(job: str, attempt: int) -> str:
    return f"{_SECONDS_PREFIX}{job}:{attempt}"
