"""Streams to job ports: direct on this machine, through one ``ssh`` process for each other node in use."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar, cast

from agents.node.host.atomic_files import make_folder
from agents.ssh import STEP_TIMEOUT_S, SshError, SshTarget
from agents.tunnel.mux import ProcessExitedError, StreamRefusedError
from agents.tunnel.openssh import ForwardingProhibitedError, NoReplyError, SshProcess

JOB_ADDRESS = "127.77.0.1"
IDLE_TIMEOUT_S = 60.0
RETRY_DELAY_S = 1.0
_PREFIX = "tunnels-"

_Protocol = TypeVar("_Protocol", bound=asyncio.Protocol)


@dataclass(frozen=True)
class LocalTarget:
    """This machine as a node; its job ports are reached without SSH."""

    address: str = JOB_ADDRESS


TunnelTarget = LocalTarget | SshTarget


class TunnelError(ConnectionError):
    """The node cannot be reached; the message is for users."""


class PortRefusedError(ConnectionRefusedError):
    """The node is reachable, but nothing listens on the job's port."""


class TunnelPool:
    """Opens streams to (target, port). Bound to one event loop; holds one ``ssh`` process per node in use.

    A process starts with the first stream, is replaced when it ends, and is stopped after ``idle_timeout_s``
    without streams. aiohttp uses the pool through a connector whose ``_create_connection`` awaits
    ``create_connection``. Files of the processes are in the pool's own folder, below ``parent_dir`` if given.
    """

    def __init__(
        self, key_path: Path, *, parent_dir: Path | None = None, idle_timeout_s: float = IDLE_TIMEOUT_S
    ) -> None:
        self._key_path = key_path
        self._parent = parent_dir
        self._dir: Path | None = None
        self._dir_lock = contextlib.ExitStack()
        self._idle_timeout_s = idle_timeout_s
        self._tunnels: dict[SshTarget, _NodeTunnel] = {}
        self._running: set[SshProcess] = set()
        self._idle_closer: asyncio.Task[None] | None = None

    async def create_connection(
        self, protocol_factory: Callable[[], _Protocol], target: TunnelTarget, port: int
    ) -> tuple[asyncio.Transport, _Protocol]:
        """Connect a protocol to a job's port, like the event loop's ``create_connection``.

        Raise PortRefusedError when nothing listens there, TunnelError when the node cannot be reached.
        """
        loop = asyncio.get_running_loop()
        if isinstance(target, LocalTarget):
            return await self._connect_locally(protocol_factory, target, port)
        tunnel = self._tunnels.get(target)
        if tunnel is None:
            tunnel = self._tunnels[target] = _NodeTunnel(
                target, self._key_path, self._make_dir(), self._running
            )
        if self._idle_closer is None or self._idle_closer.done():
            self._idle_closer = loop.create_task(self._close_idle())
        transport = await tunnel.open(port, protocol_factory)
        return transport, cast(_Protocol, transport.get_protocol())

    async def open_stream(
        self, target: TunnelTarget, port: int
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Return reader and writer of a stream to a job's port. Raise the errors of ``create_connection``."""
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(loop=loop)
        transport, protocol = await self.create_connection(
            lambda: asyncio.StreamReaderProtocol(reader, loop=loop), target, port
        )
        return reader, asyncio.StreamWriter(transport, protocol, reader, loop)

    async def close(self) -> None:
        """Stop all processes with their streams, and wait for them."""
        if self._idle_closer is not None:
            self._idle_closer.cancel()
        for tunnel in self._tunnels.values():
            tunnel.close()
        self._tunnels.clear()
        for process in list(self._running):  # includes processes that are starting or ending
            process.terminate()
            await process.wait()
        if self._dir is not None:
            shutil.rmtree(self._dir, ignore_errors=True)
            self._dir = None
            self._dir_lock.close()

    def _make_dir(self) -> Path:
        """Create the folder, and remove folders of killed pools, whose locks are free."""
        if self._dir is None:
            if self._parent is None:
                self._dir = Path(tempfile.mkdtemp(prefix=_PREFIX))
            else:
                make_folder(str(self._parent), 0o700)
                with _locked(self._parent, fcntl.LOCK_EX):
                    for left in self._parent.glob(f"{_PREFIX}*"):
                        with contextlib.suppress(OSError), _locked(left, fcntl.LOCK_EX | fcntl.LOCK_NB):
                            shutil.rmtree(left)
                    self._dir = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=self._parent))
                    self._dir_lock.enter_context(_locked(self._dir, fcntl.LOCK_EX))
        return self._dir

    async def _connect_locally(
        self, protocol_factory: Callable[[], _Protocol], target: LocalTarget, port: int
    ) -> tuple[asyncio.Transport, _Protocol]:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(STEP_TIMEOUT_S):
                transport, protocol = await loop.create_connection(protocol_factory, target.address, port)
        except ConnectionRefusedError as error:
            raise PortRefusedError(f"Nothing listens on port {port} of this machine's jobs.") from error
        except (OSError, TimeoutError) as error:
            raise TunnelError(f"Port {port} of this machine's jobs does not respond: {error}.") from error
        return transport, protocol

    async def _close_idle(self) -> None:
        while self._tunnels:
            await asyncio.sleep(min(self._idle_timeout_s, 5.0))
            for place, tunnel in list(self._tunnels.items()):
                if tunnel.idle_s() > self._idle_timeout_s:
                    del self._tunnels[place]
                    tunnel.close()


class _NodeTunnel:
    """The connection to one node, opened on demand."""

    def __init__(self, target: SshTarget, key_path: Path, folder: Path, running: set[SshProcess]) -> None:
        self._target = target
        self._key_path = key_path
        self._folder = folder
        self._running = running
        self._process: SshProcess | None = None
        self._connecting: asyncio.Task[SshProcess] | None = None
        self._failed: tuple[float, SshError] | None = None
        self._opening = 0

    async def open(self, port: int, protocol: Callable[[], asyncio.Protocol]) -> asyncio.Transport:
        """Open a stream to a job's port; connect first if necessary."""
        place = self._target.address
        self._opening += 1
        try:
            for _ in range(2):
                process = await self._get_process()
                try:
                    return await process.open(JOB_ADDRESS, port, protocol, STEP_TIMEOUT_S)
                except ProcessExitedError:
                    process.terminate()  # it has ended: retry once with a new process
                except ForwardingProhibitedError as error:
                    raise TunnelError(f"{place} does not allow tunnels to {JOB_ADDRESS}.") from error
                except StreamRefusedError as error:
                    raise PortRefusedError(
                        f"Nothing listens on port {port} of the jobs on {place}."
                    ) from error
                except NoReplyError as error:
                    if error.node_unresponsive:
                        process.terminate()
                        raise TunnelError(f"{place} no longer responds.") from error
                    raise PortRefusedError(f"Port {port} of {place} accepts no connections.") from error
            raise TunnelError(f"{place} opens no tunnel: it closes the connection.")
        finally:
            self._opening -= 1

    def idle_s(self) -> float:
        if self._opening or self._connecting is not None:
            return 0.0
        if self._process is None:
            return float("inf")
        return 0.0 if self._process.streams else time.monotonic() - self._process.last_used_s

    def close(self) -> None:
        if self._connecting is not None:
            self._connecting.cancel()
        if self._process is not None:
            self._process.terminate()
            self._process = None

    async def _get_process(self) -> SshProcess:
        if self._process is not None and self._process.is_alive:
            return self._process
        if self._failed is not None and time.monotonic() - self._failed[0] < RETRY_DELAY_S:
            raise TunnelError(str(self._failed[1])) from self._failed[1]  # browser tabs retry every second
        if self._connecting is None:
            self._connecting = asyncio.get_running_loop().create_task(self._connect())
            self._connecting.add_done_callback(_retrieve_exception)  # also when all waiting callers have left
        return await asyncio.shield(self._connecting)

    async def _connect(self) -> SshProcess:
        try:
            self._process = await SshProcess.start(
                self._target, self._key_path, self._folder / secrets.token_hex(4), self._running
            )
            self._failed = None
            return self._process
        except SshError as error:
            self._failed = (time.monotonic(), error)
            raise TunnelError(str(error)) from error
        finally:
            self._connecting = None


@contextlib.contextmanager
def _locked(folder: Path, operation: int) -> Iterator[None]:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(handle, operation)
        yield
    finally:
        os.close(handle)


def _retrieve_exception(connecting: asyncio.Task[SshProcess]) -> None:
    if not connecting.cancelled():
        connecting.exception()
