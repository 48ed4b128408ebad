"""Proxies a browser's WebSocket to one upstream: checks both handshakes, then relays bytes."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib

import httptools

from portal.gateway.asgi_types import Headers, Scope
from portal.gateway.protocol.headers import single_header
from portal.gateway.proxy.http_client import MAX_HEAD_BYTES, NoResponseError
from portal.gateway.proxy.http_proxy import ProxiedRequest, build_request_head
from portal.gateway.proxy.websocket_protocol import WEBSOCKET_EXTENSION, RawWebSocketProtocol, RelayEndpoint

HANDSHAKE_TIMEOUT_S = 9.0
CLOSE_ACCESS_REVOKED = 1008
CLOSE_UPSTREAM_LOST = 1014
"""Bad gateway: the connection to the tool broke; the tool did not close it."""
CLOSE_GRACE_S = 1.0
_MAGIC = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
_REQUEST_HEADERS = (
    b"sec-websocket-key",
    b"sec-websocket-version",
    b"sec-websocket-protocol",
    b"sec-websocket-extensions",
)
_RESPONSE_HEADERS = (b"sec-websocket-accept", b"sec-websocket-protocol", b"sec-websocket-extensions")
_UPGRADE: Headers = [(b"connection", b"Upgrade"), (b"upgrade", b"websocket")]


class HandshakeRejectedError(Exception):
    """Upstream answered the handshake with a plain HTTP status."""

    def __init__(self, status: int) -> None:
        super().__init__(f"the handshake returned status {status}")
        self.status = status


class _UpstreamEndpoint(RelayEndpoint):
    """The tool's side: parses its answer to the handshake, then relays bytes."""

    def __init__(self, browser: RawWebSocketProtocol) -> None:
        super().__init__()
        self._browser = browser
        self._parser = httptools.HttpResponseParser(self)
        self._seen = 0
        self._headers: Headers = []
        self.handshake: asyncio.Future[tuple[int, Headers]] = asyncio.get_running_loop().create_future()
        self.open = False

    def data_received(self, data: bytes) -> None:
        if self.open:
            self._browser.frames.feed(data)
            self.relay(data)
            return
        self._seen += len(data)
        rest = b""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as error:
            rest = data[error.args[0] :]
        except httptools.HttpParserError as error:
            self._fail(f"the handshake response is invalid: {error}")
            return
        if not self.handshake.done():
            if self._seen > MAX_HEAD_BYTES:
                self._fail("the handshake response is too long")
            return
        self.open = True
        if rest:
            self._browser.frames.feed(rest)
            self.relay(rest)

    def connection_lost(self, problem: Exception | None) -> None:
        if problem is not None:
            self._browser.send_close(CLOSE_UPSTREAM_LOST, "The connection to the workspace was lost.")
        super().connection_lost(problem)
        self._fail("the connection was closed")

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        if not self.handshake.done():
            self.handshake.set_result((self._parser.get_status_code(), self._headers))

    def _fail(self, why: str) -> None:
        if not self.handshake.done():
            self.handshake.set_exception(NoResponseError(why))
        self.close()


async def proxy_websocket(proxied: ProxiedRequest, scope: Scope) -> bool:
    """Relay until either side closes or the permission ends; return True for the latter.

    Raise NoResponseError or HandshakeRejectedError while the browser's handshake is unanswered.
    """
    browser: RawWebSocketProtocol = scope["extensions"][WEBSOCKET_EXTENSION]
    asked = [(name, value) for name, value in scope["headers"] if name in _REQUEST_HEADERS]
    key = single_header(asked, b"sec-websocket-key")
    if scope["method"] != "GET" or not key:
        raise HandshakeRejectedError(400)
    upstream: _UpstreamEndpoint = await proxied.pool.connect(lambda: _UpstreamEndpoint(browser))
    try:
        upstream.write(build_request_head(scope, proxied.headers, extra=[*_UPGRADE, *asked]))
        try:
            status, headers = await asyncio.wait_for(upstream.handshake, HANDSHAKE_TIMEOUT_S)
        except TimeoutError:
            raise NoResponseError("no handshake response in time") from None
        if status != 101:
            raise HandshakeRejectedError(status if 400 <= status < 600 else 502)
        reported = [pair for pair in headers if pair[0] in _RESPONSE_HEADERS]
        wanted = base64.b64encode(hashlib.sha1(key + _MAGIC).digest())  # noqa: S324  (RFC 6455 names it)
        if (b"sec-websocket-accept", wanted) not in reported:
            raise NoResponseError("the handshake response does not match the key")
        browser.upgrade([*_UPGRADE, *reported])
        browser.attach(upstream)
        upstream.attach(browser)
        return await _relay_until_end(proxied, browser)
    finally:
        if upstream.handshake.done() and not upstream.handshake.cancelled():
            upstream.handshake.exception()
        upstream.close()


async def _relay_until_end(proxied: ProxiedRequest, browser: RawWebSocketProtocol) -> bool:
    lost = asyncio.Event()
    with proxied.watch(lambda decision: lost.set()):
        ending = asyncio.create_task(lost.wait())
        try:
            await asyncio.wait({ending, browser.disconnected}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            ending.cancel()
    if lost.is_set() and not browser.is_closed:
        browser.send_close(CLOSE_ACCESS_REVOKED, "You no longer have access.")
        browser.close()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(browser.disconnected), CLOSE_GRACE_S)
        if browser.transport is not None and not browser.is_closed:
            browser.transport.abort()
    return lost.is_set()
