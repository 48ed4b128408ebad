"""Process of one SSH connection: shells, commands and TCP connections in a task, one stream for each.

The SSH protocol ends in the portal. The first peer holds the process: it ends with this peer or the task. Each
further peer is served by a process of its own; its REQUEST says what it wants.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import socket
import sys
import time
from typing import Any, Dict, List, Optional, Tuple

from agents.node.host import cgroup, procfs
from agents.node.shim import drop_privileges
from agents.node.terminals import frames
from agents.node.terminals.shell import Shell
from agents.node.terminals.terminal import CONNECT_TIMEOUT_S, accept_peers, listen_in_background, set_size

_REQUEST_TIMEOUT_S = 10.0
_CONNECT_TIMEOUT_S = 5.0
_MAX_INPUT_BYTES = 256 * 1024
_READ_BYTES = 32 * 1024
_POLL_INTERVAL_S = 0.5
_END_INTERVAL_S = 0.02
_SEND_TIMEOUT_S = 5.0
_LOOPBACK = ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1"))


def main() -> int:
    order: Dict[str, Any] = json.loads(sys.stdin.buffer.read())
    listener = listen_in_background(order)
    until_s = time.monotonic() + CONNECT_TIMEOUT_S
    holder: Optional[socket.socket] = None

    def is_over() -> bool:
        if holder is None:
            return time.monotonic() >= until_s
        return frames.is_closed(holder) or not procfs.is_alive(order["pid"], order["pid_start"])

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the processes of streams need no wait
    for peer in accept_peers(listener, order["secret"], is_over):
        if holder is None:
            holder = peer
        elif os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            listener.close()
            holder.close()
            _serve(peer, order)
            os._exit(0)
        else:
            peer.close()
    return 0


def _serve(peer: socket.socket, order: Dict[str, Any]) -> None:
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with contextlib.suppress(OSError, ValueError, KeyError, frames.FrameError), peer:
        reader = frames.FrameReader()
        request, early = _read_request(peer, reader)
        try:
            if "port" in request:
                end: Any = Connection(connect_in_task(order, int(request["port"])))
            elif "cols" in request:
                end = Shell.start(order, request.get("command"))
                _resize(end, request)
            else:
                end = Shell.start_without_terminal(order, request.get("command"))
        except OSError as error:
            _send_end(peer, b"", {"exit_code": None, "error": str(error)})
            return
        _Stream(peer, reader, end, order).run(early)


def _read_request(peer: socket.socket, reader: frames.FrameReader) -> Tuple[Dict[str, Any], List[Any]]:
    """Return the request and the frames that came with it."""
    peer.settimeout(_REQUEST_TIMEOUT_S)
    while True:
        data = peer.recv(_READ_BYTES)
        if not data:
            raise ConnectionError("no request")
        found = list(reader.feed(data))
        if found:
            kind, payload = found[0]
            request = json.loads(payload)
            if kind != frames.REQUEST or not isinstance(request, dict):
                raise ValueError("no request")
            return request, found[1:]


def connect_in_task(order: Dict[str, Any], port: int) -> socket.socket:
    """Return a connection to a port of a task's loopback address, made with the rights of the task. Raise OSError.

    Without root, the agent's account owns the user namespace of a container and so has the right to enter it. A
    container on the network of its node is refused: from here its firewall rules would not apply.
    """
    pid, shell = order["pid"], order["shell"]
    foreign = [
        kind
        for kind in ("user", "net")
        if os.readlink(f"/proc/{pid}/ns/{kind}") != os.readlink(f"/proc/self/ns/{kind}")
    ]
    views = [os.open(f"/proc/{pid}/ns/{kind}", os.O_RDONLY) for kind in foreign]
    if not procfs.is_alive(pid, order["pid_start"]):
        raise OSError("its task has ended")
    group = None
    if "command" not in shell:
        group = cgroup.find(shell["name"])
    elif "net" not in foreign:
        raise OSError("nothing is forwarded to a task on the network of its node")
    if group is not None:
        group.join()
    libc = ctypes.CDLL(None, use_errno=True)
    for view in views:
        if libc.setns(view, 0) != 0:
            raise OSError(ctypes.get_errno(), "the network of its task cannot be entered")
        os.close(view)
    drop_privileges(shell.get("task_uid"))
    problem: Optional[OSError] = None
    for family, address in _LOOPBACK:
        # create_connection would load a codec, which the account of the task may not read
        sock = socket.socket(family)
        sock.settimeout(_CONNECT_TIMEOUT_S)
        try:
            sock.connect((address, port))
            return sock
        except OSError as error:
            sock.close()
            problem = problem or error
    raise problem or OSError("there is no loopback address")


def _send_end(peer: socket.socket, output: bytes, ended: Dict[str, Any]) -> None:
    peer.settimeout(_SEND_TIMEOUT_S)
    peer.sendall(output + frames.json_frame(frames.END, ended))
    peer.shutdown(socket.SHUT_WR)
    while peer.recv(_READ_BYTES):  # closing with unread bytes would discard what was sent
        pass


def _resize(shell: Shell, size: Dict[str, Any]) -> None:
    cols, rows = (min(max(int(size[key]), 1), 1000) for key in ("cols", "rows"))
    set_size(shell.outputs[0], cols, rows)


class Connection:
    """A TCP connection of a task, used like a shell: it has ended once its output has."""

    is_ready, has_terminal = True, False

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self.input: Optional[int] = sock.fileno()
        self.outputs = [sock.fileno()]

    def strip_pid_marker(self, data: bytes) -> bytes:
        return data

    def wait(self, timeout_s: float) -> Optional[int]:
        return 0

    def end_input(self) -> None:
        self.input = None
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_WR)

    def terminate(self) -> Optional[int]:
        self._sock.close()
        return None


class _Stream:
    """Relays between a peer and its end, a shell or connection, until either ends."""

    def __init__(
        self, peer: socket.socket, reader: frames.FrameReader, end: Any, order: Dict[str, Any]
    ) -> None:
        peer.setblocking(False)
        self._peer, self._reader, self._end, self._order = peer, reader, end, order
        self._input = bytearray()
        self._output = bytearray()
        self._input_ended = False

    def run(self, early: List[Any]) -> None:
        """Relay, end the shell or connection, and report how it ended; nothing is reported to a lost peer."""
        lost = True
        try:
            for kind, payload in early:
                self._handle(kind, payload)
            lost = not self._relay()
        finally:
            code = self._end.terminate()
        if not lost:
            _send_end(self._peer, bytes(self._output), {"exit_code": code})

    def _relay(self) -> bool:
        """Return False when the peer is lost."""
        end, open_outputs = self._end, set(self._end.outputs)
        while True:
            reading: List[Any] = [self._peer] if len(self._input) < _MAX_INPUT_BYTES else []
            reads_output = not self._output
            reading += open_outputs if reads_output else []
            writing: List[Any] = [self._peer] if self._output else []
            if self._input and end.input is not None and end.is_ready:
                writing.append(end.input)
            ended = end.wait(0.0) is not None  # read before its output: what it wrote is then complete
            wait_s = (
                _POLL_INTERVAL_S if open_outputs and not (ended and end.has_terminal) else _END_INTERVAL_S
            )
            readable, writable, _ = select.select(reading, writing, [], wait_s)
            if self._peer in writable:
                del self._output[: self._peer.send(self._output)]
            if end.input in writable:
                self._write_input()
            if self._peer in readable and not self._receive():
                return False
            progressed = False
            for descriptor in open_outputs & set(readable):
                progressed = self._read_output(descriptor)
                if not progressed:
                    open_outputs.discard(descriptor)
            # pipes are read to their end, as by sshd
            drained = not open_outputs or (end.has_terminal and reads_output and not progressed)
            if ended and drained and not self._output:
                return True
            if not procfs.is_alive(self._order["pid"], self._order["pid_start"]):
                return True

    def _read_output(self, descriptor: int) -> bool:
        """Read output; return False at its end."""
        try:
            data = os.read(descriptor, _READ_BYTES)
        except (
            OSError
        ):  # a pseudo terminal raises EIO when its other side is closed; a connection may be reset
            data = b""
        is_first = descriptor == self._end.outputs[0]
        shown = self._end.strip_pid_marker(data) if is_first else data
        if shown:
            self._output += frames.frame(frames.DATA if is_first else frames.STDERR, shown)
        return bool(data)

    def _write_input(self) -> None:
        try:
            del self._input[: os.write(self._end.input, self._input)]
        except OSError:  # it no longer reads
            self._input.clear()
            self._input_ended = True
        self._end_input_if_sent()

    def _end_input_if_sent(self) -> None:
        if self._input_ended and not self._input and self._end.input is not None:
            self._end.end_input()

    def _receive(self) -> bool:
        data = self._peer.recv(_READ_BYTES)
        for kind, payload in self._reader.feed(data):
            self._handle(kind, payload)
        return bool(data)

    def _handle(self, kind: int, payload: bytes) -> None:
        if kind == frames.DATA and not self._input_ended:
            self._input += payload
        elif kind == frames.EOF:
            self._input_ended = True
            self._end_input_if_sent()
        elif kind == frames.SIZE and self._end.has_terminal:
            _resize(self._end, json.loads(payload))
