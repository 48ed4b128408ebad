"""URLs in a tool's responses: in a browser, a loopback URL refers to the user's own machine.

They are parsed as browsers do (URL Standard: host and IPv4 parser; HTML Standard: Refresh). What cannot be
parsed is dropped, since browsers may read it in different ways.
"""

from __future__ import annotations

import ipaddress
import re
import unicodedata
from collections.abc import Collection
from typing import NamedTuple
from urllib.parse import unquote_to_bytes

from portal.domain.special_addresses import embedded_ipv4
from portal.gateway.addresses import is_public_address, public_scheme

_SCHEME = re.compile(r"([a-z][a-z0-9+.-]*):", re.I)
_DEFAULT_PORTS = {"http": 80, "https": 443, "ws": 80, "wss": 443}
_REFRESH = re.compile(
    r"(?P<time>[0-9]+(?:\.[0-9.]*)?|\.[0-9.]*)(?:(?P<separator>[;,\s][;,\s]*(?:url\s*=\s*)?)(?P<address>.*))?",
    re.I | re.S,
)
_IGNORED_BY_BROWSERS = str.maketrans("", "", "\t\r\n")
_TRIMMED_BY_BROWSERS = "".join(map(chr, range(0x21)))
_FORBIDDEN_IN_DOMAINS = re.compile(r"[\x00-\x20\"#%/:<>?@\[\\\]^`{|}\x7f]")
_NUMBER = re.compile(r"0x[0-9a-f]*|[0-9]+")
_IGNORED_IN_DOMAINS = re.compile("[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u3164\ufe00-\ufe0f\uffa0]")
_LOOPBACK_NAMES = frozenset(
    {
        "localhost",
        "localhost.localdomain",
        "localhost4",
        "localhost4.localdomain4",
        "localhost6",
        "localhost6.localdomain6",
        "ip6-localhost",
        "ip6-loopback",
    }
)
"""``localhost``, and what the hosts files of Linux distributions call it."""
_LINK_TARGET = re.compile(rb"<([^>]*)>?")
_THIS_HOST = ipaddress.IPv4Network("0.0.0.0/8")


class UnreadableAddressError(ValueError):
    """A browser refuses the URL, or browsers read it in different ways."""


class _Url(NamedTuple):
    host: str
    port: int
    is_loopback: bool
    rest: str  # path, query and fragment


def rewrite_location(value: bytes, ports: Collection[int]) -> bytes | None:
    """Return the value of Location, Content-Location or, if it starts with a number, Refresh for the browser.

    A loopback URL with one of the tool's own ``ports`` becomes a path on the workspace's origin. None for
    every other loopback URL, since it would lead the browser to a program on the user's machine, and for one
    that cannot be parsed.
    """
    if value[:1].isdigit() or value[:1] == b".":
        return rewrite_refresh(value, ports)
    return rewrite_address(value, ports)


def rewrite_address(value: bytes, ports: Collection[int]) -> bytes | None:
    """As ``rewrite_location``, for a header that contains nothing but a URL."""
    text, encoding = _decode(value)
    try:
        address = _rewrite(text, ports)
    except UnreadableAddressError:
        return None
    return None if address is None else (value if address == text else address.encode(encoding))


def rewrite_refresh(value: bytes, ports: Collection[int]) -> bytes | None:
    """Return a Refresh that all browsers read in the same way; None if they ignore it or it is dropped."""
    text, encoding = _decode(value)
    match = _REFRESH.fullmatch(text.strip(_TRIMMED_BY_BROWSERS))
    if match is None:
        return None
    separator, address = match["separator"], match["address"]
    if not address:
        return match["time"].encode()
    if (quote := address[0]) in "\"'":
        address = address[1:].partition(quote)[0]
    try:
        rewritten = _rewrite(address, ports)
    except UnreadableAddressError:
        return None
    if rewritten is None:
        return None
    if separator.count(";") + separator.count(",") != 1:
        separator = "; url="
    # a quote or "url" at the start of the address would be read as syntax
    plain = rewritten.replace('"', "%22").replace("'", "%27")
    if "=" not in separator and plain[:3].lower() == "url":
        separator = "; url="
    return (match["time"] + separator + plain).encode(encoding)


def rewrite_links(value: bytes, ports: Collection[int]) -> bytes | None:
    """As ``rewrite_address``, for each target of a Link header; None if one of them is dropped."""
    dropped = False

    def rewritten(target: re.Match[bytes]) -> bytes:
        nonlocal dropped
        address = rewrite_address(target[1], ports)
        dropped = dropped or address is None
        return b"<%b>" % (address or b"")

    links = _LINK_TARGET.sub(rewritten, value)
    return None if dropped else links


def _decode(value: bytes) -> tuple[str, str]:
    """Return the text as browsers read it, and the encoding that gives the same bytes."""
    try:
        return value.decode("utf-8"), "utf-8"
    except UnicodeDecodeError:
        return value.decode("latin-1"), "latin-1"


def _rewrite(text: str, ports: Collection[int]) -> str | None:
    """Return the address, or a path instead; None if it leads to the user's machine."""
    url = _parse(text)
    if url is None or not url.is_loopback or is_public_address(url.host, url.port):
        return text
    return "/" + url.rest.lstrip("/\\") if url.port in ports else None


def _parse(text: str) -> _Url | None:
    """Return the parts of a URL with a host; None for one that stays on the origin.

    Raise UnreadableAddressError. ``http:name`` without slashes, which is a path on an origin of the same scheme
    and a host on others, counts as a host.
    """
    text = text.strip(_TRIMMED_BY_BROWSERS).translate(_IGNORED_BY_BROWSERS)
    match = _SCHEME.match(text)
    scheme = match[1].lower() if match else public_scheme()
    rest = text[match.end() :] if match else text
    if scheme not in _DEFAULT_PORTS:
        raise UnreadableAddressError("Only http and https are followed.")
    if match is None and not re.match(r"[/\\]{2}", rest):
        return None
    rest = rest.lstrip("/\\")  # any number of slashes, and backslashes too
    authority = re.split(r"[/\\?#]", rest, maxsplit=1)[0]
    name, port = _split_port(authority.rpartition("@")[2], _DEFAULT_PORTS[scheme])
    host = _parse_host(name)
    return _Url(str(host), port, _is_loopback(host), rest[len(authority) :])


def _split_port(place: str, default: int) -> tuple[str, int]:
    bracket = place.rfind("]")
    colon = place.find(":", bracket + 1)
    if colon < 0:
        return place, default
    port = place[colon + 1 :]
    if not port:
        return place[:colon], default
    if not (port.isascii() and port.isdigit() and len(port) <= 100) or int(port) > 65_535:
        raise UnreadableAddressError("The port is not a number up to 65535.")
    return place[:colon], int(port)


def _parse_host(name: str) -> str | ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Return a domain in lower case or an address (URL Standard, host parser)."""
    if name.startswith("["):
        if not name.endswith("]") or "%" in name:
            raise UnreadableAddressError("The IPv6 address is not closed or has a zone.")
        try:
            return ipaddress.IPv6Address(name[1:-1])
        except ValueError as error:
            raise UnreadableAddressError(str(error)) from error
    domain = _domain_to_ascii(unquote_to_bytes(name).decode("utf-8", "replace"))
    if not domain or _FORBIDDEN_IN_DOMAINS.search(domain):
        raise UnreadableAddressError("The host is empty or contains a character that no host may have.")
    parts = domain.split(".")
    if parts[-1] == "" and len(parts) > 1:
        parts.pop()
    if parts[-1].isdigit() or _NUMBER.fullmatch(parts[-1]):
        return _parse_ipv4(parts)
    return domain


def _domain_to_ascii(domain: str) -> str:
    """Return the domain as its mapping (UTS 46) compares it; international names stay as they are."""
    mapped = unicodedata.normalize("NFKC", _IGNORED_IN_DOMAINS.sub("", domain)).casefold()
    mapped = "".join(each for each in mapped if unicodedata.category(each) != "Cf")
    return unicodedata.normalize("NFKC", _IGNORED_IN_DOMAINS.sub("", mapped)).replace("\u3002", ".")


def _parse_ipv4(parts: list[str]) -> ipaddress.IPv4Address:
    """Return the address of one to four numbers in decimal, octal or hexadecimal."""
    if len(parts) > 4 or not all(_NUMBER.fullmatch(part) for part in parts):
        raise UnreadableAddressError("The IPv4 address is malformed.")
    numbers = [_parse_number(part) for part in parts]
    last = numbers.pop()
    if any(number > 255 for number in numbers) or last >= 256 ** (4 - len(numbers)):
        raise UnreadableAddressError("A number of the IPv4 address is too large.")
    return ipaddress.IPv4Address(
        last + sum(number * 256 ** (3 - index) for index, number in enumerate(numbers))
    )


def _parse_number(part: str) -> int:
    if part.startswith("0x"):
        return int(part[2:] or "0", 16)
    try:
        return int(part, 8 if len(part) > 1 and part[0] == "0" else 10)
    except ValueError as error:
        raise UnreadableAddressError("The IPv4 address is malformed.") from error


def _is_loopback(host: str | ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    if isinstance(host, str):
        name = host.rstrip(".")
        return name in _LOOPBACK_NAMES or name.endswith(".localhost")
    if isinstance(host, ipaddress.IPv6Address):
        compatible = ipaddress.IPv4Address(int(host)) if 1 < int(host) < 2**32 else None
        host = compatible or embedded_ipv4(host) or host
    return host.is_loopback or host in _THIS_HOST or host.is_unspecified
