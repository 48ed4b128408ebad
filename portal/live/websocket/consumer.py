"""The WebSocket of a browser, ``/live/``: it subscribes to permitted topics and receives their frames.

From the browser: ``{"subscribe": [topic, ...]}`` and ``{"unsubscribe": [topic, ...]}``. With ``subscribe``
may come ``"since"``, the time of the page's data in milliseconds since 1970. To the browser: ``{"topic",
"data"}``, or ``{"topic", "error": {"code", "message"}}`` for a topic that is refused or lost; and
``{"subscribed": [topic, ...]}`` once frames of requested topics do arrive, without refused topics. Before it
comes ``{"topic", "data": {"kind": "missed"}}`` for each topic with an announcement after ``since``. Close
codes: 4401 signed out, 4403 foreign origin, 4429 too many requests, 1013 try again later.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from django.conf import settings
from django.db import Error as DatabaseError
from django.http import parse_cookie

from portal.access import AccessPolicy, access_policy
from portal.errors import FairwayError
from portal.live.websocket.hub import SendBuffer, hub
from portal.live.websocket.permission_recheck import (
    CLOSE_SIGNED_OUT,
    CLOSE_TRY_AGAIN_LATER,
    permission_rechecker,
    run_query,
)
from portal.live.websocket.topics import Topic, check_topic_access, initial_frame, parse_topic
from portal.models import User
from portal.services.accounts.sessions import session_id, session_user
from portal.valkey import topic_times

log = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 8 * 1024
MAX_TOPICS = 64
MAX_MESSAGES = 30
MAX_TOPIC_REQUESTS = 256
"""Topics requested within the same time: each costs a database query, also when refused."""
MESSAGE_WINDOW_S = 10.0
MAX_SOCKETS_PER_USER = 40
VALID_SINCE_MS = range(10**12, 10**13)
"""The years 2001 to 2286, which excludes seconds and invalid values."""
CLOSE_FOREIGN_ORIGIN, CLOSE_TOO_MANY_REQUESTS = 4403, 4429

_open_sockets: Counter[int] = Counter()


@access_policy(AccessPolicy.SIGNED_IN)
class LiveConsumer:
    """Serve one socket. Permissions are checked on each subscribe, and again soon after they changed."""

    @classmethod
    async def serve(cls, scope: Any, receive: Any, send: Any) -> None:
        if (await receive())["type"] != "websocket.connect":
            return
        if _header(scope, b"origin") != settings.PORTAL_URL.rstrip("/"):
            await _reject(send, CLOSE_FOREIGN_ORIGIN)
            return
        session_key = session_id(_session_key(scope))
        try:
            user = await run_query(session_user, session_key) if session_key else None
        except (DatabaseError, TimeoutError, OSError):
            await _reject(send, CLOSE_TRY_AGAIN_LATER)
            return
        if user is None:
            await _reject(send, CLOSE_SIGNED_OUT)
            return
        if _open_sockets[user.pk] >= MAX_SOCKETS_PER_USER:
            await _reject(send, CLOSE_TOO_MANY_REQUESTS)
            return
        _open_sockets[user.pk] += 1
        consumer = cls(user, session_key, receive, send)
        try:
            await send({"type": "websocket.accept"})
            await consumer.run()
        finally:
            consumer.unsubscribe_all()
            _open_sockets[user.pk] -= 1
            if not _open_sockets[user.pk]:
                del _open_sockets[user.pk]

    def __init__(self, user: User, session_key: str, receive: Any, send: Any) -> None:
        self.user, self.session_key = user, session_key
        self._receive, self._send = receive, send
        self._send_buffer = SendBuffer()
        self._topics: dict[str, Topic] = {}
        # requested name -> since when events may have been missed
        self._unconfirmed: dict[str, int | None] = {}
        self._subscribe_requested = asyncio.Event()
        self._close_code: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def run(self) -> None:
        """Run until the browser disconnects or loses its permission."""
        listening = asyncio.create_task(self._receive_messages())
        reporting = asyncio.create_task(self._send_frames())
        answering = asyncio.create_task(self._confirm_subscriptions())
        permission_rechecker().add(self)
        try:
            waiting: list[asyncio.Future[Any]] = [listening, reporting, answering, self._close_code]
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            code = _close_code(done)
        finally:
            permission_rechecker().remove(self)
            for task in (listening, reporting, answering):
                task.cancel()
            await asyncio.gather(listening, reporting, answering, return_exceptions=True)
        if code is not None:
            with contextlib.suppress(RuntimeError, OSError):  # the browser may have disconnected
                await self._send({"type": "websocket.close", "code": code})

    def unsubscribe_all(self) -> None:
        for topic in list(self._topics.values()):
            self._unsubscribe(topic)

    # -- from the browser --------------------------------------------------------------------------

    async def _receive_messages(self) -> int | None:
        heard: list[tuple[float, int]] = []
        while True:
            message = await self._receive()
            if message["type"] == "websocket.disconnect":
                return None
            now = time.monotonic()
            words = message.get("text") or ""
            if len(words) > MAX_MESSAGE_BYTES:
                return CLOSE_TOO_MANY_REQUESTS
            wanted = _parse_message(words)
            names = len(wanted.subscribe) + len(wanted.unsubscribe) if wanted else 0
            heard = [each for each in heard if now - each[0] < MESSAGE_WINDOW_S] + [(now, names)]
            if len(heard) > MAX_MESSAGES or sum(count for _, count in heard) > MAX_TOPIC_REQUESTS:
                return CLOSE_TOO_MANY_REQUESTS
            if wanted is None:
                self._send_error("", "bad_message", "This message is not valid.")
                continue
            for name in wanted.unsubscribe:
                topic = self._topics.get(name)
                if topic is not None:
                    self._unsubscribe(topic)
            for name in wanted.subscribe:
                since_ms = None if name in self._topics else wanted.since
                await self._subscribe(name)
                if name in self._topics:
                    self._unconfirmed.setdefault(name, since_ms)
            if wanted.subscribe:
                self._subscribe_requested.set()

    async def _subscribe(self, name: str) -> None:
        if name in self._topics:
            return
        if len(self._topics) >= MAX_TOPICS:
            self._send_error(name, "too_many_topics", f"At most {MAX_TOPICS} topics at a time.")
            return
        try:
            topic = parse_topic(name, self.user)
            await run_query(check_topic_access, self.user, topic)
            # Joined before the first frame is built: events in between arrive twice rather than never.
            self._topics[name] = topic
            hub().subscribe(topic.name, self._send_buffer)
            first = await run_query(initial_frame, self.user, topic)
        except FairwayError as error:
            self._send_error(name, error.code, error.message)
            return
        except (DatabaseError, TimeoutError, OSError):
            self._send_error(name, "unavailable", "The database does not respond; try again in a moment.")
            return
        if first is not None:
            self._send_buffer.put(
                json.dumps({"topic": topic.name, "data": first}, separators=(",", ":"), default=str)
            )

    async def _confirm_subscriptions(self) -> None:
        """Confirm subscriptions, after missed announcements.

        In a task of its own: without Valkey nothing is confirmed, and the browser may still disconnect.
        """
        while True:
            await self._subscribe_requested.wait()
            self._subscribe_requested.clear()
            asked, self._unconfirmed = self._unconfirmed, {}
            await hub().wait_subscribed([topic.name for topic in self._still_subscribed(asked)])
            since_ms = {
                topic.name: since
                for topic in self._still_subscribed(asked)
                if topic.kind != "logs"
                # the first frame of a log contains its tail
                and (since := asked[topic.requested_name]) is not None
            }
            missed = await asyncio.to_thread(topic_times.announced_since, since_ms) if since_ms else set()
            here = self._still_subscribed(asked)
            for name in missed & {topic.name for topic in here}:
                self._send_buffer.put(f'{{"topic":{json.dumps(name)},"data":{{"kind":"missed"}}}}')
            self._send_buffer.put(json.dumps({"subscribed": [topic.requested_name for topic in here]}))

    def _still_subscribed(self, asked: Iterable[str]) -> list[Topic]:
        return [self._topics[name] for name in asked if name in self._topics]

    # -- to the browser ----------------------------------------------------------------------------

    async def _send_frames(self) -> None:
        outbox, send = self._send_buffer, self._send
        while True:
            text = await outbox.get()
            await send({"type": "websocket.send", "text": text})

    def _send_error(self, topic: str, code: str, message: str) -> None:
        self._send_buffer.put(json.dumps({"topic": topic, "error": {"code": code, "message": message}}))

    # -- permissions ----------------------------------------------------------------------------------

    def close(self, code: int) -> None:
        if not self._close_code.done():
            self._close_code.set_result(code)

    async def recheck_topics(self) -> None:
        """Check every topic again, and unsubscribe those that are lost."""
        try:
            user, lost = await run_query(self._find_lost_topics)
        except (DatabaseError, TimeoutError, OSError):
            return  # the next check repeats this: the permission version still differs
        if user is None:
            self.close(CLOSE_SIGNED_OUT)
            return
        self.user = user
        for topic, refusal in lost:
            self._unsubscribe(topic)
            self._send_error(topic.requested_name, refusal.code, refusal.message)

    def _find_lost_topics(self) -> tuple[User | None, list[tuple[Topic, FairwayError]]]:
        user = session_user(self.session_key)
        if user is None or user.pk != self.user.pk:
            return None, []
        lost = []
        for topic in list(self._topics.values()):
            try:
                check_topic_access(user, topic)
            except FairwayError as error:
                lost.append((topic, error))
        return user, lost

    def _unsubscribe(self, topic: Topic) -> None:
        self._unconfirmed.pop(topic.requested_name, None)
        if self._topics.pop(topic.requested_name, None) is not None and not any(
            other.name == topic.name for other in self._topics.values()
        ):
            hub().unsubscribe(topic.name, self._send_buffer)


def _close_code(done: Iterable[asyncio.Future[Any]]) -> int | None:
    """Return the close code of what ended first; None if the browser has disconnected."""
    for ended in done:
        problem = ended.exception()
        if problem is None:
            if ended.result() is not None:
                return int(ended.result())
        elif not isinstance(problem, OSError):
            log.error("a live socket failed", exc_info=problem)
            return CLOSE_TRY_AGAIN_LATER
    return None


@dataclass(frozen=True)
class ClientMessage:
    subscribe: list[str] = field(default_factory=list)
    unsubscribe: list[str] = field(default_factory=list)
    since: int | None = None


def _parse_message(words: str) -> ClientMessage | None:
    """Return the message, or None if it is malformed."""
    try:
        message = json.loads(words)
    except (ValueError, RecursionError):
        return None
    if not isinstance(message, dict) or set(message) - {"subscribe", "unsubscribe", "since"}:
        return None
    if "since" in message and not (
        "subscribe" in message and type(message["since"]) is int and message["since"] in VALID_SINCE_MS
    ):
        return None
    for names in (message.get("subscribe", []), message.get("unsubscribe", [])):
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            return None
    return ClientMessage(**message)


def _header(scope: Any, wanted: bytes) -> str:
    values = [value for name, value in scope["headers"] if name == wanted]
    return values[0].decode("latin-1") if len(values) == 1 else ""


def _session_key(scope: Any) -> str:
    crumbs = "; ".join(value.decode("latin-1") for name, value in scope["headers"] if name == b"cookie")
    return parse_cookie(crumbs).get(settings.SESSION_COOKIE_NAME, "")


async def _reject(send: Any, code: int) -> None:
    """Accept and close: browsers cannot read the status of a refused handshake, but a close code."""
    await send({"type": "websocket.accept"})
    await send({"type": "websocket.close", "code": code})


WEBSOCKET_ROUTES = {"/live/": LiveConsumer}
"""Path to consumer. Each consumer declares its access policy, as each HTTP route does."""


async def websocket_app(scope: Any, receive: Any, send: Any) -> None:
    consumer = WEBSOCKET_ROUTES.get(scope["path"])
    if consumer is not None:
        await consumer.serve(scope, receive, send)
        return
    if (await receive())["type"] == "websocket.connect":
        await send({"type": "websocket.close", "code": 4404})
