"""Filters headers in both directions, and sets those that belong to the gateway; no I/O."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from urllib.parse import quote

from portal.gateway.asgi_types import Headers
from portal.gateway.protocol.cookies import ToolCookies
from portal.gateway.protocol.locations import rewrite_address, rewrite_links, rewrite_refresh

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
"""Headers that only the gateway may set or that affect careless servers, besides those below."""
_SET_BY_PROXIES = re.compile(
    rb"x-forwarded(?:-.*)?|x-original-.*|x-fairway-.*|(?:x-)?remote-.*|x-webauth-.*|x-authenticated-.*|x-user(?!-agent).*"
    rb"|x-auth-(?:request-.*|user.*|name|given-name|family-name|email|groups?|roles?|subject)"
    rb"|(?:x-)?(?:shib|oidc|saml|sso|appengine|tailscale-user|kubeflow)-.*|impersonate-.*"
    rb"|x-(?:authentik|pomerium|vouch|consumer|credential|tailscale)-.*"
    rb"|x-(?:goog-authenticated-user|goog-iap|amzn-oidc|envoy-external)-.*"
    rb"|x-ms-client-principal.*|cf-access-.*|(?:x-)?ssl-.*|(?:x-)?(?:arr-)?client-?(?:cert|dn|verify|ip).*"
    rb"|(?:x-)?(?:real|proxy|logged-in)-?(?:user|ip)|(?:wl-)?proxy-client-ip|cf-connecting-ip"
    rb"|(?:x-)?(?:cluster-client|true-client|originating|cf-connecting|fastly-client|azure-client)-?ip"
)
"""Names, with ``-`` for every other separator, in which proxies report who sends a request and from where.

Servers trust them, so nobody but the gateway sets them. Some servers read ``_`` and ``.`` as ``-``.
"""
_SEPARATORS = re.compile(rb"[^a-z0-9]")
METHOD_OVERRIDES = (b"x-http-method-override", b"x-http-method", b"x-method-override")
"""With these some servers read a GET as another method."""
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
        b"public-key-pins-report-only",
        b"set-cookie2",
        b"date",
        b"clear-site-data",  # it would clear cookies of the whole registrable domain, not only of this host
        b"nel",
        b"report-to",  # browsers would send reports to addresses that nobody checks
        b"reporting-endpoints",
        b"speculation-rules",
    }
)
_SERVER_INSTRUCTIONS = re.compile(
    rb"x-accel-.*|x-send-?file.*|x-(?:lighttpd|litespeed|reproxy)-.*|x-fairway-.*|surrogate-.*"
    rb"|(?:.+-)?cdn-cache-control|edge-control"
)
"""Headers that a front server or cache obeys: with them a tool could read files of the portal's machine."""


_REPORTING = re.compile(rb"(^|[;,])\s*report-(?:uri|to)\b[^;,]*", re.I)
"""Directives of a Content-Security-Policy with which a browser sends reports to any address."""


class RedirectDroppedError(Exception):
    """A tool redirects to an address that does not pass; ``address`` is the one it named."""

    def __init__(self, address: bytes) -> None:
        self.address = address.decode("utf-8", "replace")
        super().__init__(self.address)


class EncodedResponseError(Exception):
    """A tool compressed a response, so that what it contains cannot be checked."""


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
    """Return the request's headers without hop-by-hop ones, and those that only proxies set, however spelled."""
    gone = HOP_BY_HOP | PROXY_HEADERS | HANDSHAKE | _connection_options(headers) | set(drop)
    gone -= {b"host", b"content-length"}
    return [
        (name, value)
        for name, value in headers
        if name not in gone and b"_" not in name and not _is_set_by_proxies(name)
    ]


def _is_set_by_proxies(name: bytes) -> bool:
    folded = _SEPARATORS.sub(b"-", name)
    return folded in PROXY_HEADERS or _SET_BY_PROXIES.fullmatch(folded) is not None


def identity_headers(username: str, public_id: str) -> Headers:
    """Return who sends the request, verified, in the headers that servers behind a proxy read.

    Characters outside ASCII are percent-encoded.
    """
    name = quote(username, safe="@+!$&'()*,;=: ").encode()
    ours = [(header, name) for header in (b"remote-user", b"x-remote-user", b"x-auth-request-user")]
    ours += [(b"x-forwarded-user", name), (b"x-fairway-user", name)]
    return [*ours, (b"x-fairway-user-id", public_id.encode())]


def forwarded_headers(client: str | None, scheme: str, host: bytes) -> Headers:
    """Return the proxy headers for the request as the gateway received it."""
    ours = [(b"x-forwarded-proto", scheme.encode()), (b"x-forwarded-host", host)]
    if client:
        ours.append((b"x-forwarded-for", client.encode()))
    return ours


def client_response_headers(headers: Iterable[tuple[bytes, bytes]], status: int = 200) -> Headers:
    """Return a response's headers without hop-by-hop ones, or Content-Length beside Transfer-Encoding.

    ``status``: as for ``tool_response_headers``, whatever it is.
    """
    lowered = [(name.lower(), value) for name, value in headers]
    gone = HOP_BY_HOP | _connection_options(lowered) | HANDSHAKE
    if any(name == b"transfer-encoding" for name, _ in lowered):
        gone = gone | {b"content-length"}
    return [(name, value) for name, value in lowered if name not in gone]


def tool_response_headers(
    headers: Iterable[tuple[bytes, bytes]],
    status: int = 200,
    *,
    secure: bool,
    sent: Headers,
    ports: Collection[int],
    readable: bool = False,
) -> Headers:
    """Return a tool's response headers, cookies bound to its host, with those of every workspace page.

    ``sent`` are the request's headers; ``ports`` are those of the tool itself in loopback URLs. Raise
    RedirectDroppedError for a redirect whose address does not pass: without it the page would be blank. With
    ``readable`` raise EncodedResponseError for a body in another encoding than its own.
    """
    kept: Headers = []
    policy = False
    pairs = list(headers)
    cookies = ToolCookies(sent)
    for name, value in client_response_headers(pairs):
        if name in _DROPPED_TOOL_HEADERS or _SERVER_INSTRUCTIONS.fullmatch(name):
            continue
        if name == b"set-cookie":
            cookie = cookies.accept(value)
            if cookie is not None:
                kept.append((name, cookie))
            continue
        if (rewrite := _REWRITTEN.get(name)) is not None:
            address = rewrite(value, ports)
            if address is not None:
                kept.append((name, address))
            continue
        if readable and name == b"content-encoding" and value.strip().lower() not in (b"", b"identity"):
            raise EncodedResponseError(value.decode("latin-1"))
        if name.startswith(b"content-security-policy"):
            value = _REPORTING.sub(rb"\1", value)
            policy = policy or (name == b"content-security-policy" and b"frame-ancestors" in value.lower())
        kept.append((name, value))
    kept += _location(pairs, status, ports)
    if not policy:
        kept.append((b"content-security-policy", b"frame-ancestors 'self'"))
    kept += _SECURITY_HEADERS
    if secure:
        kept.append(HSTS)
    return kept


def _location(pairs: Headers, status: int, ports: Collection[int]) -> Headers:
    """Return the header Location for the browser; nothing if there is none, or no single one, that passes."""
    named = {value: None for name, value in pairs if name.lower() == b"location"}
    address = rewrite_address(next(iter(named)), ports) if len(named) == 1 else None
    if address is not None:
        return [(b"location", address)]
    if named and status in REDIRECTS:
        raise RedirectDroppedError(next(iter(named)))
    return []


REDIRECTS = frozenset({301, 302, 303, 307, 308})
HSTS = (b"strict-transport-security", b"max-age=31536000; includeSubDomains")
_SECURITY_HEADERS: Headers = [
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cross-origin-opener-policy", b"same-origin"),
]
_REWRITTEN = {
    b"content-location": rewrite_address,
    b"link": rewrite_links,  # browsers load targets of preload and others
    b"refresh": rewrite_refresh,
    b"sourcemap": rewrite_address,
    b"x-sourcemap": rewrite_address,
}
"""Headers with addresses that a browser requests; Location has a rule of its own."""
_DROPPED_TOOL_HEADERS = _BLOCKED_TOOL_HEADERS | {b"location"} | {name for name, _ in _SECURITY_HEADERS}
