"""Posts to an address that a user entered, without reaching the inside of the network.

The name is resolved once, every address is checked, and the connection is made to a checked address. Redirects are
not followed, and the whole exchange has one time limit.
"""

from __future__ import annotations

import http.client
import ipaddress
import socket
import ssl
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import SplitResult, urlsplit

from django.utils.translation import gettext as _

from portal.domain.special_addresses import IpAddress, Reach, reach_of

TIME_LIMIT_S = 10.0
MAX_URL_LENGTH = 2000

_resolvers = ThreadPoolExecutor(4, thread_name_prefix="resolve")
"""Threads, because ``getaddrinfo`` has no time limit of its own."""


class WebhookError(Exception):
    """The message was not accepted, or the address must not be used; the text is for the user.

    ``status`` is that of the response, if there was one.
    """

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


def parse_url(url: str) -> SplitResult:
    """Return the parts of a valid http or https address. Raise WebhookError."""
    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        valid = False
    if not valid or len(url) > MAX_URL_LENGTH or not url.isascii() or not url.isprintable() or " " in url:
        raise WebhookError(
            _("Enter an http or https address of at most {max_url_length} characters.").format(
                max_url_length=MAX_URL_LENGTH
            )
        )
    if parts.username is not None or parts.password is not None:
        raise WebhookError(_("The address must not contain a user name or password."))
    return parts


def check_address(address: IpAddress, *, allow_private: bool) -> None:
    """Raise WebhookError for an address inside the network.

    ``allow_private`` permits private and loopback addresses, but never those where clouds offer metadata.
    """
    reach = reach_of(address)
    if reach is Reach.PUBLIC or (allow_private and reach is Reach.PRIVATE):
        return
    if reach is Reach.PRIVATE:
        text = _("{address} is not a public address; administrators can allow private ones.")
    else:
        text = _("{address} is not a public address, and cannot be allowed.")
    raise WebhookError(text.format(address=address))


def post_body(url: str, body: bytes, headers: Mapping[str, str], *, allow_private: bool) -> None:
    """Post ``body``. Raise WebhookError unless the server answers with a status of 200 to 299 in time."""
    parts = parse_url(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    host = str(parts.hostname)
    address = _resolve(host, port, allow_private=allow_private)
    try:
        with socket.create_connection((address, port), TIME_LIMIT_S) as plain, plain.dup() as watched:
            # the time limit of a socket is for one read; this ends an exchange that drips
            watchdog = threading.Timer(TIME_LIMIT_S, _shut_down, [watched])
            watchdog.daemon = True
            watchdog.start()
            try:
                status = _exchange(plain, parts, port, body, headers)
            finally:
                watchdog.cancel()
    except TimeoutError as error:
        raise WebhookError(f"{host} did not answer within {TIME_LIMIT_S:.0f} s.") from error
    except (OSError, http.client.HTTPException, ValueError) as error:
        text = f"{host} did not answer: {error or type(error).__name__}"
        raise WebhookError(text) from error
    if 300 <= status < 400:
        raise WebhookError(f"{host} answered with status {status}; redirects are not followed.")
    if not 200 <= status < 300:
        raise WebhookError(f"{host} answered with status {status}.", status)


def _exchange(
    plain: socket.socket, parts: SplitResult, port: int, body: bytes, headers: Mapping[str, str]
) -> int:
    host = str(parts.hostname)
    connection = http.client.HTTPConnection(host, port, timeout=TIME_LIMIT_S)
    connection.sock = plain
    if parts.scheme == "https":
        connection.default_port = 443  # which the Host header then omits
        connection.sock = ssl.create_default_context().wrap_socket(plain, server_hostname=host)
    try:
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        fixed = {"Content-Type": "application/json", "User-Agent": "Fairway", "Connection": "close"}
        connection.request("POST", target, body, {**fixed, **headers})
        return connection.getresponse().status
    finally:
        connection.close()


def _resolve(host: str, port: int, *, allow_private: bool) -> str:
    """Return an address of the host. Raise WebhookError if one of its addresses must not be used."""
    try:
        found = _resolvers.submit(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM).result(
            TIME_LIMIT_S
        )
    except (OSError, UnicodeError, TimeoutError) as error:
        raise WebhookError(_("The name {host} cannot be resolved.").format(host=host)) from error
    addresses = [str(each[4][0]).partition("%")[0] for each in found]
    for address in addresses:
        check_address(ipaddress.ip_address(address), allow_private=allow_private)
    return addresses[0]


def _shut_down(connection: socket.socket) -> None:
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        return  # it has ended
