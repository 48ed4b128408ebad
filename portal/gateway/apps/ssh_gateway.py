"""Serves SSH connections on WebSockets: a thread for each, streams to the node over the gateway's tunnels."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import logging
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from django.conf import settings

from agents.keys import derive_host_key
from agents.ssh_server import SshConnection, open_authenticated
from portal.gateway.access.authorization import AccessDecision, AccessRefusal, Authorizer, Target
from portal.gateway.access.authorization_monitor import ActiveGrant, AuthorizationMonitor
from portal.gateway.asgi_types import Headers, Scope
from portal.gateway.protocol.error_responses import GatewayError
from portal.gateway.protocol.headers import single_header
from portal.gateway.proxy.http_client import NoResponseError
from portal.gateway.proxy.upstreams import Upstreams
from portal.gateway.proxy.websocket_protocol import WEBSOCKET_EXTENSION, RawWebSocketProtocol, RelayEndpoint
from portal.services.workspaces.terminals import OPEN_TIMEOUT

log = logging.getLogger(__name__)

MAX_CONNECTIONS = 200
"""In this gateway; each takes a thread, and two for each shell, command or forwarded connection."""
CONNECT_TIMEOUT_S = 15.0
POLL_INTERVAL_S = 0.1
_BEARER_PREFIX = b"bearer "
_WEBSOCKET_GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"


def bearer_token(headers: Headers) -> str | None:
    """Return the API token of a request; None when it has none."""
    value = single_header(headers, b"authorization") or b""
    return value[7:].strip().decode("latin-1") if value[:7].lower() == _BEARER_PREFIX else None


class SshGateway:
    """The SSH connections of this gateway."""

    def __init__(self, upstreams: Upstreams, authorizer: Authorizer, monitor: AuthorizationMonitor) -> None:
        self._upstreams, self._authorizer, self._monitor = upstreams, authorizer, monitor
        self._threads = ThreadPoolExecutor(MAX_CONNECTIONS, thread_name_prefix="ssh")
        self._open: set[SshConnection] = set()

    def close(self) -> None:
        for connection in self._open:
            connection.close("The gateway stopped.")
        self._threads.shutdown(wait=False)

    async def wait_until_open(self, name: str, token: str) -> AccessDecision:
        """Return the decision once the node has answered. Raise AuthorizationUnavailableError."""
        until_s = asyncio.get_running_loop().time() + OPEN_TIMEOUT.total_seconds()
        while True:
            decision = await self._authorizer.decide(name, token, max_age_s=0.0)
            if decision is not AccessRefusal.NOT_READY or asyncio.get_running_loop().time() >= until_s:
                return decision
            await asyncio.sleep(POLL_INTERVAL_S)

    async def serve(
        self, scope: Scope, grant: ActiveGrant, target: Target, on_input: Callable[[], None]
    ) -> str:
        """Serve a client until it leaves or its permission for the target ends; return why it ended."""
        client: RawWebSocketProtocol = scope["extensions"][WEBSOCKET_EXTENSION]
        key = single_header(scope["headers"], b"sec-websocket-key")
        if scope["method"] != "GET" or not key:
            raise GatewayError(400, "bad_handshake", "Bad request", "This is no handshake of a WebSocket.")
        if len(self._open) >= MAX_CONNECTIONS:
            message = f"This gateway has {MAX_CONNECTIONS} SSH connections. Try again later."
            raise GatewayError(503, "too_many_connections", "Not now", message, retry_after_s=60)
        loop = asyncio.get_running_loop()
        connect = partial(self._connect_blocking, loop, target)
        secret = target.authorization.removeprefix("Bearer ")
        open_stream = partial(open_authenticated, connect, secret)
        try:
            holder = await loop.run_in_executor(self._threads, open_stream)
        except OSError as error:
            log.info("cannot open an SSH connection on %s: %s", target.node, error)
            message = "Its node is not reachable at the moment."
            raise GatewayError(502, "terminal_unreachable", "Not now", message) from error
        ours, theirs = socket.socketpair()
        _, wire = await loop.create_connection(RelayEndpoint, sock=theirs)
        accept = base64.b64encode(hashlib.sha1(key + _WEBSOCKET_GUID).digest())  # noqa: S324  (RFC 6455 names it)
        client.upgrade(
            [(b"connection", b"Upgrade"), (b"upgrade", b"websocket"), (b"sec-websocket-accept", accept)]
        )
        client.attach(wire)
        wire.attach(client)
        host_key = derive_host_key(settings.SECRET_KEY)[0]
        connection = SshConnection(ours, holder, host_key, open_stream)
        self._open.add(connection)
        serve = partial(
            connection.serve,
            idle_s=settings.TERMINAL_IDLE_S,
            on_input=partial(loop.call_soon_threadsafe, on_input),
        )
        try:
            with self._monitor.watch(grant, lambda decision: connection.close(_end_text(decision))):
                await loop.run_in_executor(self._threads, serve)
        finally:
            connection.close("The gateway stopped.")
            self._open.discard(connection)
            client.close()
        return connection.reason

    def _connect_blocking(self, loop: asyncio.AbstractEventLoop, target: Target) -> socket.socket:
        """Return a socket to the target from a thread. Raise OSError."""
        joined = asyncio.run_coroutine_threadsafe(self._connect(target), loop)
        try:
            return joined.result(CONNECT_TIMEOUT_S)
        except NoResponseError as error:
            raise OSError(str(error)) from error
        finally:
            joined.cancel()

    async def _connect(self, target: Target) -> socket.socket:
        upstream: RelayEndpoint = await self._upstreams.port(target.address, target.port).connect(
            RelayEndpoint
        )
        ours, theirs = socket.socketpair()
        _, wire = await asyncio.get_running_loop().create_connection(RelayEndpoint, sock=theirs)
        upstream.attach(wire)
        wire.attach(upstream)
        return ours


def _end_text(decision: AccessDecision | None) -> str:
    """Return what a user reads when this decision ended the connection."""
    if decision is None:
        return "Access to it could not be checked for too long."
    if decision is AccessRefusal.DENIED:
        return "Access to it was revoked."
    if decision is AccessRefusal.STOPPED:
        return "The job is stopping or has ended."
    return "The node opened another connection in its place. Connect again."
