"""The ways to what stands behind the gateway: web on its socket, job ports directly or through a tunnel."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from agents.ssh import SshTarget
from agents.tunnel import LocalPlace, Place, TunnelPool
from portal.gateway.client import Way
from portal.gateway.rights import NodeAddress
from portal.words.states import LinkKind

WEB_WITHIN_S = 2.0
WEB_IDLE_S = 3.0
"""Web drops idle connections after 5 s; ours are dropped before, so that none dies under a request."""
NODE_IDLE_S = 15.0
KEPT_WAYS = 2_000


class Upstreams:
    """A way for web and one for each job port in use. The tunnels belong to the running loop."""

    def __init__(self, web_socket: str, tunnel_key: Path | None, tunnel_folder: Path) -> None:
        self._web_socket = web_socket
        self._tunnel_key = tunnel_key
        self._tunnel_folder = tunnel_folder
        self._pool: TunnelPool | None = None
        self._ports: dict[tuple[NodeAddress, int], Way] = {}
        self._web = Way(self._connect_web, keep_idle_s=WEB_IDLE_S)

    def web(self) -> Way:
        """The way to web."""
        return self._web

    def port(self, node: NodeAddress, port: int) -> Way:
        """The way to a job port of a node."""
        found = self._ports.get((node, port))
        if found is None:
            if len(self._ports) >= KEPT_WAYS:
                self._ports = {key: way for key, way in self._ports.items() if not way.unused}
            found = self._ports[(node, port)] = Way(self._connector(node, port), keep_idle_s=NODE_IDLE_S)
        return found

    async def close(self) -> None:
        """Closes everything."""
        for way in [self._web, *self._ports.values()]:
            way.close()
        if self._pool is not None:
            await self._pool.close()

    async def _connect_web(
        self, protocol: Callable[[], asyncio.Protocol]
    ) -> tuple[asyncio.Transport, asyncio.Protocol]:
        async with asyncio.timeout(WEB_WITHIN_S):
            return await asyncio.get_running_loop().create_unix_connection(protocol, self._web_socket)

    def _connector(self, node: NodeAddress, port: int) -> Any:
        if self._pool is None:
            key = self._tunnel_key or Path("/nonexistent/tunnel-key")
            self._pool = TunnelPool(key, folder=self._tunnel_folder)
        pool, place = self._pool, _place(node)

        async def connect(
            protocol: Callable[[], asyncio.Protocol],
        ) -> tuple[asyncio.Transport, asyncio.Protocol]:
            return await pool.create_connection(protocol, place, port)

        return connect


def _place(node: NodeAddress) -> Place:
    if node.link == LinkKind.LOCAL.value:
        return LocalPlace()
    return SshTarget(host=node.host, account=node.account, host_key=node.host_key, port=node.port)
