"""Filters headers in both directions, and sets those that belong to the gateway; no I/O."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from portal.gateway.asgi_types import Headers
from portal.gateway.protocol.cookies import ToolCookies
from portal.gateway.protocol.locations import rewrite_location

HOP_BY_HOP = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-connection",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
        b"http2-settings",
        b"expect",
    }
)
PROXY_HEADERS = frozenset(
    {b"forwarded", b"x-real-ip", b"x-client-ip", b"via", b"proxy", b"x-original-url", b"x-rewrite-url"}
)
"""Headers that only the gateway may set or that affect careless servers, besides all ``x-forwarded-*``."""
HANDSHAKE = frozenset(
    {
        b"sec-websocket-key",
        b"sec-websocket-version",
        b"sec-websocket-extensions",
        b"sec-websocket-protocol",
        b"sec-websocket-accept",
    }
)
_BLOCKED_TOOL_HEADERS = frozenset(
    {
        b"strict-transport-security",
        b"server",
        b"x-powered-by",
        b"alt-svc",
        b"public-key-pins",
        b"date",
        b"clear-site-data",  # it would clear cookies of the whole registrable domain, not only of this host
    }
)


def single_header(headers: Headers, header_name: bytes) -> bytes | None:
    """Return the value of a header that occurs once, or None."""
    return next((value for name, value in headers if name == header_name), None)


def _connection_options(headers: Headers) -> set[bytes]:
    return {
        token.strip().lower()
        for name, value in headers
        if name == b"connection"
        for token in value.split(b",")
    }


def upstream_request_headers(headers: Headers, *, drop: Iterable[bytes] = ()) -> Headers:
    """Return the request's headers without hop-by-hop, forged proxy and underscore variants."""
    gone = HOP_BY_HOP | PROXY_HEADERS | HANDSHAKE | _connection_options(headers) | set(drop)
    gone -= {b"host", b"content-length"}
    return [
        (name, value)
        for name, value in headers
        if name not in gone and not name.startswith(b"x-forwarded-") and b"_" not in name
    ]


def forwarded_headers(client: str | None, scheme: str, host: bytes) -> Headers:
    """Return the proxy headers for the request as the gateway received it."""
    ours = [(b"x-forwarded-proto", scheme.encode()), (b"x-forwarded-host", host)]
    if client:
        ours.append((b"x-forwarded-for", client.encode()))
    return ours


def client_response_headers(headers: Iterable[tuple[bytes, bytes]]) -> Headers:
    """Return a response's headers without hop-by-hop ones, or Content-Length beside Transfer-Encoding."""
    lowered = [(name.lower(), value) for name, value in headers]
    gone = HOP_BY_HOP | _connection_options(lowered) | HANDSHAKE
    if any(name == b"transfer-encoding" for name, _ in lowered):
        gone = gone | {b"content-length"}
    return [(name, value) for name, value in lowered if name not in gone]


def tool_response_headers(
    headers: Iterable[tuple[bytes, bytes]], *, secure: bool, sent: Headers, ports: Collection[int]
) -> Headers:
    """Return a tool's response headers, cookies bound to its host, with those of every workspace page.

    ``sent`` are the request's headers; ``ports`` are those of the tool itself in loopback URLs.
    """
    kept: Headers = []
    policy = False
    cookies = ToolCookies(sent)
    for name, value in client_response_headers(headers):
        if name in _BLOCKED_TOOL_HEADERS or name in _SECURITY_HEADER_NAMES:
            continue
        if name == b"set-cookie":
            cookie = cookies.accept(value)
            if cookie is not None:
                kept.append((name, cookie))
            continue
        if name in _LOCATION_HEADERS:
            address = rewrite_location(value, ports)
            if address is not None:
                kept.append((name, address))
            continue
        if name == b"content-security-policy" and b"frame-ancestors" in value.lower():
            policy = True
        kept.append((name, value))
    if not policy:
        kept.append((b"content-security-policy", b"frame-ancestors 'self'"))
    kept += _SECURITY_HEADERS
    if secure:
        kept.append(HSTS)
    return kept


_LOCATION_HEADERS = frozenset({b"location", b"content-location", b"refresh"})
HSTS = (b"strict-transport-security", b"max-age=31536000; includeSubDomains")
_SECURITY_HEADERS: Headers = [
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cross-origin-opener-policy", b"same-origin"),
]
_SECURITY_HEADER_NAMES = frozenset(name for name, _ in _SECURITY_HEADERS)
