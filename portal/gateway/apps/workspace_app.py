"""A workspace's origin: exact-origin checks, redemption of tickets, and the proxy to its server."""

from __future__ import annotations

import logging
import os
from functools import partial
from urllib.parse import parse_qs

from django.conf import settings

from portal.access import AccessPolicy, access_policy
from portal.gateway.access.authorization import (
    AccessRefusal,
    AuthorizationUnavailableError,
    Authorizer,
    Target,
)
from portal.gateway.access.authorization_monitor import ActiveGrant, AuthorizationMonitor
from portal.gateway.activity import ActivityTracker
from portal.gateway.addresses import portal_origin, public_scheme, workspace_origin
from portal.gateway.asgi_types import Headers, Receive, Scope, Send
from portal.gateway.protocol import cookies
from portal.gateway.protocol import headers as rules
from portal.gateway.protocol.error_responses import GatewayError, build_response, send_response
from portal.gateway.proxy.http_client import NoResponseError
from portal.gateway.proxy.http_proxy import ProxiedRequest, proxy_http
from portal.gateway.proxy.upstreams import Upstreams
from portal.gateway.proxy.websocket_proxy import HandshakeRejectedError, proxy_websocket
from portal.services.workspaces.access import ENTER_PATH

log = logging.getLogger(__name__)

MAX_TICKET_BODY_BYTES = 4096
GATEWAY_PATH_PREFIX = b"/.fairway/"


def workspace_cookie() -> bytes:
    """Return the name of the cookie of a workspace session."""
    return b"__Host-fairway_workspace" if settings.HTTPS_ENABLED else b"fairway_workspace"


def is_cross_site(scope: Scope, headers: Headers, origin: str) -> bool:
    """Return whether another site's page made the browser send the request.

    A workspace's cookie is SameSite=Lax, and two workspaces may be the same site: only the exact origin
    proves that a request came from the workspace's own page. A plain navigation (a bookmark, a link) may come
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


@access_policy(AccessPolicy.WORKSPACE)
class WorkspaceApp:
    """Answer every request to a name ``ws-...`` below the apps domain."""

    def __init__(
        self,
        authorizer: Authorizer,
        monitor: AuthorizationMonitor,
        upstreams: Upstreams,
        activity: ActivityTracker,
    ) -> None:
        self._authorizer, self._monitor = authorizer, monitor
        self._upstreams, self._activity = upstreams, activity
        # the largest body; None: no limit besides the tool's
        self._max_upload_bytes = int(os.environ.get("FAIRWAY_WORKSPACE_UPLOAD_MIB") or 0) * 1024**2 or None

    async def __call__(self, job: str, scope: Scope, receive: Receive, send: Send) -> None:
        websocket = scope["type"] == "websocket"
        if not websocket and scope["raw_path"].startswith(GATEWAY_PATH_PREFIX):
            await self._serve_gateway_path(job, scope, receive, send)
            return
        cookie = cookies.read_cookie(scope["headers"], workspace_cookie())
        try:
            decision = await self._authorizer.decide(job, cookie)
        except AuthorizationUnavailableError as problem:
            log.warning("access to %s could not be checked: %s", job, problem)
            raise GatewayError(
                503,
                "unavailable",
                "Fairway cannot check your permissions at the moment",
                "Its database does not respond. The workspace keeps running. Try again in a moment.",
                retry_after_s=5,
            ) from problem
        if not isinstance(decision, Target):
            raise _refusal_error(decision, job)
        if is_cross_site(scope, scope["headers"], workspace_origin(job)):
            message = "The request came from a page of another site."
            raise GatewayError(403, "foreign_origin", "Refused", message)
        self._activity.record_request(decision, scope)
        proxied = self._proxied_request(scope, job, cookie, decision)
        try:
            if websocket:
                await proxy_websocket(proxied, scope)
            else:
                await proxy_http(proxied, scope, receive, send)
        except HandshakeRejectedError as problem:
            message = "The workspace refused this connection."
            raise GatewayError(problem.status, "refused_by_tool", "Refused", message) from problem
        except NoResponseError as problem:
            log.info("no response from workspace %s on %s: %s", job, decision.node, problem)
            self._authorizer.invalidate(job)
            raise GatewayError(
                502,
                "workspace_unreachable",
                "The workspace does not respond",
                "Its node cannot be reached, or its server is starting or stopping. Try again in a moment.",
                link=_portal_link(),
                retry_after_s=5,
            ) from problem

    # -- internal ----------------------------------------------------------------------------------

    def _proxied_request(self, scope: Scope, job: str, cookie: str, target: Target) -> ProxiedRequest:
        kept = rules.upstream_request_headers(scope["headers"], drop=(b"authorization",))
        host = rules.single_header(scope["headers"], b"host") or b""
        passed = cookies.tool_headers(kept)
        passed += rules.forwarded_headers(None, public_scheme(), host)
        passed.append((b"authorization", target.authorization.encode("ascii")))
        return ProxiedRequest(
            pool=self._upstreams.port(target.address, target.port),
            headers=passed,
            response_headers=lambda pairs: rules.tool_response_headers(
                pairs,
                secure=settings.HTTPS_ENABLED,
                sent=scope["headers"],
                ports={target.port, target.tool_port},
            ),
            max_body_bytes=self._max_upload_bytes,
            watch=partial(self._monitor.watch, ActiveGrant(job, cookie, target)),
        )

    async def _serve_gateway_path(self, job: str, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve the gateway's own paths on a workspace's origin: only the redemption of tickets."""
        if scope["raw_path"] != ENTER_PATH.encode():
            raise GatewayError(404, "not_found", "Not found", "There is nothing at this address.")
        if scope["method"] != "POST":
            raise GatewayError(
                405,
                "method_not_allowed",
                "Open it from the portal",
                "Open a workspace from its page in the portal.",
                link=_portal_link(),
                allow=["POST"],
            )
        sent = rules.single_header(scope["headers"], b"origin")
        if sent is not None and sent.decode("latin-1") != portal_origin():
            # Otherwise another site's page could sign the browser in to that site's workspace.
            message = "The ticket came from a page of another site."
            raise GatewayError(403, "foreign_origin", "Refused", message)
        ticket = await _read_ticket(receive)
        try:
            cookie = await self._authorizer.redeem(ticket, job) if ticket and job else None
        except AuthorizationUnavailableError as problem:
            log.warning("a ticket could not be checked: %s", problem)
            raise GatewayError(
                503,
                "unavailable",
                "Fairway cannot check your ticket at the moment",
                "Its database does not respond. Go back and open the workspace again.",
                link=_portal_link(),
                retry_after_s=5,
            ) from problem
        if cookie is None:
            raise GatewayError(
                403,
                "ticket_refused",
                "This ticket is not valid",
                "A ticket is valid once, for 30 seconds. Go back to the portal and open the workspace again.",
                link=_portal_link(),
            )
        self._authorizer.invalidate(job)
        crumb = f"{workspace_cookie().decode()}={cookie}; Path=/; HttpOnly; SameSite=Lax"
        if settings.HTTPS_ENABLED:
            crumb += "; Secure"
        status, headers, body = build_response(303, "entered", "Welcome", "Opening the workspace.")
        headers += [(b"location", b"/"), (b"set-cookie", crumb.encode())]
        await send_response(send, (status, headers, body))


_REFUSALS = {
    AccessRefusal.DENIED: (
        403,
        "no_session",
        "Open this workspace from the portal",
        "You are not signed in here. Open the workspace from its page in the portal.",
    ),
    AccessRefusal.STOPPED: (
        410,
        "workspace_stopped",
        "This workspace has stopped",
        "Its files are kept. Start or resume it from the portal.",
    ),
    AccessRefusal.NOT_READY: (
        503,
        "workspace_not_ready",
        "This workspace is starting",
        "Its server does not respond yet. The portal shows its progress.",
    ),
}


def _refusal_error(refusal: AccessRefusal, job: str) -> GatewayError:
    link = _portal_link("/" if refusal is AccessRefusal.DENIED else f"/jobs/{job}/")
    retry_after_s = 2 if refusal is AccessRefusal.NOT_READY else None
    return GatewayError(*_REFUSALS[refusal], link=link, retry_after_s=retry_after_s)


def _portal_link(path: str = "/") -> tuple[str, str]:
    return portal_origin() + path, "To the portal"


async def _read_ticket(receive: Receive) -> str:
    """Return the field ``ticket`` of a small form; "" for anything else."""
    body = b""
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return ""
        body += message.get("body", b"")
        if len(body) > MAX_TICKET_BODY_BYTES:
            return ""
        if not message.get("more_body", False):
            break
    try:
        values = parse_qs(body.decode("ascii"), strict_parsing=True, max_num_fields=4).get("ticket", [])
    except (UnicodeDecodeError, ValueError):
        return ""
    return values[0] if len(values) == 1 and len(values[0]) <= 200 else ""
