"""Streams to the ports of jobs: direct on this machine, through one shared SSH connection on any other node."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

from agents.carrier import PROHIBITED, Carrier, CarrierLost, ChannelRefused, NoWord
from agents.handover import HandoverTransport
from agents.ssh import (
    STEP_LIMIT_S,
    NodeUnreachable,
    SshConnection,
    SshError,
    SshStep,
    SshTarget,
    connect_with_key,
)

JOB_ADDRESS = "127.77.0.1"
IDLE_CLOSE_S = 60.0
RETRY_PAUSE_S = 1.0
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
        tunnel = self._nodes.setdefault(place, _NodeTunnel(place, self._key_path, self._threads))
        if self._sweeper is None or self._sweeper.done():
            self._sweeper = loop.create_task(self._close_idle())
        transport = await tunnel.open(port, protocol_factory)
        return transport, cast(_Protocol, transport.get_protocol())

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
        for tunnel in self._nodes.values():
            tunnel.close()
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
        while self._nodes:
            await asyncio.sleep(min(self._idle_close_s, 5.0))
            for place, tunnel in list(self._nodes.items()):
                if tunnel.idle_for_s() > self._idle_close_s:
                    del self._nodes[place]
                    tunnel.close()


class _NodeTunnel:
    """The one connection to a node, made when it is needed."""

    def __init__(self, target: SshTarget, key_path: Path, threads: ThreadPoolExecutor) -> None:
        self._target = target
        self._key_path = key_path
        self._threads = threads
        self._connection: _TunnelConnection | None = None
        self._connecting: asyncio.Task[_TunnelConnection] | None = None
        self._failed: tuple[float, SshError] | None = None
        self._opening = 0

    async def open(self, port: int, protocol: Callable[[], asyncio.Protocol]) -> asyncio.Transport:
        """Opens a stream to a port of a job, connecting first when there is no living connection."""
        self._opening += 1
        try:
            for _ in range(2):
                connection = await self._connected()
                try:
                    return await connection.carrier.open((JOB_ADDRESS, port), protocol, STEP_LIMIT_S)
                except CarrierLost:
                    continue  # it had died, or did just now; a new connection tells
                except ChannelRefused as refused:
                    raise self._refusal(refused, port) from refused
                except NoWord as problem:
                    if problem.silent:
                        connection.close()
                        raise TunnelError(f"{self._target.place} does not answer any more.") from problem
                    raise PortRefused(
                        f"Port {port} of {self._target.place} takes no connections."
                    ) from problem
            raise TunnelError(f"{self._target.place} opens no tunnel: it hangs up.")
        finally:
            self._opening -= 1

    def idle_for_s(self) -> float:
        if self._opening or self._connecting is not None:
            return 0.0
        return self._connection.idle_for_s() if self._connection is not None else float("inf")

    def close(self) -> None:
        if self._connecting is not None:
            self._connecting.cancel()
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    async def _connected(self) -> _TunnelConnection:
        if self._connection is not None:
            if not self._connection.carrier.lost:
                return self._connection
            self._connection.close()
            self._connection = None
        if self._failed is not None and time.monotonic() - self._failed[0] < RETRY_PAUSE_S:
            raise TunnelError(str(self._failed[1])) from self._failed[1]  # thirty tabs knock once a second
        if self._connecting is None:
            self._connecting = asyncio.get_running_loop().create_task(self._connect())
            self._connecting.add_done_callback(_heard)  # also where everybody who waited has left
        return await asyncio.shield(self._connecting)

    async def _connect(self) -> _TunnelConnection:
        loop = asyncio.get_running_loop()
        try:
            made = loop.run_in_executor(self._threads, _sign_in, self._target, self._key_path)
            try:
                ssh, transport = await asyncio.shield(made)
            except asyncio.CancelledError:
                made.add_done_callback(_close_unused)
                raise
            carrier = await Carrier.take_over(transport.packetizer, *transport.wire.let_go())
            self._failed = None
            self._connection = _TunnelConnection(ssh, carrier)
            return self._connection
        except SshError as error:
            self._failed = (time.monotonic(), error)
            raise TunnelError(str(error)) from error
        finally:
            self._connecting = None

    def _refusal(self, refused: ChannelRefused, port: int) -> ConnectionError:
        place = self._target.place
        if refused.code == PROHIBITED:
            return TunnelError(f"{place} does not allow tunnels to {JOB_ADDRESS}.")
        return PortRefused(f"Nothing listens on port {port} of the jobs on {place}.")


@dataclass(frozen=True)
class _TunnelConnection:
    """An SSH connection and what carries its streams."""

    ssh: SshConnection
    carrier: Carrier

    def idle_for_s(self) -> float:
        return 0.0 if self.carrier.streams else time.monotonic() - self.carrier.used_s

    def close(self) -> None:
        self.carrier.close()
        self.ssh.close()


def _sign_in(target: SshTarget, key_path: Path) -> tuple[SshConnection, HandoverTransport]:
    """Connects with paramiko, up to where its connection can be taken over. Runs in a thread; raises SshError."""
    ssh = connect_with_key(target, key_path, transport_class=HandoverTransport)
    transport = cast(HandoverTransport, ssh.transport)
    transport.packetizer.park()
    ssh.ask_for_life()  # the answer ends the thread's wait for a packet
    if not transport.packetizer.wait_until_parked(STEP_LIMIT_S):
        ssh.close()
        raise NodeUnreachable(f"{target.place} let us in and fell silent.", SshStep.CHANNEL)
    return ssh, transport


def _close_unused(made: asyncio.Future[tuple[SshConnection, Any]]) -> None:
    if not made.cancelled() and made.exception() is None:
        made.result()[0].close()


def _heard(connecting: asyncio.Task[_TunnelConnection]) -> None:
    if not connecting.cancelled():
        connecting.exception()
