"""Proxy to web for pages, REST and sockets: everything that is not a workspace, over a unix socket."""

from __future__ import annotations

import logging

from django.conf import settings
from django.utils.translation import gettext_noop as _

from portal.access import AccessPolicy, access_policy
from portal.config import variables
from portal.domain.storage.uploads import UPLOAD_TIMEOUT_S, is_upload_path
from portal.gateway.addresses import public_scheme
from portal.gateway.asgi_types import Headers, Receive, Scope, Send
from portal.gateway.protocol import cookies
from portal.gateway.protocol import headers as rules
from portal.gateway.protocol.error_responses import GatewayError
from portal.gateway.proxy.http_client import NoResponseError
from portal.gateway.proxy.http_proxy import ProxiedRequest, proxy_http
from portal.gateway.proxy.upstreams import Upstreams
from portal.gateway.proxy.websocket_proxy import HandshakeRejectedError, proxy_websocket
from portal.tracking.endpoints import ARTIFACT_TIMEOUT_S, is_artifact_path

log = logging.getLogger(__name__)

RESPONSE_TIMEOUT_S = 9.0
"""A web process that does not start to answer by then counts as down; no request hangs for 10 s."""

MAX_BODY_BYTES = 2 * 1024 * 1024
"""Twice Django's in-memory limit; web would write a larger body to disk before it refuses it."""


@access_policy(AccessPolicy.PUBLIC)
class PortalApp:
    """Proxy a request to web, which applies its own access policies.

    FAIRWAY_TRUSTED_PROXIES lists the peers whose report of the browser's address is trusted.
    """

    def __init__(self, upstreams: Upstreams) -> None:
        self._upstreams = upstreams
        self._trusted_peers = frozenset(variables.TRUSTED_PROXIES.read())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        timeout_s, max_body_bytes = _limits(scope["raw_path"].decode("latin-1"))
        proxied = ProxiedRequest(
            pool=self._upstreams.web,
            headers=self._headers(scope),
            response_headers=rules.client_response_headers,
            response_timeout_s=timeout_s,
            max_body_bytes=max_body_bytes,
        )
        try:
            if scope["type"] == "websocket":
                await proxy_websocket(proxied, scope)
            else:
                await proxy_http(proxied, scope, receive, send)
        except HandshakeRejectedError as error:
            message = "The portal refused this connection."
            raise GatewayError(error.status, "refused", "Refused", message) from error
        except NoResponseError as error:
            log.warning("web does not respond: %s", error)
            raise GatewayError(
                503,
                "unavailable",
                _("The portal does not respond"),
                _(
                    "It is starting or under maintenance. Jobs and workspaces keep running. Try again in a moment."
                ),
                retry_after_s=5,
            ) from error

    def _headers(self, scope: Scope) -> Headers:
        passed = cookies.portal_headers(rules.upstream_request_headers(scope["headers"]))
        host = rules.single_header(scope["headers"], b"host") or b""
        return passed + rules.forwarded_headers(self._client(scope), public_scheme(), host)

    def _client(self, scope: Scope) -> str | None:
        """Return the browser's address: the peer's, or the one that a trusted proxy reports."""
        peer: str | None = scope["client"][0] if scope.get("client") else None
        if peer in self._trusted_peers:
            for name, value in reversed(scope["headers"]):
                if name == b"x-forwarded-for":
                    return value.decode("latin-1").rpartition(",")[2].strip() or peer
        return peer


def _limits(path: str) -> tuple[float, int]:
    """Return the time for an answer to a path, in seconds, and the size of its body."""
    if is_artifact_path(path):
        return ARTIFACT_TIMEOUT_S + 2, settings.MAX_ARTIFACT_BYTES
    if is_upload_path(path):
        return UPLOAD_TIMEOUT_S + 2, settings.MAX_UPLOAD_BYTES + MAX_BODY_BYTES
    return RESPONSE_TIMEOUT_S, MAX_BODY_BYTES
