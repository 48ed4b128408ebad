"""The gateway as one ASGI application: checks the framing, then selects the application by host and path."""

from __future__ import annotations

import logging

from django.conf import settings

from portal.gateway.access.authorization import Authorizer
from portal.gateway.access.authorization_monitor import AuthorizationMonitor
from portal.gateway.activity import ActivityTracker
from portal.gateway.addresses import match_app_host
from portal.gateway.apps.portal_app import PortalApp
from portal.gateway.apps.service_app import ServiceApp
from portal.gateway.apps.terminal_app import TerminalApp
from portal.gateway.apps.workspace_app import WorkspaceApp
from portal.gateway.asgi_types import Receive, Scope, Send
from portal.gateway.protocol.error_responses import GatewayError, send_error
from portal.gateway.protocol.framing import METHODS, WEBDAV, framing_error
from portal.gateway.protocol.headers import single_header
from portal.gateway.proxy.upstreams import Upstreams

log = logging.getLogger(__name__)

TERMINALS_PREFIX = b"/terminals/"


class Gateway:
    """Route the hosts of workspaces and services, and terminals, to their servers, everything else to web."""

    def __init__(self) -> None:
        if settings.SAME_SITE_WARNING:
            log.warning(settings.SAME_SITE_WARNING)
        self._upstreams = Upstreams()
        self._authorizer = Authorizer()
        self._monitor = AuthorizationMonitor(self._authorizer)
        self._activity = ActivityTracker(self._authorizer, self._monitor, self._upstreams)
        self._web = PortalApp(self._upstreams)
        self._workspaces = WorkspaceApp(self._authorizer, self._monitor, self._upstreams, self._activity)
        self._services = ServiceApp(self._upstreams)
        self._terminals = TerminalApp(self._upstreams, self._activity)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
            return
        try:
            await self._dispatch(scope, receive, send)
        except GatewayError as error:
            await send_error(send, scope, receive, error)

    async def _dispatch(self, scope: Scope, receive: Receive, send: Send) -> None:
        problem = framing_error(scope["headers"], scope["raw_path"], scope["query_string"])
        if problem is not None:
            raise GatewayError(400, "ambiguous_request", "Bad request", problem, close=True)
        host = (single_header(scope["headers"], b"host") or b"").decode("latin-1")
        app = match_app_host(host, settings.APPS_DOMAIN)
        known = METHODS if app is None else METHODS | WEBDAV
        if scope["type"] == "http" and scope["method"] not in known:
            message = "This method is not supported here."
            raise GatewayError(405, "method_not_allowed", "Not supported", message, allow=known, close=True)
        if app is not None:
            user_content = self._services if app.is_service else self._workspaces
            await user_content(app.name, scope, receive, send)
        elif scope["raw_path"].startswith(TERMINALS_PREFIX):
            await self._terminals(scope, receive, send)
        else:
            await self._web(scope, receive, send)

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        while True:
            message = await receive()
            if message["type"] == "lifespan.startup":
                await self._terminals.start()
                self._activity.start()
                self._services.start()
                await send({"type": "lifespan.startup.complete"})
            elif message["type"] == "lifespan.shutdown":
                await self._activity.stop()
                await self._services.stop()
                self._monitor.close()
                self._terminals.close()
                await self._upstreams.close()
                self._authorizer.close()
                await send({"type": "lifespan.shutdown.complete"})
                return
