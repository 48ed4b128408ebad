"""Client of an OpenSSH control socket: requests a stream to a port, as ``ssh -O`` and ``ssh -W`` do.

Protocol: OpenSSH's PROTOCOL.mux, version 4. A request passes two pipes, which the ssh process connects to a
channel; the reply arrives once the node has opened or refused the channel.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

VERSION = 4


class _MessageType(IntEnum):
    HELLO = 0x00000001
    ALIVE_CHECK = 0x10000004
    NEW_STDIO_FORWARD = 0x10000008
    PERMISSION_DENIED = 0x80000002
    FAILURE = 0x80000003
    ALIVE = 0x80000005
    SESSION_OPENED = 0x80000006


class StreamRefusedError(ConnectionRefusedError):
    """The node refused to open the stream."""


class ProcessExitedError(ConnectionError):
    """The ssh process has ended, or does not answer on its control socket."""


@dataclass
class Pipes:
    """Local ends of the two pipes of a stream."""

    read: int
    write: int

    def close(self) -> None:
        os.close(self.read)
        os.close(self.write)


class StreamRequest(asyncio.Protocol):
    """A request, and then its stream: the stream ends with this connection."""

    def __init__(self) -> None:
        self.reply: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.on_end: Callable[[], None] | None = None
        self.ended = False
        self._transport: asyncio.BaseTransport | None = None
        self._buffer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while len(self._buffer) >= 8:
            end = 4 + int.from_bytes(self._buffer[:4], "big")
            if len(self._buffer) < end:
                return
            self._handle_message(int.from_bytes(self._buffer[4:8], "big"))
            self._buffer = self._buffer[end:]

    def connection_lost(self, problem: Exception | None) -> None:
        self.ended = True
        if not self.reply.done():
            self.reply.set_exception(ProcessExitedError("the ssh process ended"))
        if self.on_end is not None:
            self.on_end()

    def close(self) -> None:
        """End the stream at once, on both sides."""
        if self._transport is not None:
            self._transport.close()

    def _handle_message(self, message_type: int) -> None:
        if self.reply.done():
            return
        if message_type == _MessageType.SESSION_OPENED:
            self.reply.set_result(None)
        elif message_type in (_MessageType.FAILURE, _MessageType.PERMISSION_DENIED):
            self.reply.set_exception(StreamRefusedError("the node opened no stream"))


async def request_stream(control_socket: str, host: str, port: int) -> tuple[StreamRequest, Pipes]:
    """Request a stream; ``reply`` completes when it is open. Raise ProcessExitedError."""
    wire = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    theirs_to_read, write = os.pipe()
    read, theirs_to_write = os.pipe()
    pipes = Pipes(read, write)
    try:
        for end in (theirs_to_read, theirs_to_write, read, write):
            os.set_blocking(end, False)  # also the passed ends: a slow reader must not block the ssh process
        wire.setblocking(False)
        wire.connect(control_socket)
        wire.sendall(
            _packet(_uint32(_MessageType.HELLO), _uint32(VERSION))
            + _packet(
                _uint32(_MessageType.NEW_STDIO_FORWARD), _uint32(0), _string(""), _string(host), _uint32(port)
            )
        )
        for end in (theirs_to_read, theirs_to_write):
            socket.send_fds(wire, [b"\0"], [end])
        _, request = await asyncio.get_running_loop().create_unix_connection(StreamRequest, sock=wire)
    except BaseException as error:
        wire.close()
        pipes.close()
        if isinstance(error, OSError):
            raise ProcessExitedError(f"the ssh process does not respond: {error}") from error
        raise
    finally:
        os.close(theirs_to_read)
        os.close(theirs_to_write)
    return request, pipes


async def is_alive(control_socket: str, timeout_s: float) -> bool:
    """Return True when the process answers on its control socket; False while it is ending."""
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_unix_connection(control_socket)
            try:
                hello = _packet(_uint32(_MessageType.HELLO), _uint32(VERSION))
                writer.write(hello + _packet(_uint32(_MessageType.ALIVE_CHECK), _uint32(0)))
                while True:
                    length = int.from_bytes(await reader.readexactly(4), "big")
                    if (await reader.readexactly(length))[:4] == _uint32(_MessageType.ALIVE):
                        return True
            finally:
                writer.close()
    except BlockingIOError:
        return True  # its queue is full, so the process exists
    except (OSError, EOFError, TimeoutError):
        return False


def _packet(*parts: bytes) -> bytes:
    body = b"".join(parts)
    return _uint32(len(body)) + body


def _uint32(value: int) -> bytes:
    return value.to_bytes(4, "big")


def _string(value: str) -> bytes:
    return _uint32(len(value.encode())) + value.encode()
