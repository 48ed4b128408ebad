"""Joins the browser's WebSocket with one upstream: checks both handshakes, then passes bytes until an end."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib

import httptools

from portal.gateway.client import MAX_HEAD_BYTES, NoAnswer
from portal.gateway.forward import Journey, request_head
from portal.gateway.pipe import PIPE, Half, PipeProtocol
from portal.gateway.wire import Headers, Scope

ANSWER_WITHIN_S = 9.0
RIGHT_ENDED = 1008
CONNECTION_LOST = 1014
"""Bad gateway: the way to the tool broke, which is not the tool's own end."""
LAST_WORDS_S = 1.0
_MAGIC = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
_ASKED = (
    b"sec-websocket-key",
    b"sec-websocket-version",
    b"sec-websocket-protocol",
    b"sec-websocket-extensions",
)
_ANSWERED = (b"sec-websocket-accept", b"sec-websocket-protocol", b"sec-websocket-extensions")
_UPGRADE: Headers = [(b"connection", b"Upgrade"), (b"upgrade", b"websocket")]


class HandshakeRefused(Exception):
    """Upstream answered the handshake with a plain HTTP status."""

    def __init__(self, status: int) -> None:
        super().__init__(f"the handshake was answered with {status}")
        self.status = status


class _Far(Half):
    """The tool's side: reads its answer to the handshake, then passes bytes on."""

    def __init__(self, near: PipeProtocol) -> None:
        super().__init__()
        self._near = near
        self._parser = httptools.HttpResponseParser(self)
        self._seen = 0
        self._headers: Headers = []
        self.answer: asyncio.Future[tuple[int, Headers]] = asyncio.get_running_loop().create_future()
        self.open = False

    def data_received(self, data: bytes) -> None:
        if self.open:
            self._near.edges.passed(data)
            self.pass_on(data)
            return
        self._seen += len(data)
        rest = b""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            rest = data[upgrade.args[0] :]
        except httptools.HttpParserError as problem:
            self._fail(f"the answer to the handshake cannot be read: {problem}")
            return
        if not self.answer.done():
            if self._seen > MAX_HEAD_BYTES:
                self._fail("the answer to the handshake is too long")
            return
        self.open = True
        if rest:
            self._near.edges.passed(rest)
            self.pass_on(rest)

    def connection_lost(self, problem: Exception | None) -> None:
        if problem is not None:
            self._near.say_close(CONNECTION_LOST, "The connection to the workspace was lost.")
        super().connection_lost(problem)
        self._fail("the connection was closed")

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        if not self.answer.done():
            self.answer.set_result((self._parser.get_status_code(), self._headers))

    def _fail(self, why: str) -> None:
        if not self.answer.done():
            self.answer.set_exception(NoAnswer(why))
        self.close()


async def forward_socket(journey: Journey, scope: Scope) -> bool:
    """Pipes the socket until either side closes or the right ends; True for the latter.

    Raises NoAnswer or HandshakeRefused while the handshake with the browser is still open.
    """
    near: PipeProtocol = scope["extensions"][PIPE]
    asked = [(name, value) for name, value in scope["headers"] if name in _ASKED]
    key = next((value for name, value in asked if name == b"sec-websocket-key"), b"")
    if scope["method"] != "GET" or not key:
        raise HandshakeRefused(400)
    far: _Far = await journey.way.open(lambda: _Far(near))
    try:
        if far.transport is not None:
            far.transport.write(request_head(scope, journey.headers, more=[*_UPGRADE, *asked]))
        try:
            status, headers = await asyncio.wait_for(far.answer, ANSWER_WITHIN_S)
        except TimeoutError:
            raise NoAnswer("no answer to the handshake in time") from None
        if status != 101:
            raise HandshakeRefused(status)
        told = [pair for pair in headers if pair[0] in _ANSWERED]
        wanted = base64.b64encode(hashlib.sha1(key + _MAGIC).digest())  # noqa: S324  (RFC 6455 names it)
        if (b"sec-websocket-accept", wanted) not in told:
            raise NoAnswer("the answer to the handshake is not one to this key")
        near.upgrade([*_UPGRADE, *told])
        near.join(far)
        far.join(near)
        return await _until_end(journey, near)
    finally:
        if far.answer.done() and not far.answer.cancelled():
            far.answer.exception()
        far.close()


async def _until_end(journey: Journey, near: PipeProtocol) -> bool:
    if journey.guard is None or journey.hold is None:
        await near.gone
        return False
    lost = asyncio.Event()
    with journey.guard.watching(journey.hold, lost.set):
        ending = asyncio.create_task(lost.wait())
        try:
            await asyncio.wait({ending, near.gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            ending.cancel()
    if lost.is_set() and not near.lost:
        near.say_close(RIGHT_ENDED, "This is no longer open to you.")
        near.close()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(near.gone), LAST_WORDS_S)
        if near.transport is not None and not near.lost:
            near.transport.abort()
    return lost.is_set()
