"""Joins aiohttp to the ways to a node: its connections come from the pool of tunnels."""

from __future__ import annotations

from pathlib import Path

import aiohttp
from aiohttp.client_proto import ResponseHandler

from agents.ssh import SshTarget
from agents.tunnel import JOB_ADDRESS, LocalPlace, Place, TunnelPool
from portal.gateway.rights import NodeAddress
from portal.words.states import LinkKind

KEEP_IDLE_S = 30.0

__all__ = ["JOB_ADDRESS", "NodeConnector", "Tunnels"]


class NodeConnector(aiohttp.BaseConnector):
    """aiohttp's connections to the job ports of one node; the port comes from the address asked for."""

    def __init__(self, pool: TunnelPool, place: Place) -> None:
        super().__init__(limit=0, keepalive_timeout=KEEP_IDLE_S)
        self._pool, self._place = pool, place

    async def _create_connection(
        self, req: aiohttp.ClientRequest, traces: object, timeout: aiohttp.ClientTimeout
    ) -> ResponseHandler:
        port = req.url.port
        if port is None:
            raise aiohttp.ClientConnectionError("a job's address needs a port")
        try:
            _, protocol = await self._pool.create_connection(self._factory, self._place, port)
        except OSError as problem:
            raise aiohttp.ClientConnectionError(str(problem)) from problem
        return protocol


class Tunnels:
    """Makes a connector for each node. The pool belongs to the running loop, so it comes with the first."""

    def __init__(self, key_path: Path | None) -> None:
        self._key_path = key_path
        self._pool: TunnelPool | None = None

    def connector(self, node: NodeAddress) -> aiohttp.BaseConnector:
        """A connector to the node's job ports."""
        if self._pool is None:
            self._pool = TunnelPool(self._key_path or Path("/nonexistent/tunnel-key"))
        return NodeConnector(self._pool, self._place(node))

    async def close(self) -> None:
        """Closes every tunnel."""
        if self._pool is not None:
            await self._pool.close()

    @staticmethod
    def _place(node: NodeAddress) -> Place:
        if node.link == LinkKind.LOCAL.value:
            return LocalPlace()
        return SshTarget(host=node.host, account=node.account, host_key=node.host_key, port=node.port)
