"""URLs in a tool's responses: in a browser, a loopback URL refers to the user's own machine."""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Collection
from urllib.parse import unquote

_ABSOLUTE = re.compile(
    r"(?:(?:https?|wss?):[/\\]*|[/\\]{2,})(?P<authority>[^/\\?#]*)(?P<rest>.*)", re.I | re.S
)
"""As browsers parse it: any number of slashes, and backslashes too."""
_REFRESH = re.compile(r"(?P<delay>[^;,]*[;,]\s*(?:url\s*=\s*)?)(?P<quote>[\"']?)(?P<address>.*)", re.I | re.S)
_IGNORED_BY_BROWSERS = str.maketrans("", "", "\t\r\n")


def rewrite_location(value: bytes, ports: Collection[int]) -> bytes | None:
    """Return the value of Location, Content-Location or Refresh for the browser.

    A loopback URL with one of the tool's own ``ports`` becomes a path on the workspace's origin. None for
    every other loopback URL: it would lead the browser to a program on the user's machine.
    """
    text = value.decode("latin-1").translate(_IGNORED_BY_BROWSERS).strip()
    prefix = ""
    refresh = _REFRESH.fullmatch(text) if text[:1].isdigit() or text[:1] == "." else None
    if refresh is not None:
        prefix, text = refresh["delay"], refresh["address"].removesuffix(refresh["quote"]).strip()
    found = _ABSOLUTE.fullmatch(text)
    if found is None:
        return value
    host, port = _split(found["authority"])
    if not _is_loopback(host):
        return value
    if port not in ports:
        return None
    return (prefix + "/" + found["rest"].lstrip("/\\")).encode("latin-1")


def _split(authority: str) -> tuple[str, int | None]:
    """Return host and port of ``user@host:port``; None if the port is missing or invalid."""
    place = authority.rpartition("@")[2]
    host, colon, port = place.rpartition(":")
    if not colon or place.endswith("]"):
        host, port = place, ""
    return host.strip("[]"), int(port) if port.isdecimal() and len(port) <= 5 else None


def _is_loopback(host: str) -> bool:
    name = unquote(host).lower().rstrip(".")
    if name == "localhost":
        return True
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        try:
            # also accepts 127.1, 0x7f000001 and 2130706433
            address = ipaddress.IPv4Address(socket.inet_aton(name))
        except (OSError, UnicodeError):
            return False
    mapped = getattr(address, "ipv4_mapped", None) or address
    return bool(mapped.is_loopback or mapped.is_unspecified)
