"""Two one-way pipes as one asyncio transport: what `agents.mux` gives for a stream to a port."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from typing import Any, cast

from agents.mux import Pipes, Request

HIGH_WATER_BYTES = 256 * 1024
LOST = "the connection to the node was lost"
LINGER_S = 5.0
"""How long a node's program may go on after we have closed, before its stream is cut."""


class TunnelStream(asyncio.Transport):
    """The stream. It ends for its protocol when both pipes have ended."""

    def __init__(
        self,
        request: Request,
        protocol: asyncio.Protocol,
        peer: str,
        node_is_there: Callable[[], Awaitable[bool]],
    ) -> None:
        super().__init__(extra={"peername": peer})
        self._node_is_there = node_is_there
        self._telling: asyncio.Task[None] | None = None
        self._loop = asyncio.get_running_loop()
        self._request = request
        self._protocol = protocol
        self._inward: asyncio.ReadTransport | None = None
        self._outward: asyncio.WriteTransport | None = None
        self._read_all = self._written_all = False
        self._half_open = self._closing = self._told = self._far_ended = False
        self._problem: Exception | None = None

    async def begin(self, pipes: Pipes) -> None:
        """Joins the pipes with the protocol."""
        reader, writer = os.fdopen(pipes.read, "rb", 0), os.fdopen(pipes.write, "wb", 0)
        try:
            outward, _ = await self._loop.connect_write_pipe(lambda: _Outward(self), writer)
            self._outward = outward
            outward.set_write_buffer_limits(high=HIGH_WATER_BYTES)
            await self._loop.connect_read_pipe(lambda: _Inward(self), reader)
        except BaseException:
            self.abort()
            if self._outward is None:
                writer.close()
            if self._inward is None:
                reader.close()
            raise

    # ---- what the pipes tell ----

    def made(self, inward: asyncio.ReadTransport) -> None:
        self._inward = inward
        self._protocol.connection_made(self)

    def received(self, data: bytes) -> None:
        if self._closing:
            return
        try:
            self._protocol.data_received(data)
        except Exception as problem:  # one stream's trouble is not that of the others
            told = {"message": "a protocol failed", "exception": problem, "transport": self}
            self._loop.call_exception_handler(told)
            self.abort()

    def ended(self) -> None:
        self._far_ended = not self._closing
        self._half_open = bool(self._protocol.eof_received()) if not self._closing else False

    def inward_lost(self, problem: Exception | None) -> None:
        self._read_all = True
        self._problem = self._problem or problem
        if not self._half_open:
            self.close()
        if self._request.ended:
            self.connection_over()
        self._look_at_end()

    def outward_lost(self) -> None:
        self._written_all = True  # what the node still says is read to its end
        self._look_at_end()

    def pause_writing(self) -> None:
        self._protocol.pause_writing()

    def resume_writing(self) -> None:
        self._protocol.resume_writing()

    def connection_over(self) -> None:
        """Nobody takes what we write any more; what was sent to us is read first."""
        if self._read_all and not self._written_all and self._outward is not None:
            self._outward.abort()

    def _look_at_end(self) -> None:
        if self._read_all and self._written_all and not self._told:
            self._told = self._closing = True
            if not self._request.ended:
                self._loop.call_later(LINGER_S, self._request.close)
            if self._far_ended and self._problem is None:
                self._telling = self._loop.create_task(self._tell_how_it_ended())
            else:
                self._protocol.connection_lost(self._problem)

    async def _tell_how_it_ended(self) -> None:
        """The end of the connection to the node reads like the end of the stream, and is none."""
        there = await self._node_is_there()
        self._protocol.connection_lost(None if there else ConnectionResetError(LOST))

    # ---- asyncio.Transport ----

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self._outward is not None and not self._written_all:
            self._outward.write(data)

    def writelines(self, list_of_data: Any) -> None:
        self.write(b"".join(list_of_data))

    def write_eof(self) -> None:
        if self._outward is not None and not self._written_all:
            self._outward.write_eof()

    def can_write_eof(self) -> bool:
        return True

    def close(self) -> None:
        if not self._closing:
            self._closing = True
            self._end(at_once=False)

    def abort(self) -> None:
        self._closing = True
        self._end(at_once=True)
        self._request.close()

    def _end(self, *, at_once: bool) -> None:
        if self._inward is not None and not self._read_all:
            self._inward.close()
        if self._outward is not None and not self._written_all:
            if at_once:
                self._outward.abort()
            else:
                self._outward.close()

    def is_closing(self) -> bool:
        return self._closing

    def pause_reading(self) -> None:
        if self._inward is not None and not self._read_all:
            self._inward.pause_reading()

    def resume_reading(self) -> None:
        if self._inward is not None and not self._read_all:
            self._inward.resume_reading()

    def is_reading(self) -> bool:
        return self._inward is not None and not self._read_all and self._inward.is_reading()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        if self._outward is not None:
            self._outward.set_write_buffer_limits(high, low)

    def get_write_buffer_size(self) -> int:
        return self._outward.get_write_buffer_size() if self._outward is not None else 0

    def get_write_buffer_limits(self) -> tuple[int, int]:
        return self._outward.get_write_buffer_limits() if self._outward is not None else (0, 0)

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._protocol = cast(asyncio.Protocol, protocol)

    def get_protocol(self) -> asyncio.BaseProtocol:
        return self._protocol


class _Inward(asyncio.Protocol):
    """The pipe from the node."""

    def __init__(self, stream: TunnelStream) -> None:
        self._stream = stream
        self.data_received = stream.received  # type: ignore[method-assign]

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._stream.made(cast(asyncio.ReadTransport, transport))

    def eof_received(self) -> None:
        self._stream.ended()

    def connection_lost(self, problem: Exception | None) -> None:
        self._stream.inward_lost(problem)


class _Outward(asyncio.Protocol):
    """The pipe to the node."""

    def __init__(self, stream: TunnelStream) -> None:
        self._stream = stream

    def connection_lost(self, problem: Exception | None) -> None:
        self._stream.outward_lost()

    def pause_writing(self) -> None:
        self._stream.pause_writing()

    def resume_writing(self) -> None:
        self._stream.resume_writing()
