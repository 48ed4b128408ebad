"""Distributes messages within a process: each is received once, encoded once, and buffered per browser."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any
from weakref import WeakKeyDictionary

from channels.layers import get_channel_layer
from redis.exceptions import RedisError

from portal.live.subscribed_topics import RENEW_INTERVAL_S, mark_subscribed
from portal.live_events import channel_group

log = logging.getLogger(__name__)

SEND_BUFFER_FRAMES = 64
IDLE_TIMEOUT_S = 10.0
RETRY_S = 1.0
PROBE_INTERVAL_S = 0.1


class SendBuffer:
    """Frames that wait for one browser.

    A newer sample of a topic replaces an older one; a full buffer drops its oldest frame, so a slow browser
    needs bounded memory and delays no other.
    """

    __slots__ = ("_frames", "_sequence", "_waiter", "dropped")

    def __init__(self) -> None:
        self._frames: OrderedDict[str | int, str] = OrderedDict()
        self._sequence = 0
        self._waiter: asyncio.Future[None] | None = None
        self.dropped = 0

    def put(self, text: str, *, replaces: str = "") -> None:
        """Add a frame; with ``replaces``, a topic, it replaces the waiting frame of that topic."""
        self._sequence += 1
        if replaces and replaces in self._frames:
            del self._frames[replaces]
        self._frames[replaces or self._sequence] = text
        if len(self._frames) > SEND_BUFFER_FRAMES:
            self._frames.popitem(last=False)
            self.dropped += 1
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def get(self) -> str:
        while not self._frames:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return self._frames.popitem(last=False)[1]


class Hub:
    """One channel of this process on the layer, joined to a group while a browser here watches its topic."""

    def __init__(self) -> None:
        self._subscribers: dict[str, set[SendBuffer]] = {}
        self._joined: set[str] = set()
        self._joins = 0
        # topic -> number of its join, time of the last probe
        self._unconfirmed: dict[str, tuple[int, float]] = {}
        self._progress = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()

    def subscribe(self, topic: str, buffer: SendBuffer) -> None:
        """Put frames of the topic into the buffer from now on."""
        self._subscribers.setdefault(topic, set()).add(buffer)
        self._changed.set()
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._run())

    def unsubscribe(self, topic: str, buffer: SendBuffer) -> None:
        watchers = self._subscribers.get(topic)
        if watchers is not None:
            watchers.discard(buffer)
            if not watchers:
                del self._subscribers[topic]
                self._changed.set()
                self._signal_progress()

    async def wait_subscribed(self, topics: Iterable[str]) -> None:
        """Wait until frames of these topics arrive here, except topics that lost their last subscriber."""
        wanted = list(topics)
        while any(each in self._subscribers and not self._is_confirmed(each) for each in wanted):
            await self._progress.wait()

    def _is_confirmed(self, topic: str) -> bool:
        return topic in self._joined and topic not in self._unconfirmed

    def _signal_progress(self) -> None:
        self._progress.set()
        self._progress = asyncio.Event()

    # -- one task per process --------------------------------------------------------------------------

    async def _run(self) -> None:
        """Receive until there were no subscribers for a while. Retry each second without Valkey."""
        while True:
            try:
                await self._receive()
                if not self._subscribers:
                    return
            except (RedisError, OSError, TimeoutError) as error:
                log.warning("live frames are interrupted: %s", error)
                await asyncio.sleep(RETRY_S)

    async def _receive(self) -> None:
        layer = get_channel_layer()
        channel = await layer.new_channel("live")
        joiner = asyncio.create_task(self._maintain_groups(layer, channel))
        receiver = asyncio.create_task(self._dispatch(layer, channel))
        try:
            done, _ = await asyncio.wait({joiner, receiver}, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            joiner.cancel()
            receiver.cancel()
            await asyncio.gather(joiner, receiver, return_exceptions=True)
            self._joined.clear()
            self._unconfirmed.clear()

    async def _dispatch(self, layer: Any, channel: str) -> None:
        while True:
            message = await layer.receive(channel)
            if message.get("channel") is None:
                self._deliver(message)
            elif message["channel"] == channel:
                self._on_probe(message["probe_topic"], message["join"])

    async def _maintain_groups(self, layer: Any, channel: str) -> None:
        """Keep the joined groups equal to the subscribed topics; end when there are none for a while."""
        marked_s = 0.0
        while True:
            self._changed.clear()
            wanted = set(self._subscribers)
            # before the subscription is confirmed, since senders skip unmarked topics
            renewed = time.monotonic() - marked_s >= RENEW_INTERVAL_S
            await asyncio.to_thread(mark_subscribed, wanted if renewed else wanted - self._joined)
            marked_s = time.monotonic() if renewed else marked_s
            for topic in wanted - self._joined:
                await layer.group_add(channel_group(topic), channel)
                self._joined.add(topic)
                self._joins += 1
                self._unconfirmed[topic] = (self._joins, 0.0)
            for topic in self._joined - wanted:
                await layer.group_discard(channel_group(topic), channel)
                self._joined.discard(topic)
                self._unconfirmed.pop(topic, None)
            self._signal_progress()
            await self._probe_groups(layer, channel)
            limit_s = RENEW_INTERVAL_S if self._subscribers else IDLE_TIMEOUT_S
            if self._unconfirmed:
                limit_s = PROBE_INTERVAL_S
            try:
                await asyncio.wait_for(self._changed.wait(), limit_s)
            except TimeoutError:
                if not self._subscribers:
                    return

    async def _probe_groups(self, layer: Any, channel: str) -> None:
        """Send a probe to each group just joined.

        The layer does not wait for the server when it joins; only a received probe proves that messages of
        others arrive.
        """
        now = time.monotonic()
        for topic, (join, sent) in list(self._unconfirmed.items()):
            if now - sent < PROBE_INTERVAL_S or self._unconfirmed.get(topic) != (join, sent):
                continue
            self._unconfirmed[topic] = (join, now)
            proof = {
                "type": "fairway.frame",
                "topic": "",
                "channel": channel,
                "probe_topic": topic,
                "join": join,
            }
            await layer.group_send(channel_group(topic), proof)

    def _on_probe(self, topic: str, join: int) -> None:
        if self._unconfirmed.get(topic, (0, 0.0))[0] == join:
            del self._unconfirmed[topic]
            self._signal_progress()

    def _deliver(self, message: dict[str, Any]) -> None:
        topic = message.get("topic", "")
        watchers = self._subscribers.get(topic)
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
    """Return the hub of this process (of this event loop)."""
    loop = asyncio.get_running_loop()
    found = _hubs.get(loop)
    if found is None:
        found = _hubs[loop] = Hub()
    return found
