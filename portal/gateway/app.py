"""The gateway as one ASGI application: checks the framing, then shows each request to its door."""

from __future__ import annotations

from portal.gateway.activity import Lookout
from portal.gateway.door import WorkspaceDoor
from portal.gateway.framing import METHODS, WEBDAV, fault
from portal.gateway.guard import Guard
from portal.gateway.hosts import addressed
from portal.gateway.pages import say
from portal.gateway.rights import Rights
from portal.gateway.terminals import TerminalDoor
from portal.gateway.upstream import Upstreams
from portal.gateway.web import WebDoor
from portal.gateway.wire import Receive, Scope, Send

TERMINALS = b"/terminals/"


class Gateway:
    """Workspace hosts to their servers, terminals to theirs, everything else to web."""

    def __init__(
        self,
        apps_domain: str,
        *,
        web: WebDoor,
        workspaces: WorkspaceDoor,
        terminals: TerminalDoor,
        rights: Rights,
        guard: Guard,
        upstreams: Upstreams,
        lookout: Lookout,
    ) -> None:
        self._apps_domain = apps_domain
        self._web, self._workspaces, self._terminals = web, workspaces, terminals
        self._rights, self._guard, self._upstreams = rights, guard, upstreams
        self._lookout = lookout

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
            return
        problem = fault(scope["headers"], scope["raw_path"], scope["query_string"])
        if problem is not None:
            await say(send, scope, 400, "ambiguous_request", "Bad request", problem, close=True)
            return
        host = next(value for name, value in scope["headers"] if name == b"host").decode("latin-1")
        workspace = addressed(host, self._apps_domain)
        known = METHODS if workspace is None else METHODS | WEBDAV
        if scope["type"] == "http" and scope["method"] not in known:
            sentence = "This method is not supported here."
            await say(
                send, scope, 405, "method_not_allowed", "Not supported", sentence, allow=known, close=True
            )
        elif workspace is None and scope["raw_path"].startswith(TERMINALS):
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
                self._lookout.start()
                await send({"type": "lifespan.startup.complete"})
            elif message["type"] == "lifespan.shutdown":
                await self._lookout.stop()
                self._guard.close()
                self._terminals.close()
                await self._upstreams.close()
                self._rights.close()
                await send({"type": "lifespan.shutdown.complete"})
                return
