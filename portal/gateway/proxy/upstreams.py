"""Connection pools of upstreams: web on its unix socket, job ports directly or through a tunnel."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path

from django.conf import settings

from agents.tunnel.pool import TunnelPool, TunnelTarget
from portal.config import variables
from portal.gateway.proxy.http_client import UpstreamPool

WEB_CONNECT_TIMEOUT_S = 2.0
WEB_MAX_IDLE_S = 3.0
"""Web closes idle connections after 5 s; closing them earlier avoids a close under a request."""
NODE_MAX_IDLE_S = 15.0
MAX_POOLS = 2_000


class Upstreams:
    """One pool for web and one for each job port in use. The tunnels belong to the running loop."""

    def __init__(self) -> None:
        self._web_socket = variables.WEB_SOCKET.read() or str(settings.DATA_DIR / "run" / "web.sock")
        self._tunnels: TunnelPool | None = None
        self._ports: dict[tuple[TunnelTarget, int], UpstreamPool] = {}
        self.web = UpstreamPool(self._connect_web, max_idle_s=WEB_MAX_IDLE_S)

    def port(self, node: TunnelTarget, port: int) -> UpstreamPool:
        found = self._ports.get((node, port))
        if found is None:
            if len(self._ports) >= MAX_POOLS:
                self._ports = {key: way for key, way in self._ports.items() if not way.is_empty}
            connect = partial(self._connect_port, node, port)
            found = self._ports[(node, port)] = UpstreamPool(connect, max_idle_s=NODE_MAX_IDLE_S)
        return found

    async def close(self) -> None:
        for way in [self.web, *self._ports.values()]:
            way.close()
        if self._tunnels is not None:
            await self._tunnels.close()

    async def _connect_web(
        self, protocol: Callable[[], asyncio.Protocol]
    ) -> tuple[asyncio.Transport, asyncio.Protocol]:
        async with asyncio.timeout(WEB_CONNECT_TIMEOUT_S):
            return await asyncio.get_running_loop().create_unix_connection(protocol, self._web_socket)

    async def _connect_port(
        self, node: TunnelTarget, port: int, protocol: Callable[[], asyncio.Protocol]
    ) -> tuple[asyncio.Transport, asyncio.Protocol]:
        if self._tunnels is None:
            key = Path(settings.KEY_FILES["tunnel"] or "/nonexistent/tunnel-key")
            self._tunnels = TunnelPool(key, parent_dir=settings.DATA_DIR / "run" / "tunnels")
        return await self._tunnels.create_connection(protocol, node, port)
