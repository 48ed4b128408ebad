"""What crosses the gateway: which headers pass, and which are ours alone. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from portal.gateway.cookies import ToolCookies
from portal.gateway.locations import reachable_address
from portal.gateway.wire import Headers

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
OURS = frozenset(
    {b"forwarded", b"x-real-ip", b"x-client-ip", b"via", b"proxy", b"x-original-url", b"x-rewrite-url"}
)
"""Headers that only the gateway may set or that steer careless servers, next to all of ``x-forwarded-*``."""
HANDSHAKE = frozenset(
    {
        b"sec-websocket-key",
        b"sec-websocket-version",
        b"sec-websocket-extensions",
        b"sec-websocket-protocol",
        b"sec-websocket-accept",
    }
)
_NOT_FROM_TOOLS = frozenset(
    {
        b"strict-transport-security",
        b"server",
        b"x-powered-by",
        b"alt-svc",
        b"public-key-pins",
        b"date",
        b"clear-site-data",  # its cookies are those of the whole registrable domain, not of this host
    }
)


def _listed(headers: Headers) -> set[bytes]:
    """The names that Connection declares to be for this hop only."""
    return {
        token.strip().lower()
        for name, value in headers
        if name == b"connection"
        for token in value.split(b",")
    }


def to_upstream(headers: Headers, *, drop: Iterable[bytes] = ()) -> Headers:
    """The request's headers without this hop's, without forged proxy headers, without underscore twins."""
    gone = HOP_BY_HOP | OURS | HANDSHAKE | _listed(headers) | set(drop)
    gone -= {b"host", b"content-length"}
    return [
        (name, value)
        for name, value in headers
        if name not in gone and not name.startswith(b"x-forwarded-") and b"_" not in name
    ]


def forwarded(client: str | None, scheme: str, host: bytes) -> Headers:
    """The proxy headers, as the gateway itself saw the request."""
    ours = [(b"x-forwarded-proto", scheme.encode()), (b"x-forwarded-host", host)]
    if client:
        ours.append((b"x-forwarded-for", client.encode()))
    return ours


def from_upstream(headers: Iterable[tuple[bytes, bytes]]) -> Headers:
    """A response's headers without this hop's. A length beside a transfer encoding does not count."""
    lowered = [(name.lower(), value) for name, value in headers]
    gone = HOP_BY_HOP | _listed(lowered) | HANDSHAKE
    if any(name == b"transfer-encoding" for name, _ in lowered):
        gone = gone | {b"content-length"}
    return [(name, value) for name, value in lowered if name not in gone]


def from_tool(
    headers: Iterable[tuple[bytes, bytes]], *, secure: bool, sent: Headers, ports: Collection[int]
) -> Headers:
    """A tool's response headers, its cookies bound to its host, with what every workspace page carries.

    ``sent`` are the request's headers; ``ports`` are those by which the tool may name itself on a loopback address.
    """
    kept: Headers = []
    policy = False
    cookies = ToolCookies(sent)
    for name, value in from_upstream(headers):
        if name in _NOT_FROM_TOOLS or name in _SAFE_NAMES:
            continue
        if name == b"set-cookie":
            cookie = cookies.accept(value)
            if cookie is not None:
                kept.append((name, cookie))
            continue
        if name in _ADDRESSES:
            address = reachable_address(value, ports)
            if address is not None:
                kept.append((name, address))
            continue
        if name == b"content-security-policy" and b"frame-ancestors" in value.lower():
            policy = True
        kept.append((name, value))
    if not policy:
        kept.append((b"content-security-policy", b"frame-ancestors 'self'"))
    kept += _SAFE
    if secure:
        kept.append(HSTS)
    return kept


_ADDRESSES = frozenset({b"location", b"content-location", b"refresh"})
HSTS = (b"strict-transport-security", b"max-age=31536000; includeSubDomains")
_SAFE: Headers = [
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cross-origin-opener-policy", b"same-origin"),
]
_SAFE_NAMES = frozenset(name for name, _ in _SAFE)
