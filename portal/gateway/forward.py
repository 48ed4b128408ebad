"""Carries one HTTP request upstream and its answer back, streaming both ways."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from portal.gateway.client import BrokenOff, Connection, NoAnswer, Way
from portal.gateway.guard import Guard, Hold
from portal.gateway.wire import Gone, Headers, Receive, Scope, Send, Silent, TooLarge

LONG_AFTER_S = 1.0
"""From here on a request is watched: for a browser that left, and for a right that ended."""
LOOK_EVERY_S = 0.25
BODY_SILENT_S = 30.0
"""Where an answer has its time, the body has this between two pieces: each one that waits holds a connection."""
_REPEATABLE = frozenset({"GET", "HEAD", "OPTIONS"})


@dataclass(frozen=True, slots=True)
class Journey:
    """Where a request goes, with which headers, and what becomes of the headers of the answer."""

    way: Way
    headers: Headers
    answer_headers: Callable[[Iterable[tuple[bytes, bytes]]], Headers]
    answer_within_s: float | None = None
    body_bytes: int | None = None
    """The longest body; it is counted as it passes, whatever the request says of itself. None: no end."""
    hold: Hold | None = None
    guard: Guard | None = None


def request_head(scope: Scope, headers: Headers, *, more: Headers | None = None) -> bytes:
    """The head of the request upstream: the browser's path and query byte for byte, and our headers."""
    query = scope["query_string"]
    parts = [scope["method"].encode("ascii"), b" ", scope["raw_path"]]
    if query:
        parts += (b"?", query)
    parts.append(b" HTTP/1.1\r\n")
    for name, value in headers:
        parts += (name, b": ", value, b"\r\n")
    for name, value in more or ():
        parts += (name, b": ", value, b"\r\n")
    parts.append(b"\r\n")
    return b"".join(parts)


async def forward(journey: Journey, scope: Scope, receive: Receive, send: Send) -> None:
    """Answers the request from upstream. Raises NoAnswer, TooLarge or Silent while the browser can still be told so.

    An answer that breaks off upstream breaks off here too: it never looks whole.
    """
    method = scope["method"]
    length = chunked = False
    for name, value in scope["headers"]:
        if name == b"content-length":
            length = True
            if journey.body_bytes is not None and int(value) > journey.body_bytes:
                raise TooLarge
        elif name == b"transfer-encoding":
            chunked = True
    body = Body(receive, chunked=chunked, whole=not (length or chunked), most_bytes=journey.body_bytes)
    if body.whole:
        await receive()  # the empty body; what follows can only be the end of the connection
    head = request_head(
        scope, journey.headers, more=[(b"transfer-encoding", b"chunked")] if chunked else None
    )
    watch = Watch(journey, body)
    try:
        await _exchange(journey, head, method, body, watch, send)
    except asyncio.CancelledError:
        if not watch.why:
            raise
        task = asyncio.current_task()
        if task is not None:
            task.uncancel()
        if not watch.answered and watch.why == "silent":
            raise Silent from None
        if not watch.answered and watch.why != "gone":
            raise NoAnswer(watch.why) from None
    except (Gone, BrokenOff):
        pass  # the server sees an answer without its end, and closes the connection
    finally:
        watch.stop()


async def _exchange(journey: Journey, head: bytes, method: str, body: Body, watch: Watch, send: Send) -> None:
    connection = await journey.way.connection()
    sending: asyncio.Task[None] | None = None
    kept = False
    try:
        while True:
            connection.begin(head, head_request=method == "HEAD")
            if not body.whole:
                sending = asyncio.create_task(body.send_to(connection))
            try:
                await connection.head()
                break
            except NoAnswer:
                if sending is not None and sending.done() and not sending.cancelled():
                    sending.result()  # raises Gone when it was the browser that left, or TooLarge
                if sending is not None or method not in _REPEATABLE or connection.used == 1:
                    raise
                # The server had closed a connection that waited, just as we used it.
                connection = await journey.way.connection(fresh=True)
        watch.answered = True
        headers = journey.answer_headers(connection.headers)
        if connection.status in (204, 304):
            headers = [pair for pair in headers if pair[0] != b"content-length"]
        await send({"type": "http.response.start", "status": connection.status, "headers": headers})
        while True:
            chunk = await connection.read()
            end = connection.at_end
            await send({"type": "http.response.body", "body": chunk, "more_body": not end})
            if end:
                break
        if sending is None or sending.done():
            journey.way.give_back(connection)
            kept = True
    finally:
        if sending is not None and not sending.done():
            sending.cancel()
            with contextlib.suppress(asyncio.CancelledError, Gone, TooLarge, OSError):
                await sending
        elif sending is not None and not sending.cancelled():
            sending.exception()  # known: the answer has broken off, or was given before the body's end
        if not kept:
            connection.close()


class Body:
    """The request's body as it arrives."""

    __slots__ = ("_chunked", "_left_bytes", "_receive", "last_s", "whole")

    def __init__(self, receive: Receive, *, chunked: bool, whole: bool, most_bytes: int | None) -> None:
        self._receive, self._chunked, self._left_bytes = receive, chunked, most_bytes
        self.whole = whole
        self.last_s = 0.0

    async def send_to(self, connection: Connection) -> None:
        """Sends it on as it comes. Raises Gone when the browser leaves, or TooLarge, and closes the connection."""
        loop = asyncio.get_running_loop()
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                connection.close()
                raise Gone
            self.last_s = loop.time()
            data = message.get("body", b"")
            if self._left_bytes is not None:
                self._left_bytes -= len(data)
                if self._left_bytes < 0:
                    connection.close()
                    raise TooLarge
            if data:
                connection.write(b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else bytes(data))
            if not message.get("more_body", False):
                if self._chunked:
                    connection.write(b"0\r\n\r\n")
                self.whole = True
                return
            with contextlib.suppress(ConnectionError):
                await connection.drain()  # upstream may answer before it has read all

    async def until_gone(self) -> None:
        """Returns when the browser has left; only to be awaited once the body is whole."""
        while (await self._receive())["type"] != "http.disconnect":
            pass


class Watch:
    """Cancels a long request when its browser leaves, its right ends, or no answer begins in time."""

    __slots__ = ("_began", "_body", "_journey", "_loop", "_main", "_task", "_timer", "answered", "why")

    def __init__(self, journey: Journey, body: Body) -> None:
        self._journey, self._body = journey, body
        self._loop = asyncio.get_running_loop()
        self._main = asyncio.current_task()
        self._timer = self._loop.call_later(LONG_AFTER_S, self._begin)
        self._task: asyncio.Task[None] | None = None
        self._began = self._loop.time()
        self.answered = False
        self.why = ""

    def stop(self) -> None:
        self._timer.cancel()
        if self._task is not None:
            self._task.cancel()

    def _begin(self) -> None:
        self._task = self._loop.create_task(self._look())

    def _end(self, why: str) -> None:
        if not self.why and self._main is not None:
            self.why = why
            self._main.cancel()

    async def _look(self) -> None:
        journey = self._journey
        if journey.hold is not None and journey.guard is not None:
            with journey.guard.watching(journey.hold, lambda: self._end("the right ended")):
                await self._until_end()
        else:
            await self._until_end()

    async def _until_end(self) -> None:
        limit_s, body = self._journey.answer_within_s, self._body
        while not body.whole or (limit_s is not None and not self.answered):
            if body.whole and limit_s is not None and not self.answered:
                left_s = (body.last_s or self._began) + limit_s - self._loop.time()
                if left_s <= 0:
                    self._end("no answer in time")
                    return
                await asyncio.sleep(min(left_s, LOOK_EVERY_S))
            else:
                if limit_s is not None and self._loop.time() - (body.last_s or self._began) > BODY_SILENT_S:
                    self._end("silent")
                    return
                await asyncio.sleep(LOOK_EVERY_S)
        await body.until_gone()
        self._end("gone")
