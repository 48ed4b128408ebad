"""Joins the two one-way pipes of a stream (``agents.tunnel.mux``) into one asyncio transport."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from typing import Any, cast

from agents.tunnel.mux import Pipes, StreamRequest

HIGH_WATER_BYTES = 256 * 1024
CONNECTION_LOST_MESSAGE = "the connection to the node was lost"
LINGER_TIMEOUT_S = 5.0
"""How long the node's side may continue after the local close before the stream is cut."""


class TunnelStream(asyncio.Transport):
    """Transport that reports the end to its protocol when both pipes have ended."""

    def __init__(
        self,
        request: StreamRequest,
        protocol: asyncio.Protocol,
        peer: str,
        is_connected: Callable[[], Awaitable[bool]],
    ) -> None:
        super().__init__(extra={"peername": peer})
        self._is_connected = is_connected
        self._report_task: asyncio.Task[None] | None = None
        self._loop = asyncio.get_running_loop()
        self._request = request
        self._protocol = protocol
        self._inbound: asyncio.ReadTransport | None = None
        self._outbound: asyncio.WriteTransport | None = None
        self._inbound_closed = self._outbound_closed = False
        self._half_open = self._closing = self._close_reported = self._peer_closed = False
        self._problem: Exception | None = None

    async def connect_pipes(self, pipes: Pipes) -> None:
        """Connect the pipes to the protocol."""
        reader, writer = os.fdopen(pipes.read, "rb", 0), os.fdopen(pipes.write, "wb", 0)
        try:
            outward, _ = await self._loop.connect_write_pipe(lambda: _OutboundProtocol(self), writer)
            self._outbound = outward
            outward.set_write_buffer_limits(high=HIGH_WATER_BYTES)
            await self._loop.connect_read_pipe(lambda: _InboundProtocol(self), reader)
        except BaseException:
            self.abort()
            if self._outbound is None:
                writer.close()
            if self._inbound is None:
                reader.close()
            raise

    # ---- callbacks of the pipes ----

    def on_inbound_connected(self, inward: asyncio.ReadTransport) -> None:
        self._inbound = inward
        self._protocol.connection_made(self)

    def on_data(self, data: bytes) -> None:
        if self._closing:
            return
        try:
            self._protocol.data_received(data)
        except Exception as error:  # an error in one stream must not affect others
            reported = {"message": "a protocol failed", "exception": error, "transport": self}
            self._loop.call_exception_handler(reported)
            self.abort()

    def on_eof(self) -> None:
        self._peer_closed = not self._closing
        self._half_open = bool(self._protocol.eof_received()) if not self._closing else False

    def on_inbound_closed(self, problem: Exception | None) -> None:
        self._inbound_closed = True
        self._problem = self._problem or problem
        if not self._half_open:
            self.close()
        if self._request.ended:
            self.on_stream_end()
        self._finish_if_closed()

    def on_outbound_closed(self) -> None:
        self._outbound_closed = True  # remaining data from the node is still read
        self._finish_if_closed()

    def pause_writing(self) -> None:
        self._protocol.pause_writing()

    def resume_writing(self) -> None:
        self._protocol.resume_writing()

    def on_stream_end(self) -> None:
        """Stop writing; received data is still read."""
        if self._inbound_closed and not self._outbound_closed and self._outbound is not None:
            self._outbound.abort()

    def _finish_if_closed(self) -> None:
        if self._inbound_closed and self._outbound_closed and not self._close_reported:
            self._close_reported = self._closing = True
            if not self._request.ended:
                self._loop.call_later(LINGER_TIMEOUT_S, self._request.close)
            if self._peer_closed and self._problem is None:
                self._report_task = self._loop.create_task(self._report_close())
            else:
                self._protocol.connection_lost(self._problem)

    async def _report_close(self) -> None:
        """Report the end; tell a closed stream from a lost connection to the node, which look alike."""
        there = await self._is_connected()
        self._protocol.connection_lost(None if there else ConnectionResetError(CONNECTION_LOST_MESSAGE))

    # ---- asyncio.Transport ----

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self._outbound is not None and not self._outbound_closed:
            self._outbound.write(data)

    def writelines(self, list_of_data: Any) -> None:
        self.write(b"".join(list_of_data))

    def write_eof(self) -> None:
        if self._outbound is not None and not self._outbound_closed:
            self._outbound.write_eof()

    def can_write_eof(self) -> bool:
        return True

    def close(self) -> None:
        if not self._closing:
            self._closing = True
            self._close_pipes(at_once=False)

    def abort(self) -> None:
        self._closing = True
        self._close_pipes(at_once=True)
        self._request.close()

    def _close_pipes(self, *, at_once: bool) -> None:
        if self._inbound is not None and not self._inbound_closed:
            self._inbound.close()
        if self._outbound is not None and not self._outbound_closed:
            if at_once:
                self._outbound.abort()
            else:
                self._outbound.close()

    def is_closing(self) -> bool:
        return self._closing

    def pause_reading(self) -> None:
        if self._inbound is not None and not self._inbound_closed:
            self._inbound.pause_reading()

    def resume_reading(self) -> None:
        if self._inbound is not None and not self._inbound_closed:
            self._inbound.resume_reading()

    def is_reading(self) -> bool:
        return self._inbound is not None and not self._inbound_closed and self._inbound.is_reading()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        if self._outbound is not None:
            self._outbound.set_write_buffer_limits(high, low)

    def get_write_buffer_size(self) -> int:
        return self._outbound.get_write_buffer_size() if self._outbound is not None else 0

    def get_write_buffer_limits(self) -> tuple[int, int]:
        return self._outbound.get_write_buffer_limits() if self._outbound is not None else (0, 0)

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._protocol = cast(asyncio.Protocol, protocol)

    def get_protocol(self) -> asyncio.BaseProtocol:
        return self._protocol


class _InboundProtocol(asyncio.Protocol):
    def __init__(self, stream: TunnelStream) -> None:
        self._stream = stream
        self.data_received = stream.on_data  # type: ignore[method-assign]

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._stream.on_inbound_connected(cast(asyncio.ReadTransport, transport))

    def eof_received(self) -> None:
        self._stream.on_eof()

    def connection_lost(self, problem: Exception | None) -> None:
        self._stream.on_inbound_closed(problem)


class _OutboundProtocol(asyncio.Protocol):
    def __init__(self, stream: TunnelStream) -> None:
        self._stream = stream

    def connection_lost(self, problem: Exception | None) -> None:
        self._stream.on_outbound_closed()

    def pause_writing(self) -> None:
        self._stream.pause_writing()

    def resume_writing(self) -> None:
        self._stream.resume_writing()
