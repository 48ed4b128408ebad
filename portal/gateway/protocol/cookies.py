"""Cookies at the gateway: the portal's own reach no tool, a tool's stay on its host and within bounds. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from portal.gateway.asgi_types import Headers

PORTAL_COOKIES = (b"fairway_", b"__host-fairway_", b"__secure-fairway_")
COOKIES_PER_HOST = 50
COOKIE_BYTES = 4096
COOKIE_BYTES_PER_HOST = 8192
"""Half of what common servers accept for all headers together; more would lock a user out of the tool."""


def is_portal_cookie(name: bytes) -> bool:
    """True for names that belong to the portal and its gateway; tools neither see nor set them."""
    return name.strip().lower().startswith(PORTAL_COOKIES)


def read_cookie(headers: Headers, cookie_name: bytes) -> str:
    """The value of a cookie, or ""."""
    for name, pair in _named(headers):
        if name == cookie_name:
            return pair.partition(b"=")[2].decode("latin-1")
    return ""


def portal_headers(headers: Headers) -> Headers:
    """The request's headers with the portal's own cookies only.

    A page on a related domain can set cookies for the portal's host; without them it cannot fill up its requests.
    """
    return _with_cookies(headers, [pair for name, pair in _named(headers) if is_portal_cookie(name)])


def tool_headers(headers: Headers) -> Headers:
    """The request's headers without the portal's cookies, nameless cookies and those beyond the bounds of a host."""
    kept: list[bytes] = []
    left_bytes = COOKIE_BYTES_PER_HOST
    for name, pair in _named(headers):
        if not is_portal_cookie(name) and len(pair) <= left_bytes and len(kept) < COOKIES_PER_HOST:
            kept.append(pair)
            left_bytes -= len(pair)
    return _with_cookies(headers, kept)


class ToolCookies:
    """The cookies that a tool may set in one answer, given those that the browser sent with the request."""

    def __init__(self, sent: Headers) -> None:
        self._sizes = {name: len(pair) for name, pair in _named(sent) if not is_portal_cookie(name)}

    def accept(self, value: bytes) -> bytes | None:
        """A Set-Cookie bound to the tool's own host (no Domain); None where it must not reach the browser.

        Dropped are nameless cookies, the portal's names, and what would exceed the bounds of a host. A cookie that
        gets no longer always passes, so that a tool can remove its own.
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
    """Name and ``name=value`` of each cookie in a request; nameless ones are left out."""
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
