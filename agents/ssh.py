"""SSH to a node: pinned host keys, a time limit for every step, and a byte stream to the agent."""

from __future__ import annotations

import contextlib
import enum
import logging
import shlex
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import paramiko
from paramiko.common import cMSG_GLOBAL_REQUEST
from paramiko.packet import Packetizer

from agents.keys import fingerprint
from agents.link import HELLO_TIMEOUT_S, Link, OutcomeUnknownError
from agents.watchdog import WATCHDOG
from agents.wire.fields import clean_text

Role = Literal["control", "watch", "bulk"]

STEP_TIMEOUT_S = 5.0
EXIT_STATUS_TIMEOUT_S = 3.0
"""From the end of a stream to the exit status of its program."""
KEEPALIVE_INTERVAL_S = 5
INACTIVITY_TIMEOUT_S = 15.0
MAX_STDERR_BYTES = 8192
MAX_ROOT_OUTPUT_BYTES = 1024 * 1024
"""Bytes kept of a script's output; also the most that a login may print before the root shell."""
MAX_HOST_KEY_LENGTH = 1900
"""Characters of a host key in base64: an RSA key of 8192 bits has 1400."""
LOADER_PATH = "/usr/local/lib/fairway/fairway-node"

_COMMAND_NOT_FOUND_STATUSES = (126, 127)
_SIGNATURE_ALGORITHMS: dict[str, tuple[str, ...]] = {
    # one key type has several signature algorithms; the pinned key names the type
    "ssh-rsa": ("rsa-sha2-512", "rsa-sha2-256"),
}
_SCANNED_KEY_TYPES = ("ssh-ed25519", "ecdsa-sha2-nistp256", "rsa-sha2-512")

# it logs a traceback for each scan and each closed connection
logging.getLogger("paramiko").setLevel(logging.CRITICAL)


class SshStep(enum.StrEnum):
    """The steps of opening a link, in order."""

    RESOLVE = "resolve"
    CONNECT = "connect"
    HOST_KEY = "host_key"
    LOGIN = "login"
    CHANNEL = "channel"


class SshError(Exception):
    """A connection could not be opened; the message is for users. No command was sent."""

    code = "ssh_error"

    def __init__(self, message: str, step: SshStep) -> None:
        super().__init__(message)
        self.step = step


class NodeUnreachableError(SshError):
    """Name resolution, routing or the TCP connection failed."""

    code = "unreachable"


class HostKeyMismatchError(SshError):
    """The host key differs from the confirmed one."""

    code = "host_key_mismatch"

    def __init__(self, message: str, presented: str | None = None) -> None:
        super().__init__(message, SshStep.HOST_KEY)
        self.presented = presented


class AuthenticationError(SshError):
    """sshd rejected the key or password."""

    code = "authentication_refused"


class AgentMissingError(SshError):
    """The login works but the agent did not answer; the message repeats the loader's output."""

    code = "agent_missing"


class LoginError(Exception):
    """A sudo login failed before the script began; the message says why."""


@dataclass(frozen=True)
class SshTarget:
    """Address and account of a node's sshd, and the one accepted host key (``type base64``)."""

    host: str
    user: str
    host_key: str
    port: int = 22

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}" if self.port != 22 else self.host


@dataclass(frozen=True)
class HostKey:
    """A host key as presented, not yet confirmed."""

    key_type: str
    base64: str

    @property
    def line(self) -> str:
        """Return the key in pinned form."""
        return f"{self.key_type} {self.base64}"

    @property
    def fingerprint(self) -> str:
        return fingerprint(self.line)


class ActivityPacketizer(Packetizer):  # type: ignore[misc]
    """Records when the last packet was received."""

    last_packet_s = 0.0

    def read_message(self) -> Any:
        message = super().read_message()
        self.last_packet_s = time.monotonic()
        return message


class SshTransport(paramiko.Transport):  # type: ignore[misc]
    """Paramiko's transport with ciphers ordered by speed."""

    _preferred_ciphers: tuple[str, ...] = (
        "aes128-gcm@openssh.com",
        "aes256-gcm@openssh.com",
        "aes256-ctr",
        "aes192-ctr",
        "aes128-ctr",
    )


class SshConnection:
    """One authenticated connection to a node, supervised by the watchdog until it is closed."""

    def __init__(self, transport: SshTransport, sock: socket.socket, target: SshTarget) -> None:
        self.transport = transport
        self.target = target
        self.abort_reason: str | None = None
        self._sock = sock

    @property
    def is_alive(self) -> bool:
        return bool(self.transport.is_active())

    def inactive_s(self) -> float:
        last_packet_s: float = self.transport.packetizer.last_packet_s
        return time.monotonic() - last_packet_s

    def abort(self, reason: str) -> None:
        """Close the socket at once; waiting threads get an end of file."""
        self.abort_reason = self.abort_reason or reason
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection; idempotent."""
        WATCHDOG.unwatch(self)
        self.abort("closed")
        self.transport.close()

    def start_keepalive(self) -> None:
        """Send keepalives every few seconds, and close the connection when replies stop."""
        self.transport.packetizer.set_keepalive(KEEPALIVE_INTERVAL_S, self.send_keepalive)
        WATCHDOG.watch(self, INACTIVITY_TIMEOUT_S)

    def send_keepalive(self) -> None:
        """Send a request that sshd always answers."""
        message = paramiko.Message()
        message.add_byte(cMSG_GLOBAL_REQUEST)
        message.add_string("keepalive@openssh.com")
        message.add_boolean(
            True
        )  # paramiko's own keepalive requests no reply, so silence would prove nothing
        self.transport._send_user_message(message)


def scan_host_key(host: str, port: int = 22, key_type: str | None = None) -> HostKey:
    """Return the host key that a machine presents, without logging in; it must be verified before it is
    pinned.

    With ``key_type``, return the key of that type. Raise NodeUnreachableError or HostKeyMismatchError.
    """
    wanted = _SCANNED_KEY_TYPES if key_type is None else _SIGNATURE_ALGORITHMS.get(key_type, (key_type,))
    sock = connect_tcp(host, port)
    transport = _start_transport(sock, wanted, host, port)
    try:
        key = transport.get_remote_server_key()
    finally:
        transport.close()
    presented = HostKey(key.get_name(), key.get_base64())
    if len(presented.base64) > MAX_HOST_KEY_LENGTH:
        message = f"{host}:{port} presents a host key of {len(presented.base64)} characters, longer than any in use."
        raise HostKeyMismatchError(message)
    return presented


def scan_pinned_host(target: SshTarget) -> HostKey:
    """Return the host key that a node presents, of the pinned key's type if it has one.

    It equals the pinned one unless the machine was reinstalled or is another one. Raise NodeUnreachableError or
    HostKeyMismatchError, the latter if it has no key of any supported type.
    """
    try:
        return scan_host_key(target.host, target.port, target.host_key.split()[0])
    except HostKeyMismatchError:
        return scan_host_key(target.host, target.port)


def connect_with_key(target: SshTarget, key_path: Path) -> SshConnection:
    """Open a connection with a private key. Raise a typed SshError."""
    key = paramiko.Ed25519Key.from_private_key_file(str(key_path))
    connection = _connect(target)
    _authenticate(connection, lambda: connection.transport.auth_publickey(target.user, key), "key")
    return connection


def open_ssh(
    target: SshTarget,
    key_path: Path,
    role: Role,
    *,
    cluster: str,
    on_event: Callable[[dict[str, Any]], None] | None = None,
    hello_timeout_s: float = HELLO_TIMEOUT_S,
) -> Link:
    """Open a link to a node's agent in a role, over its own connection.

    Raise a typed SshError when nothing was sent, and the errors of Link when the agent refuses.
    """
    stream = open_stream(target, key_path, role)
    try:
        return Link(
            stream,
            stream,
            role=role,
            cluster=cluster,
            close_streams=stream.close,
            on_event=on_event,
            hello_timeout_s=hello_timeout_s,
            diagnostics=stream.end_reason,
        )
    except OutcomeUnknownError as error:
        if stream.exit_status() is not None:  # the program ended or never ran
            raise agent_missing_error(stream) from error
        raise
    finally:
        if not stream.connection.is_alive:
            stream.close()


def open_stream(target: SshTarget, key_path: Path, role: Role) -> SshStream:
    """Open the byte stream to the agent; the forced command on the node decides what runs."""
    connection = connect_with_key(target, key_path)
    try:
        with WATCHDOG.deadline(connection, STEP_TIMEOUT_S, "opening a channel"):
            channel = connection.transport.open_session(timeout=STEP_TIMEOUT_S)
            channel.exec_command(shlex.join([LOADER_PATH, role]))
    except (paramiko.SSHException, EOFError, OSError) as error:
        connection.close()
        raise AgentMissingError(
            f"{target.address} accepted the login but opened no channel: {error}.", SshStep.CHANNEL
        ) from error
    return SshStream(connection, channel)


class SshStream:
    """Lines to and from an agent over one channel. One thread may read while another writes."""

    def __init__(self, connection: SshConnection, channel: paramiko.Channel) -> None:
        self.connection = connection
        self._channel = channel
        self._reader = channel.makefile("rb", 65536)
        self._stderr: deque[bytes] = deque()
        self._stderr_thread = threading.Thread(target=self._read_stderr, name="ssh-stderr", daemon=True)
        self._stderr_thread.start()

    def readline(self, limit_bytes: int, /) -> bytes:
        """Return the next line with its line end, or b"" at the end of the stream."""
        line: bytes = self._reader.readline(limit_bytes)
        return line

    def write(self, data: bytes, /) -> None:
        """Send all data or raise OSError; the watchdog closes a connection that blocks."""
        with WATCHDOG.deadline(self.connection, INACTIVITY_TIMEOUT_S, "sending a request"):
            self._channel.sendall(data)

    def flush(self) -> None:
        """Do nothing; writes are not buffered."""

    def end_reason(self) -> str:
        """Return why the stream ended: the abort reason, or the agent's last output."""
        if self.connection.abort_reason:
            return self.connection.abort_reason
        self.exit_status()  # the caller closes the stream next, and the status arrives after the last line
        return self.stderr_text() or "the node closed the connection"

    def stderr_text(self) -> str:
        """Return the end of the agent's stderr."""
        return clean_text(b"".join(self._stderr).decode(errors="replace").strip(), MAX_STDERR_BYTES)

    def exit_status(self, timeout_s: float = EXIT_STATUS_TIMEOUT_S) -> int | None:
        """Return the agent's exit status, or None when it does not arrive in time."""
        self._stderr_thread.join(timeout_s)  # its output arrives before its status
        if self._channel.status_event.wait(timeout_s) and self._channel.exit_status != -1:
            return int(self._channel.exit_status)
        return None

    def close(self) -> None:
        """Close channel and connection; idempotent."""
        self.connection.close()

    def _read_stderr(self) -> None:
        kept_bytes = 0
        with contextlib.suppress(OSError):
            while data := self._channel.recv_stderr(4096):
                self._stderr.append(data)
                kept_bytes += len(data)
                while kept_bytes > MAX_STDERR_BYTES:
                    kept_bytes -= len(self._stderr.popleft())


def agent_missing_error(stream: SshStream) -> AgentMissingError:
    """Return the error for a stream that ended before the agent's hello."""
    place = stream.connection.target.address
    status = stream.exit_status()
    said = stream.stderr_text()
    if status in _COMMAND_NOT_FOUND_STATUSES:
        message = f"{place} has no agent: run the enrolment script there."
    elif said:
        message = (
            f"The agent on {place} did not start: {said.splitlines()[-1].removeprefix('fairway-node: ')}"
        )
    else:
        message = f"The agent on {place} ended without output: {stream.end_reason()}."
    return AgentMissingError(message, SshStep.CHANNEL)


# ---- password login ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RootCommandResult:
    exit_status: int
    stdout: str
    stderr: str


class PasswordLogin:
    """A password login, used once for the enrolment."""

    _PROMPT = b"fairway-sudo-password:"
    _ROOT_SHELL_MARKER = b"fairway-root-shell-ready\n"

    def __init__(self, connection: SshConnection) -> None:
        self._connection = connection

    def run_as_root(self, password: str, script: str, timeout_s: float) -> RootCommandResult:
        """Run a script in a root shell: the login's own when it is root, otherwise one from sudo.

        The password is sent only after sudo's prompt, and the script only after the root shell has announced
        itself, so neither can be mistaken for the other.
        """
        shell = f"echo {self._ROOT_SHELL_MARKER.decode().strip()}; exec sh -s"
        sudo = shlex.join(["sudo", "-k", "-S", "-p", self._PROMPT.decode(), "sh", "-c", shell])
        command = f'if [ "$(id -u)" -eq 0 ]; then {shell}; else exec {sudo}; fi'
        with WATCHDOG.deadline(self._connection, timeout_s, "the enrolment script"):
            channel = self._connection.transport.open_session(timeout=STEP_TIMEOUT_S)
            channel.exec_command(shlex.join(["sh", "-c", command]))
            self._wait_for_root(channel, password)
            return _run_with_input(channel, script.encode())

    def _wait_for_root(self, channel: paramiko.Channel, password: str) -> None:
        channel.settimeout(0.1)
        output, errors = b"", b""
        asked = 0
        deadline_s = time.monotonic() + 4 * STEP_TIMEOUT_S  # sudo waits some seconds after a wrong password
        while self._ROOT_SHELL_MARKER not in output:
            with contextlib.suppress(TimeoutError):
                output += channel.recv(4096)
            if channel.recv_stderr_ready():
                errors += channel.recv_stderr(4096)
            if len(output) + len(errors) > MAX_ROOT_OUTPUT_BYTES:
                raise LoginError("The login prints endless output.")
            prompts = errors.count(self._PROMPT)
            if prompts > 1:
                raise LoginError("sudo rejects this password.")
            if prompts > asked:
                asked = prompts
                channel.sendall(password.encode() + b"\n")
            if channel.exit_status_ready() and not channel.recv_ready() and not channel.recv_stderr_ready():
                said = clean_text(errors.replace(self._PROMPT, b"").decode(errors="replace").strip())
                raise LoginError(f"There is no root shell for this account: {said or 'sudo printed nothing'}")
            if time.monotonic() > deadline_s:
                raise LoginError("sudo did not respond in time.")


@contextlib.contextmanager
def login_with_password(target: SshTarget, password: str) -> Iterator[PasswordLogin]:
    """Open a password login for the duration of the block. Raise a typed SshError."""
    connection = _connect(target)
    _authenticate(connection, lambda: connection.transport.auth_password(target.user, password), "password")
    try:
        yield PasswordLogin(connection)
    finally:
        connection.close()


def _run_with_input(channel: paramiko.Channel, script: bytes) -> RootCommandResult:
    channel.settimeout(None)
    errors: list[bytes] = []

    def drain() -> None:
        with contextlib.suppress(OSError):
            while data := channel.recv_stderr(4096):
                if len(errors) * 4096 < MAX_ROOT_OUTPUT_BYTES:
                    errors.append(data)

    def feed() -> None:
        with contextlib.suppress(OSError):
            channel.sendall(script)
            channel.shutdown_write()

    helpers = [threading.Thread(target=task, daemon=True) for task in (drain, feed)]
    for helper in helpers:
        helper.start()
    output = bytearray()
    while data := channel.recv(65536):
        output += data[: max(0, MAX_ROOT_OUTPUT_BYTES - len(output))]
    for helper in helpers:
        helper.join(STEP_TIMEOUT_S)
    status = channel.exit_status if channel.status_event.wait(STEP_TIMEOUT_S) else -1
    return RootCommandResult(
        int(status), output.decode(errors="replace"), b"".join(errors).decode(errors="replace")
    )


# ---- connection steps --------------------------------------------------------------------------------------


def connect_tcp(host: str, port: int) -> socket.socket:
    """Open the TCP connection to a node's sshd. Raise NodeUnreachableError."""
    place = f"{host}:{port}"
    try:
        sock = socket.create_connection((host, port), timeout=STEP_TIMEOUT_S)
    except socket.gaierror as error:
        raise NodeUnreachableError(f"No address is known for {host}.", SshStep.RESOLVE) from error
    except TimeoutError as error:
        message = (
            f"{place} does not respond within {STEP_TIMEOUT_S:.0f} s: it is down, or a firewall is blocking."
        )
        raise NodeUnreachableError(message, SshStep.CONNECT) from error
    except ConnectionRefusedError as error:
        raise NodeUnreachableError(
            f"{place} is up, but no sshd listens on the port.", SshStep.CONNECT
        ) from error
    except OSError as error:
        reason = error.strerror or str(error)
        raise NodeUnreachableError(f"{place} cannot be reached: {reason}.", SshStep.CONNECT) from error
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # the kernel ends a half-open connection
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(INACTIVITY_TIMEOUT_S * 1000))
    return sock


def _start_transport(sock: socket.socket, key_types: tuple[str, ...], host: str, port: int) -> SshTransport:
    """Exchange keys; the host key is not yet verified."""
    transport = SshTransport(sock, packetizer_class=ActivityPacketizer)
    transport.packetizer.last_packet_s = time.monotonic()
    transport.banner_timeout = STEP_TIMEOUT_S
    transport.handshake_timeout = STEP_TIMEOUT_S
    transport.auth_timeout = STEP_TIMEOUT_S
    transport.channel_timeout = STEP_TIMEOUT_S
    offered = transport.get_security_options()
    offered.key_types = key_types
    try:
        transport.start_client(timeout=STEP_TIMEOUT_S)
        if not transport.initial_kex_done:  # paramiko returns silently from its own time-out
            raise EOFError(f"it did not finish the SSH handshake within {STEP_TIMEOUT_S:.0f} s")
    except paramiko.ssh_exception.IncompatiblePeer as error:
        transport.close()
        if "host key" not in str(error):
            message = f"{host}:{port} and the portal have no common cipher ({error})."
            raise NodeUnreachableError(message, SshStep.CONNECT) from error
        message = f"{host}:{port} has no host key of a supported type ({', '.join(key_types)})."
        raise HostKeyMismatchError(message) from error
    except (paramiko.SSHException, EOFError, OSError) as error:
        transport.close()
        message = f"{host}:{port} responds, but not as an SSH server: {error or 'it closed the connection'}."
        raise NodeUnreachableError(message, SshStep.CONNECT) from error
    return transport


def _connect(target: SshTarget) -> SshConnection:
    pinned_type, pinned_base64 = target.host_key.split()[:2]
    sock = connect_tcp(target.host, target.port)
    transport = _start_transport(sock, host_key_algorithms(target), target.host, target.port)
    key = transport.get_remote_server_key()
    presented = HostKey(key.get_name(), key.get_base64())
    if presented.line != f"{pinned_type} {pinned_base64}":
        transport.close()
        raise host_key_mismatch(target, presented.fingerprint, presented.line)
    return SshConnection(transport, sock, target)


def _authenticate(connection: SshConnection, authenticate: Callable[[], object], method: str) -> None:
    target = connection.target
    try:
        with WATCHDOG.deadline(connection, 2 * STEP_TIMEOUT_S, "the login"):
            missing = authenticate()
    except paramiko.AuthenticationException as error:
        connection.close()
        raise AuthenticationError(
            f"{target.address} rejects the portal's {method} for the account {target.user}.", SshStep.LOGIN
        ) from error
    except (paramiko.SSHException, EOFError, OSError) as error:
        connection.close()
        raise NodeUnreachableError(
            f"{target.address} closed the connection during the login: {error}.", SshStep.LOGIN
        ) from error
    if missing:
        connection.close()
        message = (
            f"{target.address} requires more than one authentication method for the account {target.user}."
        )
        raise AuthenticationError(message, SshStep.LOGIN)
    connection.start_keepalive()


def host_key_mismatch(
    target: SshTarget, fingerprint_shown: str, presented: str | None = None
) -> HostKeyMismatchError:
    """Return the error for a host key that differs from the confirmed one."""
    return HostKeyMismatchError(
        f"{target.address} presents the host key {fingerprint_shown}, "
        f"but {fingerprint(target.host_key)} was confirmed for it: it is "
        "another machine, or was reinstalled. Nothing was sent to it.",
        presented,
    )


def host_key_algorithms(target: SshTarget) -> tuple[str, ...]:
    """Return the signature algorithms of the pinned key's type."""
    pinned_type = target.host_key.split()[0]
    return _SIGNATURE_ALGORITHMS.get(pinned_type, (pinned_type,))
