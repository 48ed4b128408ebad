"""Error responses of the gateway itself, as HTML or, when requested, as problem+json."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from http.client import responses

from django.conf import settings
from django.utils.translation import gettext_noop as _

from portal.gateway.asgi_types import Headers, Receive, Scope, Send
from portal.gateway.protocol.headers import HSTS, single_header
from portal.static_error_page import (
    CONTENT_SECURITY_POLICY,
    MEDIA_TYPE,
    PERMISSIONS_POLICY,
    static_error_page,
)

LINGER_S = 1.0


@dataclass(eq=False)
class GatewayError(Exception):
    """An answer of the gateway itself, raised before a response has started."""

    status: int
    code: str
    title: str
    message: str
    link: tuple[str, str] | None = None
    """URL and text."""
    retry_after_s: int | None = None
    allow: Collection[str] = ()
    close: bool = False
    """End the connection."""
    refresh_s: int | None = None
    """After this time a browser loads the page again."""
    values: Mapping[str, str] | None = None
    """For the placeholders of the message; None: it has none."""


class BodyTooLargeError(GatewayError):
    """The request body exceeds the limit; upstream did not receive all of it."""

    def __init__(self, max_bytes: int) -> None:
        message = f"At most {max_bytes // 1024**2} MiB are allowed. Nothing was stored."
        super().__init__(413, "too_large", "Request too large", message, close=True)


def wants_json(scope: Scope) -> bool:
    """Return whether the client accepts JSON and not HTML, or the path is below /api/."""
    accept = (single_header(scope["headers"], b"accept") or b"").lower()
    return scope["raw_path"].startswith(b"/api/") or (b"json" in accept and b"text/html" not in accept)


def build_response(
    status: int,
    code: str,
    title: str,
    message: str,
    *,
    json_wanted: bool = False,
    link: tuple[str, str] | None = None,
    retry_after_s: int | None = None,
    accept_language: str = "",
    values: Mapping[str, str] | None = None,
) -> tuple[int, Headers, bytes]:
    """Return status, headers and body. ``link`` is (URL, text); pages follow ``accept_language``."""
    if json_wanted:
        kind = "application/problem+json"
        problem = {
            "type": f"urn:fairway:problem:{code}",
            "title": responses.get(status, ""),
            "status": status,
            "detail": message.format(**values) if values else message,
            "code": code,
        }
        body = json.dumps(problem).encode()
    else:
        kind = MEDIA_TYPE
        body = static_error_page(
            title,
            message,
            link=link,
            is_temporary=retry_after_s is not None,
            accept_language=accept_language,
            values=values,
        ).encode()
    headers: Headers = [
        (b"content-type", kind.encode()),
        (b"content-length", str(len(body)).encode()),
        (b"cache-control", b"no-store"),
        (b"content-security-policy", CONTENT_SECURITY_POLICY.encode()),
        (b"x-content-type-options", b"nosniff"),
        (b"referrer-policy", b"no-referrer"),
        (b"x-frame-options", b"DENY"),
        (b"cross-origin-opener-policy", b"same-origin"),
        (b"cross-origin-resource-policy", b"same-origin"),
        (b"permissions-policy", PERMISSIONS_POLICY.encode()),
    ]
    if retry_after_s is not None:
        headers.append((b"retry-after", str(retry_after_s).encode()))
    if settings.HTTPS_ENABLED:
        headers.append(HSTS)
    return status, headers, body


def response_head(status: int, headers: Headers) -> bytes:
    """Return the head of a response in bytes, for a connection that uvicorn does not serve."""
    first = f"HTTP/1.1 {status} {responses.get(status, '')}\r\n".encode()
    return first + b"".join(b"%b: %b\r\n" % pair for pair in headers) + b"\r\n"


async def send_response(
    send: Send,
    reply: tuple[int, Headers, bytes],
    *,
    websocket: bool = False,
    unread: Receive | None = None,
) -> None:
    """Send a response of the gateway; for a WebSocket, refuse the handshake with it.

    ``unread`` receives the rest of the request: it is read for a moment, because a connection closed with
    unread bytes loses the response.
    """
    status, headers, body = reply
    kind = "websocket.http.response" if websocket else "http.response"
    await send({"type": f"{kind}.start", "status": status, "headers": headers})
    if unread is not None:
        await send({"type": f"{kind}.body", "body": body, "more_body": True})
        body = b""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LINGER_S):
                while (await unread()).get("more_body", False):
                    pass
    await send({"type": f"{kind}.body", "body": body})


async def send_error(send: Send, scope: Scope, receive: Receive, error: GatewayError) -> None:
    """Answer a request, or refuse a handshake, with an error."""
    link = error.link
    if link is None and error.retry_after_s is not None and scope.get("method") == "GET":
        link = ("", _("Try again"))
    status, headers, body = build_response(
        error.status,
        error.code,
        error.title,
        error.message,
        json_wanted=wants_json(scope),
        link=link,
        retry_after_s=error.retry_after_s,
        accept_language=(single_header(scope["headers"], b"accept-language") or b"").decode("latin-1"),
        values=error.values,
    )
    if error.allow:
        headers.append((b"allow", ", ".join(sorted(error.allow)).encode()))
    if error.refresh_s is not None:
        headers.append((b"refresh", str(error.refresh_s).encode()))
    if error.close:
        headers.append((b"connection", b"close"))
    await send_response(
        send,
        (status, headers, body),
        websocket=scope["type"] == "websocket",
        unread=receive if isinstance(error, BodyTooLargeError) else None,
    )
