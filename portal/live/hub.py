"""Fans messages out inside one process: each arrives once, is encoded once, and goes to everybody's outbox."""

from __future__ import annotations

import asyncio
import json
import logging
from collections import OrderedDict
from typing import Any
from weakref import WeakKeyDictionary

from channels.layers import get_channel_layer
from redis.exceptions import RedisError

from portal.events import group_of

log = logging.getLogger(__name__)

OUTBOX_FRAMES = 64
LEAVE_AFTER_S = 10.0
RETRY_S = 1.0


class Outbox:
    """What waits for one browser. A newer sample of a topic takes the place of an older one; when it is full
    the oldest goes, so a slow browser costs a bounded amount and delays nobody."""

    __slots__ = ("_frames", "_number", "_waiter", "dropped")

    def __init__(self) -> None:
        self._frames: OrderedDict[str | int, str] = OrderedDict()
        self._number = 0
        self._waiter: asyncio.Future[None] | None = None
        self.dropped = 0

    def put(self, text: str, *, replaces: str = "") -> None:
        """Adds a frame; one that ``replaces`` a topic takes the place of the one of that topic which waits."""
        self._number += 1
        if replaces and replaces in self._frames:
            del self._frames[replaces]
        self._frames[replaces or self._number] = text
        if len(self._frames) > OUTBOX_FRAMES:
            self._frames.popitem(last=False)
            self.dropped += 1
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def get(self) -> str:
        """The oldest frame; waits for one."""
        while not self._frames:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return self._frames.popitem(last=False)[1]


class Hub:
    """One channel of this process on the layer, joined to a group while anybody here watches its topic."""

    def __init__(self) -> None:
        self._watchers: dict[str, set[Outbox]] = {}
        self._joined: set[str] = set()
        self._task: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()

    def watch(self, topic: str, outbox: Outbox) -> None:
        """From now on frames of the topic go to the outbox."""
        self._watchers.setdefault(topic, set()).add(outbox)
        self._changed.set()
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._run())

    def leave(self, topic: str, outbox: Outbox) -> None:
        """No more frames of the topic for this outbox."""
        watchers = self._watchers.get(topic)
        if watchers is not None:
            watchers.discard(outbox)
            if not watchers:
                del self._watchers[topic]
                self._changed.set()

    # -- one task a process ------------------------------------------------------------------------

    async def _run(self) -> None:
        """Receives until nobody has watched anything for a while. Redis away: tries again each second."""
        while True:
            try:
                await self._receive()
                return
            except (RedisError, OSError, TimeoutError) as problem:
                log.warning("live frames pause: %s", problem)
                self._joined.clear()
                await asyncio.sleep(RETRY_S)

    async def _receive(self) -> None:
        layer = get_channel_layer()
        channel = await layer.new_channel("live")
        joiner = asyncio.create_task(self._keep_joined(layer, channel))
        receiver = asyncio.create_task(self._pass_on(layer, channel))
        try:
            done, _ = await asyncio.wait({joiner, receiver}, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            joiner.cancel()
            receiver.cancel()
            await asyncio.gather(joiner, receiver, return_exceptions=True)
            self._joined.clear()

    async def _pass_on(self, layer: Any, channel: str) -> None:
        while True:
            self._deliver(await layer.receive(channel))

    async def _keep_joined(self, layer: Any, channel: str) -> None:
        """Keeps the groups joined equal to the topics watched; ends when there are none for a while."""
        while True:
            self._changed.clear()
            wanted = set(self._watchers)
            for topic in wanted - self._joined:
                await layer.group_add(group_of(topic), channel)
                self._joined.add(topic)
            for topic in self._joined - wanted:
                await layer.group_discard(group_of(topic), channel)
                self._joined.discard(topic)
            try:
                await asyncio.wait_for(self._changed.wait(), None if self._watchers else LEAVE_AFTER_S)
            except TimeoutError:
                return

    def _deliver(self, message: dict[str, Any]) -> None:
        topic = message.get("topic", "")
        watchers = self._watchers.get(topic)
        if not watchers:
            return
        data = message.get("text")
        sample = data is not None and not topic.startswith("logs.")
        if data is None:
            data = json.dumps(message.get("data"), separators=(",", ":"), default=str)
        text = f'{{"topic":{json.dumps(topic)},"data":{data}}}'
        for outbox in watchers:
            outbox.put(text, replaces=topic if sample else "")


_hubs: WeakKeyDictionary[asyncio.AbstractEventLoop, Hub] = WeakKeyDictionary()


def hub() -> Hub:
    """The hub of this process (of this event loop)."""
    loop = asyncio.get_running_loop()
    found = _hubs.get(loop)
    if found is None:
        found = _hubs[loop] = Hub()
    return found
