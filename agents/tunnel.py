"""Streams to the ports of jobs: direct on this machine, through one shared SSH connection on any other node."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import paramiko
from paramiko.common import cMSG_CHANNEL_WINDOW_ADJUST
from paramiko.transport import ChannelMap

from agents.channel_stream import ChannelStream, Inbox, Sender, WindowCondition
from agents.ssh import STEP_LIMIT_S, SshConnection, SshError, SshTarget, SshTransport, connect_with_key
from agents.watchdog import WATCHDOG

JOB_ADDRESS = "127.77.0.1"
IDLE_CLOSE_S = 60.0
RETRY_PAUSE_S = 1.0
WINDOW_BYTES = 2 * 1024 * 1024
PACKET_BYTES = 128 * 1024
OPENING_THREADS = 8

_Protocol = TypeVar("_Protocol", bound=asyncio.Protocol)


@dataclass(frozen=True)
class LocalPlace:
    """This machine as a node: its job ports are reached without SSH."""

    address: str = JOB_ADDRESS


Place = LocalPlace | SshTarget


class TunnelError(ConnectionError):
    """The way to the node is down; the message is a sentence for people."""


class PortRefused(ConnectionRefusedError):
    """The node is there, but nothing listens on the job's port (yet, or any more)."""


class TunnelPool:
    """Opens streams to (place, port). Belongs to one event loop; holds one SSH connection per node in use.

    A connection opens with the first stream, is opened anew when it broke, and closes after a minute without
    streams. aiohttp uses it by a connector whose `_create_connection` awaits `create_connection`.
    """

    def __init__(self, key_path: Path, *, idle_close_s: float = IDLE_CLOSE_S) -> None:
        self._key_path = key_path
        self._idle_close_s = idle_close_s
        self._nodes: dict[SshTarget, _NodeTunnel] = {}
        self._threads = ThreadPoolExecutor(OPENING_THREADS, thread_name_prefix="tunnel-open")
        self._sweeper: asyncio.Task[None] | None = None

    async def create_connection(
        self, protocol_factory: Callable[[], _Protocol], place: Place, port: int
    ) -> tuple[asyncio.Transport, _Protocol]:
        """Connects a protocol to a job's port, as the loop's own `create_connection` does.

        Raises PortRefused when nothing listens there, TunnelError when the node cannot be reached.
        """
        loop = asyncio.get_running_loop()
        if isinstance(place, LocalPlace):
            return await self._connect_locally(protocol_factory, place, port)
        tunnel = self._nodes.setdefault(place, _NodeTunnel(place, self._key_path))
        if self._sweeper is None or self._sweeper.done():
            self._sweeper = loop.create_task(self._close_idle())
        connection, channel = await loop.run_in_executor(self._threads, tunnel.open_channel, port)
        protocol = protocol_factory()
        return connection.start(loop, channel, protocol, f"{place.host}:{port}"), protocol

    async def open_stream(self, place: Place, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Gives reader and writer of a stream to a job's port. Raises as `create_connection` does."""
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(loop=loop)
        transport, protocol = await self.create_connection(
            lambda: asyncio.StreamReaderProtocol(reader, loop=loop), place, port
        )
        return reader, asyncio.StreamWriter(transport, protocol, reader, loop)

    async def close(self) -> None:
        """Closes every connection and the streams over it."""
        if self._sweeper is not None:
            self._sweeper.cancel()
        loop = asyncio.get_running_loop()
        for tunnel in self._nodes.values():
            await loop.run_in_executor(self._threads, tunnel.close)
        self._nodes.clear()
        self._threads.shutdown(wait=False)

    async def _connect_locally(
        self, protocol_factory: Callable[[], _Protocol], place: LocalPlace, port: int
    ) -> tuple[asyncio.Transport, _Protocol]:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(STEP_LIMIT_S):
                transport, protocol = await loop.create_connection(protocol_factory, place.address, port)
        except ConnectionRefusedError as error:
            raise PortRefused(f"Nothing listens on port {port} of this machine's jobs.") from error
        except (OSError, TimeoutError) as error:
            raise TunnelError(f"Port {port} of this machine's jobs does not answer: {error}.") from error
        return transport, protocol

    async def _close_idle(self) -> None:
        loop = asyncio.get_running_loop()
        while self._nodes:
            await asyncio.sleep(min(self._idle_close_s, 5.0))
            for place, tunnel in list(self._nodes.items()):
                if tunnel.idle_for_s() > self._idle_close_s:
                    del self._nodes[place]
                    await loop.run_in_executor(self._threads, tunnel.close)


class _NodeTunnel:
    """The one connection to a node; its methods block and run in the pool's threads."""

    def __init__(self, target: SshTarget, key_path: Path) -> None:
        self._target = target
        self._key_path = key_path
        self._lock = threading.Lock()
        self._connection: _TunnelConnection | None = None
        self._failed: tuple[float, SshError] | None = None
        self._opening = 0

    def open_channel(self, port: int) -> tuple[_TunnelConnection, Any]:
        """Opens a channel to a port of a job, connecting first when there is no living connection."""
        self._opening += 1
        try:
            connection = self._connected()
            try:
                return connection, connection.open_channel(port)
            except PortRefused:
                raise
            except (paramiko.SSHException, EOFError, OSError):
                # It may have died since we looked; a new connection tells.
                connection.close()
                connection = self._connected()
                return connection, self._open_on_new(connection, port)
        finally:
            self._opening -= 1

    def idle_for_s(self) -> float:
        connection = self._connection
        if self._opening or (connection is not None and connection.streams):
            return 0.0
        return time.monotonic() - connection.used_s if connection is not None else float("inf")

    def close(self) -> None:
        with self._lock:
            if self._connection is not None:
                self._connection.close()
            self._connection = None

    def _connected(self) -> _TunnelConnection:
        with self._lock:
            if self._connection is not None and self._connection.alive:
                return self._connection
            if self._connection is not None:
                self._connection.close()  # ends its thread; its streams have ended with it
                self._connection = None
            if self._failed is not None and time.monotonic() - self._failed[0] < RETRY_PAUSE_S:
                raise TunnelError(str(self._failed[1])) from self._failed[
                    1
                ]  # thirty tabs knock once a second
            try:
                self._connection = _TunnelConnection(self._target, self._key_path)
            except SshError as error:
                self._failed = (time.monotonic(), error)
                raise TunnelError(str(error)) from error
            self._failed = None
            return self._connection

    def _open_on_new(self, connection: _TunnelConnection, port: int) -> Any:
        try:
            return connection.open_channel(port)
        except PortRefused:
            raise
        except (paramiko.SSHException, EOFError, OSError) as error:
            raise TunnelError(f"{self._target.place} opens no tunnel: {error}.") from error


class _TunnelConnection:
    """An SSH connection that carries streams, and the thread that writes to it."""

    def __init__(self, target: SshTarget, key_path: Path) -> None:
        self._ssh: SshConnection = connect_with_key(target, key_path, transport_class=_TunnelTransport)
        self._sender = Sender(target.host)
        self._place = target.place
        self.streams: set[ChannelStream] = set()
        self.used_s = time.monotonic()

    @property
    def alive(self) -> bool:
        return self._ssh.alive

    def open_channel(self, port: int) -> Any:
        try:
            with WATCHDOG.limit(self._ssh, STEP_LIMIT_S, "opening a tunnel"):
                return self._ssh.transport.open_channel(
                    "direct-tcpip",
                    (JOB_ADDRESS, port),
                    ("127.0.0.1", 0),
                    window_size=WINDOW_BYTES,
                    max_packet_size=PACKET_BYTES,
                    timeout=STEP_LIMIT_S,
                )
        except paramiko.ChannelException as error:
            if error.code == _ADMINISTRATIVELY_PROHIBITED:
                raise TunnelError(f"{self._place} does not allow tunnels to {JOB_ADDRESS}.") from error
            raise PortRefused(f"Nothing listens on port {port} of the jobs on {self._place}.") from error

    def start(
        self, loop: asyncio.AbstractEventLoop, channel: Any, protocol: asyncio.Protocol, peer: str
    ) -> ChannelStream:
        """Turns a channel into a stream of the event loop. Runs on the loop."""
        stream = ChannelStream(loop, channel, self._sender, protocol, peer, self._forget)
        self.streams.add(stream)
        return stream

    def close(self) -> None:
        self._ssh.close()
        self._sender.stop()

    def _forget(self, stream: ChannelStream) -> None:
        self.streams.discard(stream)
        self.used_s = time.monotonic()


_ADMINISTRATIVELY_PROHIBITED = 1


class _StreamChannels(ChannelMap):  # type: ignore[misc]
    """Gives each channel, before its first byte, an inbox and a window that speak to an event loop."""

    def put(self, chanid: int, chan: Any) -> None:
        chan.in_buffer = Inbox()
        chan.out_buffer_cv = WindowCondition(chan.lock)
        super().put(chanid, chan)


class _TunnelTransport(SshTransport):
    """An SSH transport whose channels are streams."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._channels = _StreamChannels()

    def open_window(self, remote_channel: int, size_bytes: int) -> None:
        """Lets the node send that much more on a channel (RFC 4254, 5.2)."""
        message = paramiko.Message()
        message.add_byte(cMSG_CHANNEL_WINDOW_ADJUST)
        message.add_int(remote_channel)
        message.add_int(size_bytes)
        self._send_user_message(message)
