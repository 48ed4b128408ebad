"""SSH server of one connection to a task: sessions and forwarded connections, each on a stream of its node.

Whoever connects is authenticated before: SSH authentication is "none" (docs/decisions/ssh.md).
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import paramiko

from agents.node.terminals import frames, websocket

log = logging.getLogger(__name__)

MAX_CHANNELS = 64
"""Open at a time in one connection."""
NEGOTIATION_TIMEOUT_S = 30.0
KEEPALIVE_INTERVAL_S = 30
_POLL_INTERVAL_S = 0.2
_POLICY_VIOLATION = (1008).to_bytes(2, "big")
"""Status of a WebSocket that the portal closes."""
_READ_BYTES = 32 * 1024
_HANDSHAKE_TIMEOUT_S = 9.0
_MAX_HEAD_BYTES = 4096
_LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
_OLD_CIPHERS = ("aes128-cbc", "aes192-cbc", "aes256-cbc", "3des-cbc")

_AUTHENTICATED: int = paramiko.AUTH_SUCCESSFUL
_ACCEPTED: int = paramiko.OPEN_SUCCEEDED
_PROHIBITED: int = paramiko.OPEN_FAILED_ADMINISTRATIVELY_PROHIBITED
_UNKNOWN_TYPE: int = paramiko.OPEN_FAILED_UNKNOWN_CHANNEL_TYPE
_SHORTAGE: int = paramiko.OPEN_FAILED_RESOURCE_SHORTAGE

OpenStream = Callable[[], socket.socket]
"""Returns a connected socket to the port of the node's ``open_streams``. Raises OSError."""


class WebSocketWire:
    """A socket for the SSH protocol whose bytes are the binary messages of a WebSocket (server side)."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._messages = websocket.MessageReader()
        self._received = bytearray()
        self._ended = False
        self._closed = False  # paramiko reads this name of a socket's attribute
        self.close_reason = ""

    def recv(self, size: int) -> bytes:
        while not self._received and not self._ended:
            data = self._sock.recv(_READ_BYTES)
            self._ended = not data
            try:
                for kind, payload in self._messages.feed(data):
                    if kind == websocket.BINARY:
                        self._received += payload
                    self._ended = self._ended or kind == websocket.CLOSE
            except websocket.WebSocketProtocolError as error:
                raise OSError(f"invalid message: {error}") from error
        data = bytes(self._received[:size])
        del self._received[:size]
        return data

    def send(self, data: bytes) -> int:
        """Send all of it: a part of a frame cannot be repeated."""
        left = memoryview(websocket.frame(websocket.BINARY, data))
        while left:
            with contextlib.suppress(TimeoutError):
                left = left[self._sock.send(left) :]
        return len(data)

    def settimeout(self, timeout_s: float | None) -> None:
        self._sock.settimeout(timeout_s)

    def close(self) -> None:
        self._closed = True
        with contextlib.suppress(OSError):
            if self.close_reason:
                self._sock.send(
                    websocket.frame(websocket.CLOSE, _POLICY_VIOLATION + self.close_reason.encode())
                )
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()


def open_authenticated(connect: OpenStream, secret: str) -> socket.socket:
    """Return a stream after its handshake. Raise OSError."""
    sock = connect()
    try:
        sock.settimeout(_HANDSHAKE_TIMEOUT_S)
        sock.sendall(
            b"GET / HTTP/1.1\r\nHost: streams\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            b"Authorization: Bearer " + secret.encode("ascii") + b"\r\nSec-WebSocket-Key: stream\r\n\r\n"
        )
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            data = sock.recv(1)
            head += data
            if not data or len(head) > _MAX_HEAD_BYTES:
                raise OSError("the node refused the stream")
        sock.settimeout(None)
    except BaseException:
        sock.close()
        raise
    return sock


class SshConnection:
    """Serves one client until either side ends; ``close`` may be called from any thread."""

    def __init__(
        self, client: socket.socket, holder: socket.socket, host_key: str, open_stream: OpenStream
    ) -> None:
        self._wire, self._holder, self._open_stream = WebSocketWire(client), holder, open_stream
        self._key = paramiko.Ed25519Key.from_private_key(io.StringIO(host_key))
        self._closing = threading.Event()
        self.last_input_s = time.monotonic()
        self.reason = ""

    def close(self, reason: str) -> None:
        """Request the end; ``serve`` returns soon."""
        self.reason = self._wire.close_reason = self.reason or reason
        self._closing.set()

    def serve(self, *, idle_s: float, on_input: Callable[[], object]) -> None:
        """Serve the client; ``on_input`` is called, at most once a second, when it sends something to the task."""
        transport = paramiko.Transport(self._wire)
        options = transport.get_security_options()
        options.ciphers = [each for each in options.ciphers if each not in _OLD_CIPHERS]
        transport.add_server_key(self._key)
        transport.set_keepalive(KEEPALIVE_INTERVAL_S)
        server = _Server(self._open_stream)
        negotiated = threading.Event()
        began_s = time.monotonic()
        try:
            transport.start_server(negotiated, server)
            while transport.is_active() and not self._closing.is_set():
                channel = transport.accept(_POLL_INTERVAL_S)
                if channel is not None:
                    server.begin(channel)
                now_s = time.monotonic()
                if server.last_input_s > self.last_input_s:
                    self.last_input_s = server.last_input_s
                    on_input()
                if now_s - self.last_input_s >= idle_s:
                    self.close("There was no input for too long.")
                if not transport.is_authenticated() and now_s - began_s >= NEGOTIATION_TIMEOUT_S:
                    self.close("The client did not authenticate.")
                if frames.is_closed(self._holder):
                    self.close("The task ended, or its node was lost.")
            self.reason = self.reason or "The client closed it."
        finally:
            self._closing.set()
            transport.close()
            self._wire.close()
            self._holder.close()


class _Server(paramiko.ServerInterface):  # type: ignore[misc]
    """Decides on the client's requests; its methods run in the thread of the transport and never wait."""

    def __init__(self, open_stream: OpenStream) -> None:
        self._open_stream = open_stream
        self._ports: dict[int, int] = {}
        self._channels: dict[int, _ChannelStream] = {}
        self._lock = threading.Lock()  # two threads find streams of channels
        self.last_input_s = 0.0

    def get_allowed_auths(self, username: str) -> str:
        return "none"

    def check_auth_none(self, username: str) -> int:
        return _AUTHENTICATED

    def check_channel_request(self, kind: str, chanid: int) -> int:
        return self._check_channel_count() if kind == "session" else _UNKNOWN_TYPE

    def check_channel_direct_tcpip_request(
        self, chanid: int, origin: tuple[str, int], destination: tuple[str, int]
    ) -> int:
        if destination[0] not in _LOOPBACK_NAMES or not 1 <= destination[1] <= 65_535:
            return _PROHIBITED
        self._ports[chanid] = destination[1]
        return self._check_channel_count()

    def _check_channel_count(self) -> int:
        with self._lock:
            self._channels = {key: each for key, each in self._channels.items() if not each.channel.closed}
            is_full = len(self._channels) >= MAX_CHANNELS
        return _SHORTAGE if is_full else _ACCEPTED

    def begin(self, channel: paramiko.Channel) -> None:
        """Connect an accepted channel, if it is a forwarded connection; a session waits for its request."""
        stream = self._stream_of(channel)  # the transport itself does not keep it
        port = self._ports.pop(channel.get_id(), None)
        if port is not None:
            stream.start({"port": port})

    def check_channel_pty_request(
        self,
        channel: Any,
        term: bytes,
        width: int,
        height: int,
        pixelwidth: int,
        pixelheight: int,
        modes: bytes,
    ) -> bool:
        self._stream_of(channel).size = (width, height)
        return True

    def check_channel_window_change_request(
        self, channel: Any, width: int, height: int, pixelwidth: int, pixelheight: int
    ) -> bool:
        self._stream_of(channel).size = (width, height)
        return True

    def check_channel_shell_request(self, channel: Any) -> bool:
        return self._stream_of(channel).start({})

    def check_channel_exec_request(self, channel: Any, command: bytes) -> bool:
        return self._stream_of(channel).start({"command": command.decode("utf-8", "surrogateescape")})

    def _stream_of(self, channel: paramiko.Channel) -> _ChannelStream:
        with self._lock:
            found = self._channels.get(channel.get_id())
            if found is None or found.channel is not channel:
                found = self._channels[channel.get_id()] = _ChannelStream(channel, self)
            return found

    def connect(self) -> socket.socket:
        return self._open_stream()

    def record_input(self) -> None:
        self.last_input_s = time.monotonic()


class _ChannelStream:
    """Relays between a channel and a stream, in a thread for each direction."""

    def __init__(self, channel: paramiko.Channel, server: _Server) -> None:
        self.channel, self._server = channel, server
        self.size: tuple[int, int] | None = None
        self._sent_size: tuple[int, int] | None = None
        self._started = False

    def start(self, request: dict[str, Any]) -> bool:
        """Begin; return False if it has begun: a session has one program."""
        if self._started:
            return False
        self._started = True
        threading.Thread(target=self._run, args=(request,), daemon=True, name="ssh-output").start()
        return True

    def _run(self, request: dict[str, Any]) -> None:
        try:
            with self._server.connect() as sock:
                self._relay(sock, request)
        except (OSError, EOFError, ValueError, frames.FrameError, paramiko.SSHException) as error:
            log.info("a stream of an SSH connection ended: %s", error)
        finally:
            with contextlib.suppress(OSError, EOFError, paramiko.SSHException):
                self.channel.close()

    def _relay(self, sock: socket.socket, request: dict[str, Any]) -> None:
        self._sent_size = self.size
        if self.size is not None:
            request |= {"cols": self.size[0] or 80, "rows": self.size[1] or 24}
        sock.sendall(frames.json_frame(frames.REQUEST, request))
        pump = threading.Thread(target=self._pump_input, args=(sock,), daemon=True, name="ssh-input")
        pump.start()
        reader = frames.FrameReader()
        try:
            while data := sock.recv(_READ_BYTES):
                for kind, payload in reader.feed(data):
                    if kind == frames.DATA:
                        _send_all(self.channel.send, payload)
                    elif kind == frames.STDERR:
                        _send_all(self.channel.send_stderr, payload)
                    elif kind == frames.END:
                        self._report_end(json.loads(payload), is_session="port" not in request)
                        return
        finally:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def _report_end(self, end: dict[str, Any], *, is_session: bool) -> None:
        if is_session:
            if end.get("error"):
                _send_all(self.channel.send_stderr, f"fairway: {end['error']}\r\n".encode())
            code = end.get("exit_code")
            self.channel.send_exit_status(code if isinstance(code, int) else 255)

    def _pump_input(self, sock: socket.socket) -> None:
        """Send what the client sends, and its size; end the stream when the client closes the channel."""
        ended = False
        self.channel.settimeout(_POLL_INTERVAL_S)
        with contextlib.suppress(OSError):
            while not self.channel.closed:
                if self.size != self._sent_size and self.size is not None:
                    self._sent_size = self.size
                    sock.sendall(frames.json_frame(frames.SIZE, {"cols": self.size[0], "rows": self.size[1]}))
                try:
                    data = self.channel.recv(_READ_BYTES)
                except TimeoutError:
                    continue
                if data:
                    self._server.record_input()
                    sock.sendall(frames.frame(frames.DATA, data))
                elif ended:
                    time.sleep(_POLL_INTERVAL_S)
                else:
                    ended = True
                    sock.sendall(frames.frame(frames.EOF))
            sock.shutdown(socket.SHUT_RDWR)


def _send_all(send: Callable[[bytes], int], data: bytes) -> None:
    """Send all data, however long the client does not read. Raise OSError when the channel is closed."""
    while data:
        with contextlib.suppress(TimeoutError):  # the time limit of the channel is that of reading
            data = data[send(data) :]
