"""Connection pools of upstreams: web on its unix socket, job ports directly or through a tunnel."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from agents.ssh import SshTarget
from agents.tunnel.pool import LocalTarget, TunnelPool, TunnelTarget
from portal.domain.states import NodeTransport
from portal.gateway.access.authorization import NodeAddress
from portal.gateway.proxy.http_client import UpstreamPool

WEB_CONNECT_TIMEOUT_S = 2.0
WEB_MAX_IDLE_S = 3.0
"""Web closes idle connections after 5 s; closing them earlier avoids a close under a request."""
NODE_MAX_IDLE_S = 15.0
MAX_POOLS = 2_000


class Upstreams:
    """One pool for web and one for each job port in use. The tunnels belong to the running loop."""

    def __init__(self, web_socket: str, tunnel_key: Path | None, tunnel_folder: Path) -> None:
        self._web_socket = web_socket
        self._tunnel_key = tunnel_key
        self._tunnel_folder = tunnel_folder
        self._tunnels: TunnelPool | None = None
        self._ports: dict[tuple[NodeAddress, int], UpstreamPool] = {}
        self._web = UpstreamPool(self._connect_web, max_idle_s=WEB_MAX_IDLE_S)

    def web(self) -> UpstreamPool:
        """Return the pool of web."""
        return self._web

    def port(self, node: NodeAddress, port: int) -> UpstreamPool:
        """Return the pool of a job port on a node."""
        found = self._ports.get((node, port))
        if found is None:
            if len(self._ports) >= MAX_POOLS:
                self._ports = {key: way for key, way in self._ports.items() if not way.is_empty}
            found = self._ports[(node, port)] = UpstreamPool(
                self._connector(node, port), max_idle_s=NODE_MAX_IDLE_S
            )
        return found

    async def close(self) -> None:
        for way in [self._web, *self._ports.values()]:
            way.close()
        if self._tunnels is not None:
            await self._tunnels.close()

    async def _connect_web(
        self, protocol: Callable[[], asyncio.Protocol]
    ) -> tuple[asyncio.Transport, asyncio.Protocol]:
        async with asyncio.timeout(WEB_CONNECT_TIMEOUT_S):
            return await asyncio.get_running_loop().create_unix_connection(protocol, self._web_socket)

    def _connector(self, node: NodeAddress, port: int) -> Any:
        if self._tunnels is None:
            key = self._tunnel_key or Path("/nonexistent/tunnel-key")
            self._tunnels = TunnelPool(key, parent_dir=self._tunnel_folder)
        pool, place = self._tunnels, _ssh_target(node)

        async def connect(
            protocol: Callable[[], asyncio.Protocol],
        ) -> tuple[asyncio.Transport, asyncio.Protocol]:
            return await pool.create_connection(protocol, place, port)

        return connect


def _ssh_target(node: NodeAddress) -> TunnelTarget:
    if node.link == NodeTransport.LOCAL.value:
        return LocalTarget()
    return SshTarget(host=node.host, user=node.account, host_key=node.host_key, port=node.port)
