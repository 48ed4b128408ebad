"""Tells open pages that something moved: after commit, to a Channels group; a lost message costs a minute at most.

Whoever has a page open sees what was announced at once, and looks again about once a minute whatever was told.

The time is noted first, for pages whose subscription does not stand yet (`portal.valkey.announcements`).

Topics hold public ids only: ``job.<id>``, ``user.<id>``, ``project.<id>``, ``node.<id>``, ``cluster``.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

from channels.layers import get_channel_layer
from redis.exceptions import RedisError

from portal.background_loop import run_in_background_loop
from portal.on_commit import send_after_commit
from portal.valkey import announcements
from portal.valkey.client import VALKEY_BREAKER, record_valkey_error

log = logging.getLogger(__name__)

SEND_TIMEOUT_S = 1.0
"""The channel layer itself waits for ever: its sockets may be idle."""
SEND_ALL_TIMEOUT_S = 3.0
"""So long at most may the news of one transaction take."""

TopicEvent = tuple[str, dict[str, Any]]
"""A topic, and what is told to those who watch it."""


def channel_group(topic: str) -> str:
    """The Channels group of a topic."""
    return f"fw.{topic}"


def publish_on_commit(topic: str, data: dict[str, Any]) -> None:
    """Sends ``data`` to everyone who watches ``topic`` once the current transaction has committed."""
    publish_all_on_commit([(topic, data)])


def publish_all_on_commit(events: Sequence[TopicEvent]) -> None:
    """The same for several news; all of a transaction share a connection and a round trip for their notes."""
    send_after_commit(publish, events)


def publish(events: Sequence[TopicEvent]) -> None:
    """Sends at once. Valkey may be away or silent: pages poll as well, so this only leaves a log line."""
    if get_channel_layer() is None:
        return
    topics = list(dict.fromkeys(topic for topic, _ in events))
    if not VALKEY_BREAKER:
        announcements.mark_announced(
            topics
        )  # before it is sent: who joined too late to hear it finds the note
    if VALKEY_BREAKER:
        log.debug("open pages were not told of %s: Valkey was silent a moment ago", topics)
        return
    try:
        run_in_background_loop(_send(events))
    except (OSError, RedisError, RuntimeError, ValueError) as problem:
        record_valkey_error(problem)
        log.warning("open pages were not told of %s: %s", ", ".join(topics[:5]), problem or "no answer")


async def _send(news: Sequence[TopicEvent]) -> None:
    async with asyncio.timeout(SEND_ALL_TIMEOUT_S):
        for topic, data in news:
            await send_frame(topic, {"data": data})


async def send_frame(topic: str, frame: dict[str, Any]) -> None:
    """Sends ``frame`` to everyone who watches ``topic``. Raises TimeoutError, OSError or RedisError."""
    layer: Any = get_channel_layer()
    async with asyncio.timeout(SEND_TIMEOUT_S):
        await layer.group_send(channel_group(topic), {"type": "fairway.frame", "topic": topic, **frame})
