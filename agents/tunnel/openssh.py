"""One OpenSSH client process per node: starts it, requests streams, reads its output, ends it.

``ssh`` runs with an argument list and no configuration files. Its output is never shown; it is mapped to
messages of this project.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import shutil
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from agents.node.host.atomic_files import make_folder, write_atomic
from agents.ssh import (
    INACTIVITY_TIMEOUT_S,
    KEEPALIVE_INTERVAL_S,
    STEP_TIMEOUT_S,
    AuthenticationError,
    HostKeyMismatchError,
    NodeUnreachableError,
    SshError,
    SshStep,
    SshTarget,
    host_key_algorithms,
    host_key_mismatch,
)
from agents.tunnel import exec_with_parent
from agents.tunnel.mux import ProcessExitedError, StreamRefusedError, StreamRequest, is_alive, request_stream
from agents.tunnel.stream import TunnelStream

log = logging.getLogger(__name__)

SSH_PROGRAM = "ssh"
CONNECT_TIMEOUT_S = 8.0
TERMINATE_TIMEOUT_S = 2.0
ALIVE_TIMEOUT_S = 2.0
POLL_INTERVAL_S = 0.01
MAX_CONCURRENT_OPENS = 32
PROBE_PORT = 1
"""No job uses it; any reply about it proves that the node is responsive."""
CIPHERS = "^aes128-gcm@openssh.com,aes256-gcm@openssh.com"
_ALIAS, _KNOWN_HOSTS, _CONTROL = "node", "known_hosts", "c"
_MAX_STDERR_LINES = 40
_ENVIRONMENT = {"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C"}


class SshNotInstalledError(SshError):
    code = "no_ssh_program"


class KeyFileError(SshError):
    code = "key_unusable"


class NoReplyError(TimeoutError):
    """A stream was neither opened nor refused in time; ``node_unresponsive``: nothing on the node answers."""

    def __init__(self, node_unresponsive: bool) -> None:
        super().__init__("no response in time")
        self.node_unresponsive = node_unresponsive


class ForwardingProhibitedError(StreamRefusedError):
    """The node does not permit the tunnel key to connect to this address."""


def check_ssh_installed() -> None:
    """Raise SshNotInstalledError when this machine has no OpenSSH client."""
    if shutil.which(SSH_PROGRAM) is None:
        raise SshNotInstalledError(
            "The portal's machine lacks the ssh client, which connects to jobs: install "
            "it there (Debian: apt-get install openssh-client).",
            SshStep.CONNECT,
        )


def check_key_file(path: Path) -> None:
    """Raise KeyFileError when ssh would reject the key file."""
    try:
        found = path.stat()
    except OSError as error:
        message = f"The portal cannot read its tunnel key: {error.strerror}."
        raise KeyFileError(message, SshStep.LOGIN) from error
    if found.st_uid != os.geteuid():
        raise KeyFileError(
            f"The tunnel key belongs to uid {found.st_uid}, but this process has uid {os.geteuid()}.",
            SshStep.LOGIN,
        )
    if found.st_mode & 0o077:
        raise KeyFileError(
            f"The tunnel key is accessible to other accounts (mode {found.st_mode & 0o777:o}): make it 600.",
            SshStep.LOGIN,
        )


def ssh_command(target: SshTarget, key_path: Path) -> list[str]:
    """Return the argument list; the working directory must contain the known-hosts file."""
    options = {
        "BatchMode": "yes",
        "StrictHostKeyChecking": "yes",
        "UserKnownHostsFile": _KNOWN_HOSTS,
        "GlobalKnownHostsFile": "/dev/null",
        "HostKeyAlias": _ALIAS,
        "HostKeyAlgorithms": ",".join(host_key_algorithms(target)),
        "CheckHostIP": "no",
        "UpdateHostKeys": "no",
        "VerifyHostKeyDNS": "no",
        "PreferredAuthentications": "publickey",
        "IdentitiesOnly": "yes",
        "IdentityAgent": "none",
        "ConnectTimeout": f"{STEP_TIMEOUT_S:.0f}",
        "ServerAliveInterval": str(KEEPALIVE_INTERVAL_S),
        "ServerAliveCountMax": str(round(INACTIVITY_TIMEOUT_S / KEEPALIVE_INTERVAL_S)),
        "TCPKeepAlive": "no",
        "ControlMaster": "yes",
        "ControlPath": _CONTROL,
        "ControlPersist": "no",
        "Ciphers": CIPHERS,
        "Compression": "no",
        "ForwardAgent": "no",
        "ForwardX11": "no",
        "EscapeChar": "none",
        "LogLevel": "INFO",  # the level at which it reports why a stream was not opened
    }
    words = [SSH_PROGRAM, "-F", "none", "-N", "-T"]
    for name, value in options.items():
        words += ["-o", f"{name}={value}"]
    key = str(key_path.absolute()).replace("%", "%%")
    return [*words, "-i", key, "-l", target.user, "-p", str(target.port), "--", target.host]


class SshProcess:
    """A running, authenticated client process. Bound to one event loop and its thread."""

    def __init__(self, target: SshTarget, key_path: Path, folder: Path, running: set[SshProcess]) -> None:
        """Start it in a new folder; it is a member of ``running`` until it has ended."""
        self._target = target
        self._loop = asyncio.get_running_loop()
        self._dir = folder
        make_folder(str(folder), 0o700)
        known_hosts = f"{_ALIAS} {' '.join(target.host_key.split()[:2])}\n"
        write_atomic(str(folder / _KNOWN_HOSTS), known_hosts.encode(), sync=False)
        self._dir_fd = os.open(folder, os.O_PATH | os.O_DIRECTORY)
        self._stderr_fd, theirs = os.pipe()
        os.set_blocking(self._stderr_fd, False)
        self._partial_line = b""
        self._lines: deque[str] = deque(maxlen=_MAX_STDERR_LINES)
        self._ended = asyncio.Event()
        self._slots = asyncio.Semaphore(MAX_CONCURRENT_OPENS)  # its control socket has a queue of 64
        self._terminating = False
        self._session_process: subprocess.Popen[bytes] | None = None
        self.streams: set[StreamRequest] = set()
        self.last_used_s = time.monotonic()
        try:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-I",
                    "-S",
                    str(Path(exec_with_parent.__file__).absolute()),
                    str(os.getpid()),
                    *ssh_command(target, key_path),
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=theirs,
                cwd=folder,
                env=_ENVIRONMENT,
                start_new_session=True,
            )
        finally:
            os.close(theirs)
        self._loop.add_reader(self._stderr_fd, self._read_stderr)
        self._running = running
        running.add(self)

    @classmethod
    async def start(
        cls, target: SshTarget, key_path: Path, folder: Path, running: set[SshProcess]
    ) -> SshProcess:
        """Return an authenticated process. Raise a typed SshError."""
        check_ssh_installed()
        check_key_file(key_path)
        made = cls(target, key_path, folder, running)
        try:
            await made._wait_for_login()
        except BaseException:
            made.terminate()
            raise
        made._disable_nagle()
        return made

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return not self._ended.is_set() and not self._terminating

    async def open(
        self, host: str, port: int, protocol: Callable[[], asyncio.Protocol], timeout_s: float
    ) -> TunnelStream:
        """Open a stream to an address as seen from the node.

        Raise StreamRefusedError, ProcessExitedError or NoReplyError.
        """
        try:
            return await self._open(host, port, protocol, timeout_s / 2)
        except TimeoutError:  # find out whether the port or the node does not answer
            silent = not await self._is_node_responsive(host, timeout_s / 2)
            raise NoReplyError(silent) from None

    def terminate(self) -> None:
        """Terminate the process, and kill it after ``TERMINATE_TIMEOUT_S``."""
        if not self._terminating and not self._ended.is_set():
            self._terminating = True
            self._process.terminate()
            self._loop.call_later(TERMINATE_TIMEOUT_S, self._kill)

    async def wait(self) -> None:
        await self._ended.wait()

    # ---- internals ----

    async def _wait_for_login(self) -> None:
        until_s = time.monotonic() + CONNECT_TIMEOUT_S
        control = self._dir / _CONTROL
        while not control.exists():  # ssh creates the socket after authentication
            if self._ended.is_set():
                raise parse_ssh_error(self._target, list(self._lines))
            if time.monotonic() > until_s:
                raise NodeUnreachableError(
                    f"{self._target.address} responds, but the login took longer than {CONNECT_TIMEOUT_S:.0f} s.",
                    SshStep.LOGIN,
                )
            await asyncio.sleep(POLL_INTERVAL_S)

    def _disable_nagle(self) -> None:
        """Run the key's forced command, which does nothing, so that the node sends small packets at once.

        sshd disables Nagle's algorithm at the first session of a connection, and a tunnel has none. Without
        this, every second reply of a kernel (several small packets) is delayed by 40 ms.
        """
        self._session_process = subprocess.Popen(
            [SSH_PROGRAM, "-F", "none", "-S", _CONTROL, "-T", "-o", "ProxyCommand=false", _ALIAS, "true"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=self._dir,
            env=_ENVIRONMENT,
        )
        self._loop.call_later(TERMINATE_TIMEOUT_S, _reap, self._session_process)

    async def _open(
        self, host: str, port: int, protocol: Callable[[], asyncio.Protocol], timeout_s: float
    ) -> TunnelStream:
        self.last_used_s = time.monotonic()
        async with asyncio.timeout(timeout_s), self._slots:
            request, pipes = await request_stream(f"/proc/self/fd/{self._dir_fd}/{_CONTROL}", host, port)
            try:
                await asyncio.shield(request.reply)
            except BaseException as error:
                pipes.close()  # a stream that opens later ends at once
                if not isinstance(error, StreamRefusedError | ProcessExitedError):
                    request.reply.add_done_callback(lambda _: request.close())
                if isinstance(error, StreamRefusedError) and self._is_forwarding_prohibited():
                    raise ForwardingProhibitedError(str(error)) from error
                raise
        stream = TunnelStream(request, protocol(), f"{host}:{port}", self._is_connected)
        self.streams.add(request)
        request.on_end = lambda: self._on_stream_end(request, stream)
        if request.ended:
            self._on_stream_end(request, stream)
        await stream.connect_pipes(pipes)
        return stream

    def _on_stream_end(self, request: StreamRequest, stream: TunnelStream) -> None:
        self.streams.discard(request)
        self.last_used_s = time.monotonic()
        stream.on_stream_end()

    async def _is_connected(self) -> bool:
        """Return True when the process survived a stream that has just ended."""
        if not self.is_alive:
            return False
        return await is_alive(f"/proc/self/fd/{self._dir_fd}/{_CONTROL}", ALIVE_TIMEOUT_S) and self.is_alive

    async def _is_node_responsive(self, host: str, timeout_s: float) -> bool:
        try:
            (await self._open(host, PROBE_PORT, asyncio.Protocol, timeout_s)).abort()
        except StreamRefusedError:
            return True
        except (TimeoutError, ProcessExitedError):
            return False
        return True

    def _is_forwarding_prohibited(self) -> bool:
        """Return True when the last refusal was administrative. ssh logs it just before it replies."""
        self._read_stderr()
        refusals = [line for line in self._lines if "open failed: " in line]
        return bool(refusals) and "administratively prohibited" in refusals[-1]

    def _read_stderr(self) -> None:
        if self._ended.is_set():
            return
        while True:
            try:
                said = os.read(self._stderr_fd, 65536)
            except BlockingIOError:
                return
            if not said:
                self._on_exit()
                return
            *lines, self._partial_line = (self._partial_line + said).split(b"\n")
            self._lines += [line.decode(errors="replace").strip()[:300] for line in lines]

    def _on_exit(self) -> None:
        """Called at the end of the process's stderr."""
        self._loop.remove_reader(self._stderr_fd)
        os.close(self._stderr_fd)
        os.close(self._dir_fd)
        _reap(self._process)
        if self._session_process is not None:
            _reap(self._session_process)
        shutil.rmtree(self._dir, ignore_errors=True)
        self._running.discard(self)
        self._ended.set()

    def _kill(self) -> None:
        if not self._ended.is_set():
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()


def _reap(process: subprocess.Popen[bytes]) -> None:
    """Reap a process; kill it if it still runs."""
    if process.poll() is None:
        process.kill()
        process.wait()


_HOST_KEY = re.compile(r"\b(SHA256:[A-Za-z0-9+/]+)")


def parse_ssh_error(target: SshTarget, stderr_lines: list[str]) -> SshError:
    """Map the last output of a client that failed to connect to a typed error."""
    text = "\n".join(stderr_lines)
    place = target.address
    log.info("ssh to %s ended: %s", place, " | ".join(stderr_lines)[-1000:])
    if "REMOTE HOST IDENTIFICATION HAS CHANGED" in text or "Host key verification failed" in text:
        shown = _HOST_KEY.search(text)
        return host_key_mismatch(target, shown[1] if shown else "another host key")
    if "no matching host key type" in text:
        algorithms = ", ".join(host_key_algorithms(target))
        return HostKeyMismatchError(f"{place} has no host key of a supported type ({algorithms}).")
    if "Unable to negotiate" in text:
        return NodeUnreachableError(f"{place} and the portal have no common cipher.", SshStep.CONNECT)
    if "UNPROTECTED PRIVATE KEY" in text or "Load key" in text:
        return KeyFileError("The portal's ssh cannot use its tunnel key.", SshStep.LOGIN)
    if "Permission denied (" in text or "Too many authentication failures" in text:
        message = f"{place} rejects the portal's key for the account {target.user}."
        return AuthenticationError(message, SshStep.LOGIN)
    if "Could not resolve hostname" in text:
        return NodeUnreachableError(f"No address is known for {target.host}.", SshStep.RESOLVE)
    if "No user exists for uid" in text:
        message = f"The gateway's account {os.geteuid()} has no name in /etc/passwd, which ssh requires."
        return SshNotInstalledError(message, SshStep.CONNECT)
    if "Connection refused" in text:
        return NodeUnreachableError(f"{place} is up, but no sshd listens on the port.", SshStep.CONNECT)
    if "banner exchange" in text or "kex_exchange" in text:
        reason = "it closed the connection"
        if "timed out" in text:
            reason = f"it did not finish the SSH handshake within {STEP_TIMEOUT_S:.0f} s"
        message = f"{place} responds, but not as an SSH server: {reason}."
        return NodeUnreachableError(message, SshStep.CONNECT)
    if "timed out" in text:
        message = (
            f"{place} does not respond within {STEP_TIMEOUT_S:.0f} s: it is down, or a firewall is blocking."
        )
        return NodeUnreachableError(message, SshStep.CONNECT)
    if refusal := re.search(r"connect to .* port \d+: (.+)", text):
        return NodeUnreachableError(f"{place} cannot be reached: {refusal[1].strip('.')}.", SshStep.CONNECT)
    if "cannot be run" in text:
        return SshNotInstalledError("The program ssh cannot be run on the portal's machine.", SshStep.CONNECT)
    return NodeUnreachableError(f"{place} closed the connection during the login.", SshStep.LOGIN)
