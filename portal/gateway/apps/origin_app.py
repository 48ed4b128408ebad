"""What the origins of workspaces and services share: exact-origin checks and the redemption of tickets."""

from __future__ import annotations

import logging
import re
from urllib.parse import parse_qs

from django.conf import settings
from django.utils.translation import gettext_noop as _

from portal.gateway.access.authorization import (
    CACHE_TTL_S,
    AccessDecision,
    AuthorizationUnavailableError,
    Authorizer,
)
from portal.gateway.access.authorization_monitor import AuthorizationMonitor
from portal.gateway.addresses import portal_origin
from portal.gateway.asgi_types import Headers, Receive, Scope, Send
from portal.gateway.protocol import headers as rules
from portal.gateway.protocol.error_responses import GatewayError, build_response, send_response
from portal.gateway.proxy.upstreams import Upstreams
from portal.services.workspaces.access import ENTER_PATH

log = logging.getLogger(__name__)

MAX_TICKET_BODY_BYTES = 4096
PATH_OF_ORIGIN = re.compile(r"/(?:[A-Za-z0-9._~!$&'()*+,;=:@%-][A-Za-z0-9._~!$&'()*+,;=:@%/-]{0,1900})?")
"""A path that stays on the origin: ``//name`` would be another host."""
GATEWAY_PATH_PREFIX = b"/.fairway/"


def workspace_cookie() -> bytes:
    """Return the name of the cookie of a session on the origin of a workspace or service."""
    return b"__Host-fairway_workspace" if settings.HTTPS_ENABLED else b"fairway_workspace"


def is_cross_site(scope: Scope, headers: Headers, origin: str) -> bool:
    """Return whether another site's page made the browser send the request.

    Its cookie is SameSite=Lax, and two origins may be the same site: only the exact origin proves that a request
    came from the application's own page. A plain navigation (a bookmark, a link) may come
    from anywhere.
    """
    sent = rules.single_header(headers, b"origin")
    if scope["type"] == "websocket":
        return sent is None or sent.decode("latin-1") != origin
    if sent is not None and sent.decode("latin-1") != origin:
        return True
    site = rules.single_header(headers, b"sec-fetch-site")
    if site in (None, b"same-origin", b"none"):
        return False
    return not (
        scope["method"] in ("GET", "HEAD")
        and rules.single_header(headers, b"sec-fetch-mode") == b"navigate"
        and rules.single_header(headers, b"sec-fetch-dest") == b"document"
    )


class OriginApp:
    """An application with an origin of its own for each workspace or service (``name``: its public id)."""

    def __init__(self, authorizer: Authorizer, monitor: AuthorizationMonitor, upstreams: Upstreams) -> None:
        self._authorizer, self._monitor, self._upstreams = authorizer, monitor, upstreams

    async def _decide(self, name: str, credential: str, *, max_age_s: float = CACHE_TTL_S) -> AccessDecision:
        """Return the decision. Raise GatewayError if the database does not answer."""
        try:
            return await self._authorizer.decide(name, credential, max_age_s=max_age_s)
        except AuthorizationUnavailableError as error:
            log.warning("access to %s could not be checked: %s", name, error)
            raise GatewayError(
                503,
                "unavailable",
                _("Fairway cannot check your permissions at the moment"),
                _("Its database does not respond. Everything keeps running. Try again in a moment."),
                retry_after_s=5,
            ) from error

    async def _serve_gateway_path(self, name: str, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve the gateway's own paths on the origin: only the redemption of tickets."""
        if scope["raw_path"] != ENTER_PATH.encode():
            raise GatewayError(404, "not_found", _("Not found"), _("There is nothing at this address."))
        if scope["method"] != "POST":
            raise GatewayError(
                405,
                "method_not_allowed",
                _("Open it from the portal"),
                _("Open it from its page in the portal."),
                link=portal_link(),
                allow=["POST"],
            )
        sent = rules.single_header(scope["headers"], b"origin")
        if sent is not None and sent.decode("latin-1") != portal_origin():
            # Otherwise another site's page could sign the browser in to that site's application.
            message = _("The ticket came from a page of another site.")
            raise GatewayError(403, "foreign_origin", _("Refused"), message)
        ticket, path = await _read_ticket(receive)
        try:
            cookie = await self._authorizer.redeem(ticket, name) if ticket and name else None
        except AuthorizationUnavailableError as error:
            log.warning("a ticket could not be checked: %s", error)
            raise GatewayError(
                503,
                "unavailable",
                _("Fairway cannot check your ticket at the moment"),
                _("Its database does not respond. Go back and open it again."),
                link=portal_link(),
                retry_after_s=5,
            ) from error
        if cookie is None:
            raise GatewayError(
                403,
                "ticket_refused",
                _("This ticket is not valid"),
                _("A ticket is valid once, for 30 seconds. Go back to the portal and open it again."),
                link=portal_link(),
            )
        self._authorizer.invalidate(name)
        crumb = f"{workspace_cookie().decode()}={cookie}; Path=/; HttpOnly; SameSite=Lax"
        if settings.HTTPS_ENABLED:
            crumb += "; Secure"
        status, headers, body = build_response(303, "entered", "Welcome", "Opening it.")
        headers += [(b"location", path.encode("ascii")), (b"set-cookie", crumb.encode())]
        await send_response(send, (status, headers, body))


def portal_link(path: str = "/") -> tuple[str, str]:
    return portal_origin() + path, _("To the portal")


def redirect_error(address: str) -> GatewayError:
    """Return the page instead of a redirect that is not followed."""
    message = _(
        "It redirects to {address}. Fairway does not follow this address: it cannot be read without doubt, or it "
        "names your own computer. Addresses of the server itself and of other sites are followed."
    )
    return GatewayError(
        502,
        "redirect_refused",
        _("This redirect is not followed"),
        message,
        link=("/", _("To its first page")),
        values={"address": "".join(each if each.isprintable() else "\ufffd" for each in address[:200])},
    )


async def _read_ticket(receive: Receive) -> tuple[str, str]:
    """Return the fields ``ticket`` and ``path`` of a small form; "" and "/" for anything else."""
    body = b""
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return "", "/"
        body += message.get("body", b"")
        if len(body) > MAX_TICKET_BODY_BYTES:
            return "", "/"
        if not message.get("more_body", False):
            break
    try:
        fields = parse_qs(body.decode("ascii"), strict_parsing=True, max_num_fields=4)
    except (UnicodeDecodeError, ValueError):
        return "", "/"
    tickets, paths = fields.get("ticket", []), fields.get("path", [])
    path = paths[0] if len(paths) == 1 and PATH_OF_ORIGIN.fullmatch(paths[0]) else "/"
    return (tickets[0] if len(tickets) == 1 and len(tickets[0]) <= 200 else ""), path
