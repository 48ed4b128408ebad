"""Cookies at the gateway: the portal's never reach a tool, a tool's stay on its host and within limits."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from portal.gateway.asgi_types import Headers

PORTAL_COOKIES = (b"fairway_", b"__host-fairway_", b"__secure-fairway_")
COOKIES_PER_HOST = 50
COOKIE_BYTES = 4096
COOKIE_BYTES_PER_HOST = 8192
"""Half of the common server limit for all headers; more would lock a user out of the tool."""


def is_portal_cookie(name: bytes) -> bool:
    """Return whether the name is reserved for portal and gateway; tools neither see nor set such cookies."""
    return name.strip().lower().startswith(PORTAL_COOKIES)


def read_cookie(headers: Headers, cookie_name: bytes) -> str:
    """Return the value of a cookie, or ""."""
    for name, pair in _named(headers):
        if name == cookie_name:
            return pair.partition(b"=")[2].decode("latin-1")
    return ""


def portal_headers(headers: Headers) -> Headers:
    """Return the request's headers with only the portal's own cookies.

    A page on a related domain can set cookies for the portal's host; dropping them keeps requests below size
    limits.
    """
    return _with_cookies(headers, [pair for name, pair in _named(headers) if is_portal_cookie(name)])


def tool_headers(headers: Headers) -> Headers:
    """Return the request's headers without portal and nameless cookies and those beyond the limit."""
    kept: list[bytes] = []
    left_bytes = COOKIE_BYTES_PER_HOST
    for name, pair in _named(headers):
        if not is_portal_cookie(name) and len(pair) <= left_bytes and len(kept) < COOKIES_PER_HOST:
            kept.append(pair)
            left_bytes -= len(pair)
    return _with_cookies(headers, kept)


class ToolCookies:
    """Filter the cookies that a tool sets in one response, given those in the request."""

    def __init__(self, sent: Headers) -> None:
        self._sizes = {name: len(pair) for name, pair in _named(sent) if not is_portal_cookie(name)}

    def accept(self, value: bytes) -> bytes | None:
        """Return a Set-Cookie bound to the tool's own host (no Domain); None if it is dropped.

        Dropped are nameless cookies, reserved names, and what would exceed the limit of a host. A cookie that
        does not grow always passes, so that a tool can remove its own.
        """
        pair, *attributes = value.split(b";")
        raw_name, equals, _ = pair.partition(b"=")
        name, size = raw_name.strip(), len(pair.strip())
        if not equals or not name or is_portal_cookie(name):
            return None
        kept = [part for part in attributes if part.partition(b"=")[0].strip().lower() != b"domain"]
        cookie = b";".join([pair, *kept])
        known = self._sizes.get(name)
        if known is None or size > known:
            too_many = known is None and len(self._sizes) >= COOKIES_PER_HOST
            total = sum(self._sizes.values()) - (known or 0) + size
            if too_many or len(cookie) > COOKIE_BYTES or total > COOKIE_BYTES_PER_HOST:
                return None
        self._sizes[name] = size
        return cookie


def _named(headers: Iterable[tuple[bytes, bytes]]) -> Iterator[tuple[bytes, bytes]]:
    """Return name and ``name=value`` of each cookie in a request, without nameless ones."""
    for header, value in headers:
        if header == b"cookie":
            for part in value.split(b";"):
                pair = part.strip()
                name, equals, _ = pair.partition(b"=")
                if equals and name.strip():
                    yield name.strip(), pair


def _with_cookies(headers: Headers, pairs: list[bytes]) -> Headers:
    kept = [pair for pair in headers if pair[0] != b"cookie"]
    return [*kept, (b"cookie", b"; ".join(pairs))] if pairs else kept
