"""A minimal HTTP/1.1 client for one hop: headers and body as bytes, one request at a time per connection.

A general client was slower than the reference proxy (docs/decisions/gateway-bytes.md). llhttp (httptools)
parses the framing and refuses ambiguous messages.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from time import monotonic
from typing import Any

import httptools

from portal.gateway.asgi_types import Headers

HIGH_WATER_BYTES = 256 * 1024
MAX_HEAD_BYTES = 64 * 1024
MAX_IDLE = 64
_BODILESS = frozenset({204, 304})
_STATUSES = range(100, 600)  # RFC 9110, 15: others are invalid

Connect = Callable[[Callable[[], asyncio.Protocol]], Awaitable[tuple[asyncio.Transport, asyncio.Protocol]]]


class NoResponseError(Exception):
    """Upstream did not answer, and nothing was sent to the browser yet."""


class IncompleteResponseError(Exception):
    """The response ended before it was complete."""


class Connection(asyncio.Protocol):
    """An upstream connection; ``read_head`` and ``read`` return the response to ``send_head``."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._waiter: asyncio.Future[None] | None = None
        self._writable: asyncio.Future[None] | None = None
        self._awaiting_response = False
        self._head_request = False
        self._is_interim = False
        self._problem: Exception | None = None
        self._chunks: deque[bytes] = deque()
        self._buffered = 0
        self._framing_bytes = 0
        self._paused = False
        self.closed = False
        self.request_count = 0
        self.idle_since = 0.0
        self.status = 0
        self.headers: Headers = []
        self.complete = False
        self._keep_alive = False

    # -- public interface ------------------------------------------------------------------------------

    def send_head(self, head: bytes, *, head_request: bool) -> None:
        """Send a request's head. The previous response must be complete."""
        self.request_count += 1
        self._awaiting_response, self._head_request, self._is_interim = True, head_request, False
        self.status, self.headers, self.complete, self._keep_alive = 0, [], False, False
        self._framing_bytes = 0
        self.write(head)

    def write(self, data: bytes) -> None:
        if self._transport is not None and not self.closed:
            self._transport.write(data)

    async def drain(self) -> None:
        """Wait while the send buffer is full. Raise ConnectionError when the connection is lost."""
        if self._writable is not None:
            await self._writable
        if self.closed:
            raise ConnectionResetError("upstream closed the connection")

    async def read_head(self) -> None:
        """Wait for status and headers. Raise NoResponseError."""
        while not self.status:
            if self._problem is not None or self.closed:
                raise NoResponseError(str(self._problem or "the connection was closed"))
            await self._wait()

    async def read(self) -> bytes:
        """Return received bytes of the body; b"" when it is complete. Raise IncompleteResponseError."""
        while not self._chunks:
            if self.complete:
                return b""
            if self._problem is not None or self.closed:
                raise IncompleteResponseError(str(self._problem or "the connection was closed"))
            await self._wait()
        chunks = self._chunks
        data = chunks.popleft() if len(chunks) == 1 else b"".join(chunks)
        chunks.clear()
        self._buffered = 0
        if self._paused and self._transport is not None and not self.closed:
            self._paused = False
            self._transport.resume_reading()
        return data

    @property
    def at_eof(self) -> bool:
        """True when ``read`` would return b"" at once."""
        return self.complete and not self._chunks

    @property
    def is_reusable(self) -> bool:
        """True when another request may be sent."""
        return self.complete and self._keep_alive and not self.closed and not self._chunks

    def release(self) -> None:
        """Mark the response as consumed: any further data is an error."""
        self._awaiting_response = False
        self.headers = []
        if self._head_request or self.status in _BODILESS:
            # the old parser may expect a body that never comes
            self._parser = httptools.HttpResponseParser(self)

    def close(self) -> None:
        """End the connection now; unsent data is dropped."""
        if self._transport is not None and not self.closed:
            self._transport.abort()
        self.closed = True

    # -- asyncio -----------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        if not self._awaiting_response or self.complete:
            self._fail(ConnectionError("upstream sent data without a request"))
            return
        self._framing_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._fail(ConnectionError(f"upstream's response is invalid: {error}"))
            return
        if self._framing_bytes > MAX_HEAD_BYTES and not self.complete:
            self._fail(ConnectionError("upstream's headers, chunk extensions or trailers are too long"))

    def connection_lost(self, problem: Exception | None) -> None:
        self.closed = True
        if (
            self._awaiting_response
            and self.status
            and not self.complete
            and problem is None
            and self._ends_at_close()
        ):
            self.complete = True
        self._wake()
        if self._writable is not None and not self._writable.done():
            self._writable.set_result(None)

    def pause_writing(self) -> None:
        self._writable = self._loop.create_future()

    def resume_writing(self) -> None:
        if self._writable is not None and not self._writable.done():
            self._writable.set_result(None)
        self._writable = None

    # -- llhttp ------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self.complete:
            self._fail(ConnectionError("upstream sent two responses"))

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self.status:  # data after a chunked body is a trailer, which these rules do not check
            self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        encodings = {value.strip().lower() for name, value in self.headers if name == b"transfer-encoding"}
        if status not in _STATUSES or encodings - {b"chunked"}:
            self._fail(ConnectionError("upstream's status or transfer encoding is not supported"))
            return
        if 100 <= status < 200:
            self._is_interim = True
            self.headers = []
            return
        self._keep_alive = self._parser.should_keep_alive()
        self.status = status
        if self._head_request or status in _BODILESS:
            self.complete = True
        self._wake()

    def on_body(self, body: bytes) -> None:
        self._framing_bytes = 0  # bytes that are neither head nor body; bodies are unlimited
        if self.complete:
            return
        self._chunks.append(body)
        self._buffered += len(body)
        if self._buffered > HIGH_WATER_BYTES and not self._paused and self._transport is not None:
            self._paused = True
            self._transport.pause_reading()
        self._wake()

    def on_message_complete(self) -> None:
        if self._is_interim:
            self._is_interim = False
            return
        self.complete = True
        self._wake()

    # -- internal ----------------------------------------------------------------------------------

    def _ends_at_close(self) -> bool:
        """Return whether the response has no length, so that the end of the connection ends it."""
        return not any(name in (b"content-length", b"transfer-encoding") for name, _ in self.headers)

    def _fail(self, problem: Exception) -> None:
        self._problem = problem
        self._keep_alive = False
        self.close()
        self._wake()

    async def _wait(self) -> None:
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class UpstreamPool:
    """Connections to one server, web or one port of a node, with idle ones for reuse."""

    def __init__(self, connect: Connect, *, max_idle_s: float) -> None:
        self._connect = connect
        self._max_idle_s = max_idle_s
        self._idle: deque[Connection] = deque()

    async def acquire(self, *, new: bool = False) -> Connection:
        """Return a connection for one request. Raise NoResponseError."""
        edge = monotonic() - self._max_idle_s
        while self._idle and not new:
            found = self._idle.pop()
            if not found.closed and found.idle_since > edge:
                return found
            found.close()
        made: Connection = await self.connect(Connection)
        return made

    async def connect(self, protocol: Callable[[], asyncio.Protocol]) -> Any:
        """Return a new connection for this protocol. Raise NoResponseError."""
        try:
            _, made = await self._connect(protocol)
        except (OSError, TimeoutError) as error:
            raise NoResponseError(str(error) or type(error).__name__) from error
        return made

    def release(self, connection: Connection) -> None:
        """Keep a connection for the next request, or close it."""
        if not connection.is_reusable or len(self._idle) >= MAX_IDLE:
            connection.close()
            return
        connection.release()
        connection.idle_since = monotonic()
        self._idle.append(connection)

    @property
    def is_empty(self) -> bool:
        """True when there is no idle connection."""
        return not self._idle

    def close(self) -> None:
        """Close idle connections."""
        while self._idle:
            self._idle.pop().close()
