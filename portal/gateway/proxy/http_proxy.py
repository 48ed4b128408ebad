"""Proxies one HTTP request and its response, streaming both ways."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from portal.gateway.asgi_types import ClientDisconnectedError, Headers, Receive, Scope, Send
from portal.gateway.protocol.error_responses import BodyTooLargeError, GatewayError
from portal.gateway.protocol.http_protocol import ABORT_EXTENSION
from portal.gateway.protocol.redaction import Redaction
from portal.gateway.proxy.balancer import ReplicaPool
from portal.gateway.proxy.http_client import (
    Connection,
    IncompleteResponseError,
    NoResponseError,
    UpstreamPool,
)

WATCH_AFTER_S = 1.0
"""Requests that last longer are watched for a lost browser and a revoked permission."""
CHECK_INTERVAL_S = 0.25
BODY_IDLE_TIMEOUT_S = 30.0
"""Longest pause in a request body where the response has a timeout: it holds a connection."""
_REVOKED = "revoked"
_RETRYABLE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})


class PermissionEndedError(Exception):
    """The permission ended before a response started; ``decision`` is the new one, as the monitor reports it."""

    def __init__(self, decision: object) -> None:
        super().__init__("access was revoked")
        self.decision = decision


@dataclass(frozen=True, slots=True)
class ProxiedRequest:
    """Upstream and headers of a request, and the filter of response headers."""

    pool: UpstreamPool | ReplicaPool
    headers: Headers
    response_headers: Callable[[Iterable[tuple[bytes, bytes]], int], Headers]
    """Gets the headers and the status. It may raise, since the response has not started."""
    response_timeout_s: float | None = None
    max_body_bytes: int | None = None
    """The largest body, counted as it passes regardless of Content-Length. None: no limit."""
    retries: int = 0
    """How often a request without effects is sent again when a new connection fails or ends without a response."""
    secrets: Sequence[bytes] = ()
    """What no response may contain."""
    watch: Callable[[Callable[[object], None]], AbstractContextManager[None]] = lambda on_revoked: (
        nullcontext()
    )
    """Within the context, the callback is called when the permission ends. Default: it never ends."""


def build_request_head(scope: Scope, headers: Headers, *, extra: Headers | None = None) -> bytes:
    """Return the upstream request head: the browser's path and query byte for byte, with these headers."""
    query = scope["query_string"]
    parts = [scope["method"].encode("ascii"), b" ", scope["raw_path"]]
    if query:
        parts += (b"?", query)
    parts.append(b" HTTP/1.1\r\n")
    for name, value in headers:
        parts += (name, b": ", value, b"\r\n")
    for name, value in extra or ():
        parts += (name, b": ", value, b"\r\n")
    parts.append(b"\r\n")
    return b"".join(parts)


async def proxy_http(proxied: ProxiedRequest, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer the request from upstream.

    Raise NoResponseError, PermissionEndedError or GatewayError while no response has started. A response that is
    incomplete upstream is aborted here too: it never looks complete.
    """
    method = scope["method"]
    length = chunked = False
    for name, value in scope["headers"]:
        if name == b"content-length":
            length = True
            if proxied.max_body_bytes is not None and int(value) > proxied.max_body_bytes:
                raise BodyTooLargeError(proxied.max_body_bytes)
        elif name == b"transfer-encoding":
            chunked = True
    body = RequestBody(
        receive, chunked=chunked, is_complete=not (length or chunked), max_bytes=proxied.max_body_bytes
    )
    if body.is_complete:
        await receive()  # the empty body; only a disconnect can follow
    head = build_request_head(
        scope, proxied.headers, extra=[(b"transfer-encoding", b"chunked")] if chunked else None
    )
    watch = RequestWatchdog(proxied, body)
    try:
        await _exchange(proxied, head, method, body, watch, send)
    except asyncio.CancelledError:
        if not watch.cancel_reason:
            raise
        task = asyncio.current_task()
        if task is not None:
            task.uncancel()
        if not watch.response_started and watch.cancel_reason == "body_timeout":
            message = "The request was not received completely in time. Nothing was stored."
            raise GatewayError(408, "too_slow", "Request timeout", message, close=True) from None
        if not watch.response_started and watch.cancel_reason == _REVOKED:
            raise PermissionEndedError(watch.decision) from None
        if not watch.response_started and watch.cancel_reason != "disconnected":
            raise NoResponseError(watch.cancel_reason) from None
        abort_response(scope)
    except (ClientDisconnectedError, IncompleteResponseError):
        abort_response(scope)
    finally:
        watch.stop()


def abort_response(scope: Scope) -> None:
    """Close the browser's connection, so that an incomplete response does not look complete."""
    scope["extensions"][ABORT_EXTENSION]()


async def _exchange(
    proxied: ProxiedRequest,
    head: bytes,
    method: str,
    body: RequestBody,
    watchdog: RequestWatchdog,
    send: Send,
) -> None:
    connection: Connection | None = None
    sending: asyncio.Task[None] | None = None
    retries_left = proxied.retries
    is_retry = kept = False
    try:
        while True:
            connection = None  # the one of a failed try is closed
            try:
                connection = await proxied.pool.acquire(new=is_retry)
                connection.send_head(head, head_request=method == "HEAD")
                if not body.is_complete:
                    sending = asyncio.create_task(body.stream_to(connection))
                await connection.read_head()
                break
            except NoResponseError:
                if sending is not None and sending.done() and not sending.cancelled():
                    sending.result()  # raises ClientDisconnectedError or BodyTooLargeError
                if sending is not None or method not in _RETRYABLE_METHODS:
                    raise
                if connection is None or connection.request_count == 1:
                    if not retries_left:
                        raise
                    retries_left -= 1
                # Else the server closed the idle connection while it was reused.
                is_retry = True
        redaction = Redaction(proxied.secrets) if proxied.secrets else None
        # before the filter, whose errors quote headers
        received = redaction.headers(connection.headers) if redaction is not None else connection.headers
        headers = proxied.response_headers(received, connection.status)
        watchdog.response_started = True
        if connection.status in (204, 304):
            headers = [pair for pair in headers if pair[0] != b"content-length"]
        await send({"type": "http.response.start", "status": connection.status, "headers": headers})
        while True:
            chunk = await connection.read()
            end = connection.at_eof
            if redaction is not None:
                chunk = redaction.feed(chunk, is_last=end)
                if not (chunk or end):
                    continue
            await send({"type": "http.response.body", "body": chunk, "more_body": not end})
            if end:
                break
        if sending is None or sending.done():
            proxied.pool.release(connection)
            kept = True
    finally:
        if sending is not None and not sending.done():
            sending.cancel()
            with contextlib.suppress(
                asyncio.CancelledError, ClientDisconnectedError, BodyTooLargeError, OSError
            ):
                await sending
        elif sending is not None and not sending.cancelled():
            sending.exception()  # expected: the response was incomplete, or ended before the body did
        if connection is not None and not kept:
            connection.close()


class RequestBody:
    def __init__(self, receive: Receive, *, chunked: bool, is_complete: bool, max_bytes: int | None) -> None:
        self._receive, self._chunked, self._max_bytes = receive, chunked, max_bytes
        self._received_bytes = 0
        self.is_complete = is_complete
        self.last_received_s = 0.0

    async def stream_to(self, connection: Connection) -> None:
        """Stream the body upstream. On ClientDisconnectedError or BodyTooLargeError, close the connection."""
        loop = asyncio.get_running_loop()
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                connection.close()
                raise ClientDisconnectedError
            self.last_received_s = loop.time()
            data = message.get("body", b"")
            self._received_bytes += len(data)
            if self._max_bytes is not None and self._received_bytes > self._max_bytes:
                connection.close()
                raise BodyTooLargeError(self._max_bytes)
            if data:
                connection.write(b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else bytes(data))
            if not message.get("more_body", False):
                if self._chunked:
                    connection.write(b"0\r\n\r\n")
                self.is_complete = True
                return
            with contextlib.suppress(ConnectionError):
                await connection.drain()  # upstream may answer before it has read the whole body

    async def wait_for_disconnect(self) -> None:
        """Return when the browser has disconnected; call only after the complete body."""
        while (await self._receive())["type"] != "http.disconnect":
            pass


class RequestWatchdog:
    """Cancel a long request when its browser disconnects, its permission ends, or on response timeout."""

    def __init__(self, proxied: ProxiedRequest, body: RequestBody) -> None:
        self._proxied, self._body = proxied, body
        self._loop = asyncio.get_running_loop()
        self._main = asyncio.current_task()
        self._timer = self._loop.call_later(WATCH_AFTER_S, self._start_checks)
        self._task: asyncio.Task[None] | None = None
        self._started_s = self._loop.time()
        self.response_started = False
        self.cancel_reason = ""
        self.decision: object = None

    def stop(self) -> None:
        self._timer.cancel()
        if self._task is not None:
            self._task.cancel()

    def _start_checks(self) -> None:
        self._task = self._loop.create_task(self._check())

    def _cancel(self, why: str) -> None:
        if not self.cancel_reason and self._main is not None:
            self.cancel_reason = why
            self._main.cancel()

    async def _check(self) -> None:
        with self._proxied.watch(self._revoke):
            await self._wait_for_end()

    def _revoke(self, decision: object) -> None:
        self.decision = decision
        self._cancel(_REVOKED)

    async def _wait_for_end(self) -> None:
        limit_s, body = self._proxied.response_timeout_s, self._body
        while not body.is_complete or (limit_s is not None and not self.response_started):
            pause_s = CHECK_INTERVAL_S
            if limit_s is not None:
                idle_since_s = body.last_received_s or self._started_s
                longest_s = limit_s if body.is_complete else BODY_IDLE_TIMEOUT_S
                left_s = idle_since_s + longest_s - self._loop.time()
                if left_s <= 0:
                    self._cancel("no response in time" if body.is_complete else "body_timeout")
                    return
                pause_s = min(pause_s, left_s)
            await asyncio.sleep(pause_s)
        await body.wait_for_disconnect()
        self._cancel("disconnected")
