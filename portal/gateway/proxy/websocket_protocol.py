"""A browser's WebSocket as raw bytes: uvicorn transfers the connection after the request head.

After both handshakes bytes are relayed unparsed, so that fragments, pings, subprotocols and compression
concern only browser and tool, and a message costs at most two copies. Only frame lengths towards the browser
are tracked, so that a close frame of the gateway is sent between two frames.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable
from typing import Any

from portal.gateway.asgi_types import Headers, Message
from portal.gateway.protocol.error_responses import response_head

HIGH_WATER_BYTES = 256 * 1024
WEBSOCKET_EXTENSION = "fairway.websocket"
KEEPALIVE_S = 30


class FrameTracker:
    """Track frame boundaries in a byte stream; ``on_frame`` is called with the opcode of each."""

    __slots__ = ("_head", "_on_frame", "_remaining")

    def __init__(self, on_frame: Callable[[int], None] | None = None) -> None:
        self._on_frame = on_frame
        self._remaining = 0
        self._head = b""

    @property
    def between_frames(self) -> bool:
        return not self._remaining and not self._head

    def feed(self, data: bytes) -> None:
        left = self._remaining
        size = len(data)
        if left >= size:
            self._remaining = left - size
            return
        position = left
        if self._head:
            data = self._head + data[position:]
            size, position, self._head = len(data), 0, b""
        while position < size:
            rest = size - position
            if rest < 2:
                break
            length = data[position + 1] & 0x7F
            extra = 2 if length == 126 else 8 if length == 127 else 0
            masked = 4 if data[position + 1] & 0x80 else 0
            if rest < 2 + extra:
                break
            if extra:
                length = int.from_bytes(data[position + 2 : position + 2 + extra], "big")
            if self._on_frame is not None:
                self._on_frame(data[position] & 0x0F)
            end = position + 2 + extra + masked + length
            if end > size:
                self._remaining = end - size
                return
            position = end
        self._remaining = 0
        self._head = data[position:]


class RelayEndpoint(asyncio.Protocol):
    """One side of a relay; received bytes are written to the other side, with backpressure."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.peer: RelayEndpoint | None = None
        self.is_closed = False
        self._pending: list[bytes] = []

    def attach(self, other: RelayEndpoint) -> None:
        """Relay to the other side from now on, starting with bytes already received."""
        self.peer = other
        for data in self._pending:
            self.relay(data)
        self._pending = []
        if self.is_closed:
            other.close()

    def relay(self, data: bytes) -> None:
        other = self.peer
        if other is None:
            self._pending.append(data)
        else:
            other.write(data)

    def write(self, data: bytes) -> None:
        if self.transport is not None and not self.is_closed:
            self.transport.write(data)

    def close(self) -> None:
        """Send buffered bytes, then close."""
        if self.transport is not None and not self.is_closed:
            self.transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]
        enable_keepalive(transport)
        if isinstance(transport, asyncio.WriteTransport):
            transport.set_write_buffer_limits(high=HIGH_WATER_BYTES)

    def data_received(self, data: bytes) -> None:
        self.relay(data)

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, problem: Exception | None) -> None:
        self.is_closed = True
        if self.peer is not None:
            self.peer.close()

    def pause_writing(self) -> None:
        if self.peer is not None and self.peer.transport is not None and not self.peer.is_closed:
            self.peer.transport.pause_reading()

    def resume_writing(self) -> None:
        if self.peer is not None and self.peer.transport is not None and not self.peer.is_closed:
            self.peer.transport.resume_reading()


def enable_keepalive(transport: asyncio.BaseTransport) -> None:
    """Enable TCP keepalive, so that the kernel detects a vanished peer."""
    wire = transport.get_extra_info("socket")
    if wire is None or wire.family not in (socket.AF_INET, socket.AF_INET6):
        return
    wire.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_S)
    wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_S // 3)
    wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)


class RawWebSocketProtocol(RelayEndpoint):
    """The protocol of upgraded connections (uvicorn's ``ws`` option): calls the application, then relays.

    The application receives a WebSocket scope whose extension ``fairway.websocket`` is this object. It
    refuses with ``websocket.http.response``, or attaches another endpoint.
    """

    def __init__(self, config: Any, server_state: Any, app_state: dict[str, Any], **_: Any) -> None:
        super().__init__()
        self._app = config.loaded_app
        self._state = server_state
        self._task: asyncio.Task[None] | None = None
        self._status: tuple[int, Headers] | None = None
        self.is_upgraded = False
        self.disconnected = asyncio.get_running_loop().create_future()
        self.frames = FrameTracker()
        self.on_data: Callable[[bytes], None] | None = None  # also receives the browser's bytes

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._state.connections.add(self)

    def data_received(self, data: bytes) -> None:
        if self._task is not None:
            if self.is_upgraded:
                if self.on_data is not None:
                    self.on_data(data)
                self.relay(data)
            else:
                self.close()  # data before the handshake is answered is an error
            return
        self._task = asyncio.get_running_loop().create_task(self._serve(self._scope(data)))
        self._state.tasks.add(self._task)
        self._task.add_done_callback(self._state.tasks.discard)

    def connection_lost(self, problem: Exception | None) -> None:
        super().connection_lost(problem)
        self._state.connections.discard(self)
        if not self.disconnected.done():
            self.disconnected.set_result(None)

    def shutdown(self) -> None:
        """Send a close frame because the server stops."""
        self.send_close(1012, "")
        self.close()

    def upgrade(self, headers: Headers) -> None:
        """Answer the handshake with 101."""
        self.is_upgraded = True
        self.write(response_head(101, headers))

    def send_close(self, code: int, reason: str) -> None:
        """Send a close frame if the stream is between two frames."""
        if self.is_upgraded and self.frames.between_frames:
            payload = struct.pack("!H", code) + reason.encode()[:123]
            self.write(bytes([0x88, len(payload)]) + payload)

    async def send(self, message: Message) -> None:
        """Send the application's refusal of the handshake."""
        if message["type"] == "websocket.http.response.start":
            self._status = (message["status"], list(message["headers"]))
        elif message["type"] == "websocket.http.response.body" and self._status is not None:
            status, headers = self._status
            self.write(response_head(status, [*headers, (b"connection", b"close")]) + message["body"])
            self.close()

    async def receive(self) -> Message:
        """Return ``websocket.connect``; messages bypass the application."""
        return {"type": "websocket.connect"}

    async def _serve(self, scope: dict[str, Any]) -> None:
        try:
            await self._app(scope, self.receive, self.send)
        finally:
            self.close()

    def _scope(self, head: bytes) -> dict[str, Any]:
        """Return the ASGI scope from the request head that uvicorn wrote."""
        first, *lines = head.removesuffix(b"\r\n\r\n").split(b"\r\n")
        method, target, _ = first.split(b" ", 2)
        path, _, query = target.partition(b"?")
        peer = self.transport.get_extra_info("peername") if self.transport is not None else None
        return {
            "type": "websocket",
            "method": method.decode("ascii"),
            "raw_path": path,
            "path": "",
            "query_string": query,
            "headers": [tuple(line.split(b": ", 1)) for line in lines],
            "client": (str(peer[0]), int(peer[1])) if isinstance(peer, tuple) and len(peer) >= 2 else None,
            "extensions": {WEBSOCKET_EXTENSION: self, "websocket.http.response": {}},
        }
