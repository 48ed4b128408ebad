"""HTTP towards the browser: checks before any application code, on top of uvicorn's protocol.

llhttp parses the framing and refuses what is ambiguous. This module refuses requests that llhttp accepts
although two parsers could read them differently, and limits size and duration of request heads.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from portal.gateway.protocol.error_responses import build_response, response_head

MAX_HEAD_BYTES = 64 * 1024
HEAD_TIMEOUT_S = 15.0
"""From the connection, or from a request's first byte, to the end of its head."""
HEAD_TOO_LARGE = (
    431,
    f"URL, cookies and other headers may have {MAX_HEAD_BYTES // 1024} KiB in total. "
    "Clear the cookies of this site, then try again.",
)
CHUNK_FRAMING_TOO_LARGE = (
    400,
    f"Between two chunks of a body at most {MAX_HEAD_BYTES // 1024} KiB of framing are allowed.",
)
HTTP_VERSIONS = frozenset({"1.0", "1.1"})
ABORT_EXTENSION = "fairway.abort"
"""A function in the scope that closes the connection of an incomplete response."""


class HeadRejectedError(Exception):
    """The head is refused; raised in a callback, it makes llhttp end the request."""


class GatewayHttpProtocol(HttpToolsProtocol):
    """The protocol with which uvicorn serves the public port (its ``http`` option)."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._in_head = False
        self._buffered_bytes = 0  # of a head, of chunk extensions or of trailers received in parts
        self._rejection = (400, "The request is malformed.")
        self._deadline: asyncio.TimerHandle | None = None

    # -- the connection ----------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_head_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._buffered_bytes += len(data)
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._buffered_bytes > MAX_HEAD_BYTES:
            self._rejection = HEAD_TOO_LARGE if self._in_head else CHUNK_FRAMING_TOO_LARGE
            self.send_400_response("")
        elif self._in_head and self._deadline is None:
            self._start_head_timer()

    def send_400_response(self, msg: str) -> None:
        """Send the reason and close; only close if an earlier response is still being sent."""
        self._stop_head_timer()
        if not self._response_in_progress():
            status, message = self._rejection
            _, headers, body = build_response(status, "bad_request", "Bad request", message)
            self.transport.write(response_head(status, [*headers, (b"connection", b"close")]) + body)
        self.transport.close()

    # -- llhttp ------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head, self._buffered_bytes = True, 0

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # data after a chunked body is a trailer, which these rules do not check
            super().on_header(name, value)

    def on_body(self, body: bytes) -> None:
        self._buffered_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._buffered_bytes = 0
        super().on_message_complete()

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._stop_head_timer()
        self._check()
        super().on_headers_complete()
        if self.cycle is not None:
            abort = partial(self._abort, self.cycle)
            self.scope["extensions"] = {ABORT_EXTENSION: abort}  # type: ignore[dict-item]

    # -- internal ----------------------------------------------------------------------------------

    def _abort(self, cycle: RequestResponseCycle) -> None:
        """Close the connection; uvicorn would do so too, and report an error of the application."""
        cycle.disconnected = True
        self.transport.close()

    def _check(self) -> None:
        size, chunked, body = len(self.url), False, False
        for name, value in self.headers:
            size += len(name) + len(value)
            if name == b"transfer-encoding":
                chunked = body = True
            elif name == b"content-length" and value != b"0":
                body = True
        if size > MAX_HEAD_BYTES:
            self._reject(*HEAD_TOO_LARGE)
        version = self.parser.get_http_version()
        if version not in HTTP_VERSIONS:
            self._reject(505, "HTTP/1.1 is required.")
        if chunked and version == "1.0":
            self._reject(400, "HTTP/1.0 has no transfer encoding.")
        if not self.url.startswith((b"/", b"*")) and not self._host_matches_target():
            self._reject(400, "The URL and the Host header have different hosts.")
        if self.parser.should_upgrade():
            # llhttp would treat the rest as another protocol, other parsers as this request's body
            if body:
                self._reject(400, "An upgrade request must not have a body.")
            if self.cycle is not None and not self.cycle.response_complete:
                self._reject(400, "The protocol cannot be upgraded while a response is pending.")

    def _host_matches_target(self) -> bool:
        """Return whether an absolute target (RFC 9112, 3.2.2) has the host of the Host header."""
        scheme, _, rest = self.url.partition(b"://")
        authority = rest.partition(b"/")[0].partition(b"?")[0].lower()
        hosts = [value.strip().lower() for name, value in self.headers if name == b"host"]
        return scheme.lower() in (b"http", b"https") and hosts == [authority]

    def _response_in_progress(self) -> bool:
        """Return whether bytes sent now would become part of an earlier response."""
        cycle = self.cycle
        begun = cycle is not None and cycle.response_started and not cycle.response_complete
        return begun or bool(self.pipeline)

    def _reject(self, status: int, message: str) -> None:
        self._rejection = (status, message)
        raise HeadRejectedError(message)

    def _start_head_timer(self) -> None:
        self._deadline = self.loop.call_later(HEAD_TIMEOUT_S, self._on_head_timeout)

    def _stop_head_timer(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _on_head_timeout(self) -> None:
        self._deadline = None
        if not self.transport.is_closing():
            self.transport.close()
