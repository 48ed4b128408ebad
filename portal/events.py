"""Tells open pages that something moved: after commit, to a Channels group; a lost message costs nothing.

The time is noted first, for pages whose subscription does not stand yet (`portal.told`).

Topics hold public ids only: ``job.<id>``, ``user.<id>``, ``project.<id>``, ``node.<id>``, ``cluster``.
"""

from __future__ import annotations

import logging
from typing import Any

from asgiref.sync import async_to_sync
from channels.layers import get_channel_layer
from django.db import transaction
from redis.exceptions import RedisError

from portal import told

log = logging.getLogger(__name__)


def group_of(topic: str) -> str:
    """The Channels group of a topic."""
    return f"fw.{topic}"


def announce(topic: str, data: dict[str, Any]) -> None:
    """Sends ``data`` to everyone who watches ``topic`` once the current transaction has committed."""
    transaction.on_commit(lambda: announce_now(topic, data))


def announce_now(topic: str, data: dict[str, Any]) -> None:
    """Sends at once. The channel layer may be away: pages poll as well, so this only leaves a log line."""
    layer = get_channel_layer()
    if layer is None:
        return
    told.note(topic)  # before it is sent: who joined too late to hear it finds the note
    try:
        async_to_sync(layer.group_send)(
            group_of(topic), {"type": "fairway.frame", "topic": topic, "data": data}
        )
    except (OSError, RedisError, RuntimeError, ValueError) as problem:
        log.warning("open pages were not told of %s: %s", topic, problem)
