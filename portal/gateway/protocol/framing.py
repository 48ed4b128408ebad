"""Refuses requests that two parsers could read differently."""

from __future__ import annotations

import re

from portal.gateway.asgi_types import Headers

_TARGET = re.compile(rb"/[\x21-\x7e]*")
_QUERY = re.compile(rb"[\x21-\x7e]*")
_TOKEN = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_BAD_VALUE = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")
_SINGLE_HEADERS = frozenset({b"host", b"content-length", b"transfer-encoding", b"origin", b"authorization"})
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
WEBDAV = frozenset({"PROPFIND", "PROPPATCH", "MKCOL", "COPY", "MOVE", "LOCK", "UNLOCK", "REPORT", "SEARCH"})


def framing_error(headers: Headers, raw_path: bytes, query: bytes) -> str | None:
    """Return why a request is refused with 400, as a message; None if it is unambiguous."""
    if not _TARGET.fullmatch(raw_path) or not _QUERY.fullmatch(query):
        return "The URL contains invalid characters."
    seen: set[bytes] = set()
    for name, value in headers:
        if not _TOKEN.fullmatch(name) or _BAD_VALUE.search(value):
            return "A header is malformed."
        if name in _SINGLE_HEADERS:
            if name in seen:
                return f"The header {name.decode()} is repeated."
            seen.add(name)
            if name == b"content-length" and not value.isdigit():
                return "The length of the body is not a number."
            if name == b"transfer-encoding" and value.strip().lower() != b"chunked":
                return "Only the transfer encoding chunked is supported."
    if b"host" not in seen:
        return "The Host header is missing."
    if b"content-length" in seen and b"transfer-encoding" in seen:
        return "The body has two lengths."
    return None
