"""Process of one terminal: waits for its peer, then relays bytes between it and a shell until either ends.

Binary messages are input and output. Text messages are JSON: from the peer ``{"cols", "rows"}`` (new size)
and ``{"seen"}`` (bytes shown so far), to the peer finally ``{"ended", "exit_code"}``. At most WINDOW_BYTES
are unacknowledged, so a shell with endless output fills no memory here or in the browser.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import signal
import socket
import struct
import sys
import termios
import time
from typing import Any, Callable, Dict, Generator, List, NamedTuple, Optional, Tuple

from agents.node.host import procfs
from agents.node.terminals import websocket
from agents.node.terminals.shell import Shell

CONNECT_TIMEOUT_S = 30.0
WINDOW_BYTES = 256 * 1024
_HANDSHAKE_TIMEOUT_S = 5.0
_MAX_PENDING = 8
_MAX_INPUT_BYTES = 64 * 1024
"""Pending input; beyond it the peer is not read."""
_READ_BYTES = 32 * 1024
_POLL_INTERVAL_S = 0.5
_FINAL_SEND_TIMEOUT_S = 2.0
_TASK_END_TIMEOUT_S = 1.0
EXITED, IDLE, TASK_ENDED, LOST = "exited", "idle", "task_ended", "lost"


def main() -> int:
    order: Dict[str, Any] = json.loads(sys.stdin.buffer.read())
    listener = listen_in_background(order)
    until_s = time.monotonic() + CONNECT_TIMEOUT_S
    peers = accept_peers(listener, order["secret"], lambda: time.monotonic() >= until_s)
    peer = next(peers, None)
    peers.close()
    listener.close()
    if peer is not None:
        Terminal(peer, Shell.start(order), order).run()
    return 0


def listen_in_background(order: Dict[str, Any]) -> socket.socket:
    """Listen on a port, print it, and continue in the background."""
    listener = socket.socket()
    listener.bind((order["loopback"], 0))
    listener.listen(_MAX_PENDING)
    sys.stdout.write(str(listener.getsockname()[1]))
    sys.stdout.flush()
    if os.fork() != 0:
        os._exit(0)
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    os.close(null)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    return listener


class PendingConnection(NamedTuple):
    """A connection that has not yet authenticated."""

    sock: socket.socket
    deadline_s: float
    received: bytearray


def accept_peers(
    listener: socket.socket, secret: str, is_over: Callable[[], bool]
) -> Generator[socket.socket, None, None]:
    """Yield each authenticated peer after its handshake, until ``is_over``.

    Any process on the node may connect: unauthenticated connections are closed and delay no one.
    """
    listener.setblocking(False)
    knocks: List[PendingConnection] = []
    try:
        while not is_over():
            reading: List[socket.socket] = [knock.sock for knock in knocks]
            if len(knocks) < _MAX_PENDING:
                reading.append(listener)
            ready, _, _ = select.select(reading, [], [], 0.25)
            now_s = time.monotonic()
            if listener in ready:
                with contextlib.suppress(OSError):
                    sock = listener.accept()[0]
                    sock.setblocking(False)
                    knocks.append(PendingConnection(sock, now_s + _HANDSHAKE_TIMEOUT_S, bytearray()))
            for knock in list(knocks):
                if knock.sock in ready:
                    try:
                        data = knock.sock.recv(4096)
                    except OSError:
                        data = b""
                    knock.received.extend(data)
                    whole = knock.received.endswith(b"\r\n\r\n")
                    answer = websocket.handshake_response(bytes(knock.received), secret) if whole else None
                    if answer is not None:
                        knocks.remove(knock)
                        knock.sock.setblocking(True)
                        knock.sock.sendall(answer)
                        yield knock.sock
                        continue
                    if data and not whole and len(knock.received) < websocket.MAX_HEAD_BYTES:
                        continue
                elif now_s < knock.deadline_s:
                    continue
                knocks.remove(knock)
                knock.sock.close()
    finally:
        for knock in knocks:
            knock.sock.close()


def set_size(master: int, cols: int, rows: int) -> None:
    fcntl.ioctl(master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, cols, 0, 0))


class Terminal:
    """Relays bytes between one peer and one shell."""

    def __init__(self, peer: socket.socket, shell: Shell, order: Dict[str, Any]) -> None:
        peer.setblocking(False)
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._peer = peer
        self._shell = shell
        self._task: Tuple[int, Optional[int]] = (order["pid"], order["pid_start"])
        self._idle_s = float(order["idle_s"])
        self._messages = websocket.MessageReader()
        self._input = bytearray()
        self._output = bytearray()
        self._sent_bytes = 0
        self._acknowledged_bytes = 0
        self._last_input_s = time.monotonic()
        set_size(shell.master, order["cols"], order["rows"])

    def run(self) -> None:
        """Run until the shell, the task, the idle time or the connection ends; then end the shell."""
        why = LOST
        try:
            why = self._relay()
        except (OSError, websocket.WebSocketProtocolError):
            why = LOST
        finally:
            code = self._shell.terminate()
            if why != LOST:
                self._send_end(why, code)
            self._peer.close()

    def _relay(self) -> str:
        master = self._shell.master
        looked_s = 0.0
        while True:
            reading: List[Any] = [self._peer] if len(self._input) < _MAX_INPUT_BYTES else []
            unseen = self._sent_bytes - self._acknowledged_bytes
            if unseen < WINDOW_BYTES and not self._output:
                reading.append(master)
            writing: List[Any] = [self._peer] if self._output else []
            if self._input and self._shell.is_ready:
                writing.append(master)
            readable, writable, _ = select.select(reading, writing, [], _POLL_INTERVAL_S)
            if self._peer in writable:
                del self._output[: self._peer.send(self._output)]
            if master in writable:
                del self._input[: os.write(master, self._input)]
            if self._peer in readable and not self._handle_input(self._peer.recv(_READ_BYTES)):
                return LOST
            if master in readable and not self._read_shell():
                return self._shell_end_reason()
            now_s = time.monotonic()
            if now_s - looked_s >= _POLL_INTERVAL_S:
                looked_s = now_s
                if not procfs.is_alive(*self._task):
                    return TASK_ENDED
                if now_s - self._last_input_s >= self._idle_s:
                    return IDLE

    def _read_shell(self) -> bool:
        """Read output of the shell; return False at its end."""
        try:
            data = os.read(self._shell.master, _READ_BYTES)
        except OSError:  # a pseudo terminal raises EIO when its other side is closed
            data = b""
        shown = self._shell.strip_pid_marker(data)
        if shown:
            self._sent_bytes += len(shown)
            self._output += websocket.frame(websocket.BINARY, shown)
        return bool(data)

    def _handle_input(self, data: bytes) -> bool:
        """Handle input of the peer; return False when it closed."""
        if not data:
            return False
        for kind, payload in self._messages.feed(data):
            if kind == websocket.BINARY:
                self._input += payload
                self._last_input_s = time.monotonic()
            elif kind == websocket.TEXT:
                self._handle_control(payload)
            elif kind == websocket.PING and len(self._output) < _READ_BYTES:
                self._output += websocket.frame(websocket.PONG, payload)
            elif kind == websocket.CLOSE:
                return False
        return True

    def _handle_control(self, payload: bytes) -> None:
        """Handle a control message; ignore invalid ones."""
        try:
            word = json.loads(payload)
        except ValueError:
            return
        if not isinstance(word, dict) or not all(type(value) is int for value in word.values()):
            return
        if set(word) == {"cols", "rows"} and all(1 <= value <= 1000 for value in word.values()):
            set_size(self._shell.master, word["cols"], word["rows"])
        elif set(word) == {"seen"}:
            self._acknowledged_bytes = min(max(self._acknowledged_bytes, word["seen"]), self._sent_bytes)

    def _shell_end_reason(self) -> str:
        """Return why the shell ended: by itself, or with its task, whose end may show a moment later."""
        code = self._shell.wait(_TASK_END_TIMEOUT_S)
        until_s = time.monotonic() + (_TASK_END_TIMEOUT_S if code is None or code >= 128 else 0.0)
        while procfs.is_alive(*self._task):
            if time.monotonic() >= until_s:
                return EXITED
            time.sleep(0.05)
        return TASK_ENDED

    def _send_end(self, reason: str, code: Optional[int]) -> None:
        words = json.dumps({"ended": reason, "exit_code": code}).encode()
        self._output += websocket.frame(websocket.TEXT, words)
        self._output += websocket.frame(websocket.CLOSE, struct.pack("!H", 1000))
        self._peer.settimeout(_FINAL_SEND_TIMEOUT_S)
        with contextlib.suppress(OSError):
            self._peer.sendall(self._output)
            self._peer.shutdown(socket.SHUT_WR)
            while self._peer.recv(_READ_BYTES):  # closing with unread bytes would discard what was sent
                pass
