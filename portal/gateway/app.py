"""The gateway as one ASGI application: checks the framing, then selects the application by host and path."""

from __future__ import annotations

from portal.gateway.access.authorization import Authorizer
from portal.gateway.access.authorization_monitor import AuthorizationMonitor
from portal.gateway.activity import ActivityTracker
from portal.gateway.addresses import match_workspace_host
from portal.gateway.apps.portal_app import PortalApp
from portal.gateway.apps.terminal_app import TerminalApp
from portal.gateway.apps.workspace_app import WorkspaceApp
from portal.gateway.asgi_types import Receive, Scope, Send
from portal.gateway.protocol.error_responses import send_error
from portal.gateway.protocol.framing import METHODS, WEBDAV, framing_error
from portal.gateway.proxy.upstreams import Upstreams

TERMINALS_PREFIX = b"/terminals/"


class Gateway:
    """Route workspace hosts and terminals to their servers, everything else to web."""

    def __init__(
        self,
        apps_domain: str,
        *,
        web: PortalApp,
        workspaces: WorkspaceApp,
        terminals: TerminalApp,
        authorizer: Authorizer,
        monitor: AuthorizationMonitor,
        upstreams: Upstreams,
        activity: ActivityTracker,
    ) -> None:
        self._apps_domain = apps_domain
        self._web, self._workspaces, self._terminals = web, workspaces, terminals
        self._authorizer, self._monitor, self._upstreams = authorizer, monitor, upstreams
        self._activity = activity

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
            return
        problem = framing_error(scope["headers"], scope["raw_path"], scope["query_string"])
        if problem is not None:
            await send_error(send, scope, 400, "ambiguous_request", "Bad request", problem, close=True)
            return
        host = next(value for name, value in scope["headers"] if name == b"host").decode("latin-1")
        workspace = match_workspace_host(host, self._apps_domain)
        known = METHODS if workspace is None else METHODS | WEBDAV
        if scope["type"] == "http" and scope["method"] not in known:
            message = "This method is not supported here."
            await send_error(
                send, scope, 405, "method_not_allowed", "Not supported", message, allow=known, close=True
            )
        elif workspace is None and scope["raw_path"].startswith(TERMINALS_PREFIX):
            await self._terminals(scope, receive, send)
        elif workspace is None:
            await self._web(scope, receive, send)
        else:
            await self._workspaces(workspace.workspace, scope, receive, send)

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        while True:
            message = await receive()
            if message["type"] == "lifespan.startup":
                await self._terminals.start()
                self._activity.start()
                await send({"type": "lifespan.startup.complete"})
            elif message["type"] == "lifespan.shutdown":
                await self._activity.stop()
                self._monitor.close()
                self._terminals.close()
                await self._upstreams.close()
                self._authorizer.close()
                await send({"type": "lifespan.shutdown.complete"})
                return
