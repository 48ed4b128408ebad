"""Error responses of the gateway itself, as HTML or, when requested, as problem+json."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Collection
from http import HTTPStatus

from portal.gateway.asgi_types import Headers, Receive, Scope, Send
from portal.gateway.protocol.headers import HSTS
from portal.static_error_page import (
    CONTENT_SECURITY_POLICY,
    MEDIA_TYPE,
    PERMISSIONS_POLICY,
    static_error_page,
)

LINGER_S = 1.0


def wants_json(scope: Scope) -> bool:
    """Return whether the client accepts JSON and not HTML, or the path is below /api/."""
    accept = next((value.lower() for name, value in scope["headers"] if name == b"accept"), b"")
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
    secure: bool = False,
) -> tuple[int, Headers, bytes]:
    """Return status, headers and body. ``link`` is (URL, text)."""
    if json_wanted:
        kind = "application/problem+json"
        problem = {
            "type": f"urn:fairway:problem:{code}",
            "title": HTTPStatus(status).phrase,
            "status": status,
            "detail": message,
            "code": code,
        }
        body = json.dumps(problem).encode()
    else:
        kind = MEDIA_TYPE
        body = static_error_page(title, message, link=link, is_temporary=retry_after_s is not None).encode()
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
    if secure:
        headers.append(HSTS)
    return status, headers, body


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


async def send_too_large(
    send: Send, scope: Scope, receive: Receive, max_bytes: int | None, *, secure: bool = False
) -> None:
    """Refuse a body with 413."""
    mebibytes = (max_bytes or 0) // 1024**2
    message = f"At most {mebibytes} MiB are allowed. Nothing was stored."
    status, headers, body = build_response(
        413, "too_large", "Request too large", message, json_wanted=wants_json(scope), secure=secure
    )
    headers.append((b"connection", b"close"))
    await send_response(send, (status, headers, body), unread=receive)


async def send_error(
    send: Send,
    scope: Scope,
    status: int,
    code: str,
    title: str,
    message: str,
    *,
    link: tuple[str, str] | None = None,
    retry_after_s: int | None = None,
    allow: Collection[str] = (),
    secure: bool = False,
    close: bool = False,
) -> None:
    """Answer a request, or refuse a handshake, with an error; ``close`` ends the connection."""
    if link is None and retry_after_s is not None and scope.get("method") == "GET":
        link = ("", "Try again")
    status, headers, body = build_response(
        status,
        code,
        title,
        message,
        json_wanted=wants_json(scope),
        link=link,
        retry_after_s=retry_after_s,
        secure=secure,
    )
    if allow:
        headers.append((b"allow", ", ".join(sorted(allow)).encode()))
    if close:
        headers.append((b"connection", b"close"))
    await send_response(send, (status, headers, body), websocket=scope["type"] == "websocket")
