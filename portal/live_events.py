"""Publishes events to open pages after commit, through a Channels group.

A lost message delays a page by about a minute, because pages also poll. The time of each announcement is
stored first, for pages that have not subscribed yet (``portal.valkey.topic_times``).

Topics contain public ids only: ``job.<id>``, ``user.<id>``, ``inbox.<user id>``, ``project.<id>``,
``node.<id>``, ``cluster``.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from channels.layers import get_channel_layer
from redis.exceptions import RedisError

from portal.on_commit import send_after_commit
from portal.valkey import topic_times
from portal.valkey.client import VALKEY_BREAKER, record_valkey_error

_Result = TypeVar("_Result")

log = logging.getLogger(__name__)

SEND_TIMEOUT_S = 1.0
"""The channel layer itself has no timeout, because its sockets may be idle."""
SEND_ALL_TIMEOUT_S = 3.0
"""Time limit for all events of one transaction."""

TopicEvent = tuple[str, dict[str, Any]]
"""A topic, and the data for its subscribers."""


def channel_group(topic: str) -> str:
    return f"fw.{topic}"


def publish_on_commit(topic: str, data: dict[str, Any]) -> None:
    """Send ``data`` to all subscribers of ``topic`` after the current transaction commits."""
    publish_all_on_commit([(topic, data)])


def publish_all_on_commit(events: Sequence[TopicEvent]) -> None:
    """Send several events after commit; all events of a transaction share one connection."""
    send_after_commit(publish, events)


def publish(events: Sequence[TopicEvent]) -> None:
    """Send now. Failures of Valkey are only logged, because pages also poll."""
    if get_channel_layer() is None:
        return
    topics = list(dict.fromkeys(topic for topic, _ in events))
    if not VALKEY_BREAKER:
        topic_times.mark_announced(topics)  # before sending: pages that subscribe too late find this entry
    if VALKEY_BREAKER:
        log.debug("event of %s was not published: Valkey is unavailable", topics)
        return
    try:
        _run_in_background_loop(_send(events))
    except (OSError, RedisError, RuntimeError, ValueError) as error:
        record_valkey_error(error)
        log.warning("events of %s were not published: %s", ", ".join(topics[:5]), error or "no response")


async def _send(news: Sequence[TopicEvent]) -> None:
    async with asyncio.timeout(SEND_ALL_TIMEOUT_S):
        for topic, data in news:
            await send_frame(topic, {"data": data})


async def send_frame(topic: str, frame: dict[str, Any]) -> None:
    """Send ``frame`` to all subscribers of ``topic``. Raise TimeoutError, OSError or RedisError."""
    layer: Any = get_channel_layer()
    async with asyncio.timeout(SEND_TIMEOUT_S):
        await layer.group_send(channel_group(topic), {"type": "fairway.frame", "topic": topic, **frame})


# -- an event loop in a background thread, which keeps the connections of synchronous callers open -----------

_lock = threading.Lock()
_loops: dict[int, asyncio.AbstractEventLoop] = {}
"""By process id: a fork copies the loop but not the thread that runs it."""


def _run_in_background_loop(coroutine: Coroutine[Any, Any, _Result]) -> _Result:
    """Run the coroutine in the background loop and return its result. Not for callers in an event loop."""
    return asyncio.run_coroutine_threadsafe(coroutine, _background_loop()).result()


def _background_loop() -> asyncio.AbstractEventLoop:
    with _lock:
        loop = _loops.get(os.getpid())
        if loop is None:
            loop = _loops[os.getpid()] = asyncio.new_event_loop()
            threading.Thread(target=loop.run_forever, name="own-loop", daemon=True).start()
        return loop
