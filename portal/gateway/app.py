"""The gateway as one ASGI application: checks the framing, then shows each request to its door."""

from __future__ import annotations

from portal.gateway.door import WorkspaceDoor
from portal.gateway.framing import METHODS, WEBDAV, fault
from portal.gateway.guard import Guard
from portal.gateway.hosts import addressed
from portal.gateway.pages import answer, page, wants_json
from portal.gateway.rights import Rights
from portal.gateway.upstream import Upstreams
from portal.gateway.web import WebDoor
from portal.gateway.wire import Receive, Scope, Send


class Gateway:
    """Workspace hosts to their servers, everything else to web."""

    def __init__(
        self,
        apps_domain: str,
        *,
        web: WebDoor,
        workspaces: WorkspaceDoor,
        rights: Rights,
        guard: Guard,
        upstreams: Upstreams,
    ) -> None:
        self._apps_domain = apps_domain
        self._web, self._workspaces = web, workspaces
        self._rights, self._guard, self._upstreams = rights, guard, upstreams

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
            return
        problem = fault(scope["headers"], scope["raw_path"], scope["query_string"])
        if problem is not None:
            await self._refuse(scope, send, 400, "ambiguous_request", "Bad request", problem)
            return
        host = next(value for name, value in scope["headers"] if name == b"host").decode("latin-1")
        workspace = addressed(host, self._apps_domain)
        known = METHODS if workspace is None else METHODS | WEBDAV
        if scope["type"] == "http" and scope["method"] not in known:
            await self._refuse(
                scope, send, 405, "method_not_allowed", "Not supported", "This method is not supported here."
            )
        elif workspace is None:
            await self._web(scope, receive, send)
        else:
            await self._workspaces(workspace.workspace, scope, receive, send)

    async def _refuse(
        self, scope: Scope, send: Send, status: int, code: str, title: str, sentence: str
    ) -> None:
        status, headers, body = page(
            status,
            code,
            title,
            sentence,
            json_wanted=wants_json(scope["headers"]) or scope["path"].startswith("/api/"),
        )
        headers.append((b"connection", b"close"))
        await answer(send, (status, headers, body), websocket=scope["type"] == "websocket")

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        while True:
            message = await receive()
            if message["type"] == "lifespan.startup":
                await send({"type": "lifespan.startup.complete"})
            elif message["type"] == "lifespan.shutdown":
                self._guard.close()
                await self._upstreams.close()
                self._rights.close()
                await send({"type": "lifespan.shutdown.complete"})
                return
