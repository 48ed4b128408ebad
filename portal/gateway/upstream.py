"""Connections to what stands behind the gateway: web on its socket, nodes by TCP or through a tunnel."""

from __future__ import annotations

import asyncio

import aiohttp
from aiohttp import ClientTimeout

from portal.gateway.rights import NodeAddress
from portal.gateway.tunnels import Tunnels

CONNECT_WITHIN_S = 5.0

_NOTHING_OF_ITS_OWN = ("User-Agent", "Accept", "Accept-Encoding", "Content-Type")


def _session(connector: aiohttp.BaseConnector) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=connector,
        auto_decompress=False,
        cookie_jar=aiohttp.DummyCookieJar(),
        skip_auto_headers=_NOTHING_OF_ITS_OWN,
        timeout=ClientTimeout(total=None, sock_connect=CONNECT_WITHIN_S),
        read_bufsize=256 * 1024,
        max_line_size=16 * 1024,
        max_field_size=16 * 1024,
    )


class Upstreams:
    """One client session for web and one for each node, made when first needed and reused."""

    def __init__(self, web_socket: str, tunnels: Tunnels) -> None:
        self._web_socket = web_socket
        self._tunnels = tunnels
        self._web: aiohttp.ClientSession | None = None
        self._nodes: dict[str, tuple[NodeAddress, aiohttp.ClientSession]] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def web(self) -> aiohttp.ClientSession:
        """The session to web. Idle connections are dropped before web would drop them (5 s)."""
        if self._web is None:
            self._web = _session(aiohttp.UnixConnector(self._web_socket, limit=0, keepalive_timeout=3.0))
        return self._web

    def node(self, node: NodeAddress) -> aiohttp.ClientSession:
        """The session to the job ports of a node; one that moved gets a new session."""
        found = self._nodes.get(node.public_id)
        if found is not None and found[0] == node:
            return found[1]
        session = _session(self._tunnels.connector(node))
        self._nodes[node.public_id] = (node, session)
        if found is not None:
            self._close_later(found[1])
        return session

    async def close(self) -> None:
        """Closes everything."""
        sessions = [session for _, session in self._nodes.values()]
        if self._web is not None:
            sessions.append(self._web)
        self._nodes.clear()
        self._web = None
        for session in sessions:
            await session.close()
        await self._tunnels.close()

    def _close_later(self, session: aiohttp.ClientSession) -> None:
        task = asyncio.create_task(session.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
