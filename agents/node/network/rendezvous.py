"""Rendezvous of a gang: port check, placeholder listener, connectivity check and bandwidth measurement.

Until rank 0 starts, its node's agent listens on the port, so that the other nodes can check their connection.
A client that sends ``MEASURE`` after the greeting waits for ``GO``, then sends data until it shuts down its side,
and gets the number of bytes received. The listener serves one measurement at a time, so that nodes that check
together do not share the bandwidth.
The listener in charge is the one whose token is in the file ``rendezvous`` of rank 0's folder: an agent
process that was replaced without notice finds another token there and releases the port.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import selectors
import socket
import struct
import threading
import time
from typing import Any, Dict, Optional

from agents.node.errors import RENDEZVOUS_PORT_IN_USE, AgentError
from agents.node.host.atomic_files import remove_file, write_atomic
from agents.node.host.procfs import read_text
from agents.node.spec.task_spec import parse_integer, parse_ip_address, parse_public_id, parse_seconds

_POLL_INTERVAL_S = 0.1
_RELEASE_TIMEOUT_S = 1.0
_MAX_LISTEN_S = 900.0
_CLIENT_TIMEOUT_S = 1.0
"""How long a greeted client may take to close; the side that closes first gets the TIME_WAIT."""
_MAX_CHECK_TIMEOUT_S = 10.0
_MEASURE, _GO = b"measure\n", b"go\n"
_MAX_MEASURE_S = 2.0
_MEASURE_TIMEOUT_S = 5.0
"""How long the listener waits for the data of one measurement."""
_CHUNK_BYTES = 256 * 1024
_LINGER_ZERO = struct.pack("ii", 1, 0)

_ERRNO_REASONS = {
    errno.ECONNREFUSED: "connection refused",
    errno.EHOSTUNREACH: "no route to it",
    errno.ENETUNREACH: "no route to it",
    errno.ECONNRESET: "the connection was reset",
}


def rendezvous_greeting(cluster: str, job: str, attempt: int) -> bytes:
    """Return the greeting by which clients recognize the right node."""
    return f"fairway {cluster} {job} {attempt}\n".encode("ascii")


class RendezvousListeners:
    """Listeners of this agent process by name of the rank 0 task."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._listeners: Dict[str, _Listener] = {}

    def listen(self, name: str, folder: str, port: int, greeting: bytes) -> None:
        """Listen on a port until :meth:`release`; idempotent. Refuse when another program listens there."""
        with self._lock:
            old = self._listeners.get(name)
            if old is not None and old.is_listening():
                return
            word = secrets.token_hex(8)
            others = os.path.exists(_owner_file(folder))
            write_atomic(_owner_file(folder), word.encode("ascii"), sync=False)
            self._listeners[name] = _Listener(_listen_on(port, others), _owner_file(folder), word, greeting)

    def release(self, name: str, folder: str, port: Optional[int]) -> None:
        """Free the port, also from other agent processes; refuse while another program listens there."""
        with self._lock:
            others = os.path.exists(_owner_file(folder))
            remove_file(_owner_file(folder))
            mine = self._listeners.pop(name, None)
            if mine is not None:
                mine.stop()
        if port is not None:
            _listen_on(port, others).close()

    def is_listening(self, name: str) -> bool:
        with self._lock:
            mine = self._listeners.get(name)
            return mine is not None and mine.is_listening()


def _owner_file(folder: str) -> str:
    return os.path.join(folder, "rendezvous")


def _listen_on(port: int, wait_for_release: bool) -> socket.socket:
    """Return a listening socket on all addresses; ``wait_for_release`` waits for another agent process."""
    until_s = time.monotonic() + (_RELEASE_TIMEOUT_S if wait_for_release else 0.0)
    while True:
        try:
            # connections in TIME_WAIT do not block the port
            return _create_server(port)
        except OSError as error:
            if time.monotonic() >= until_s:
                message = f"Another process listens on port {port} of this node."
                raise AgentError(RENDEZVOUS_PORT_IN_USE, message) from error
        time.sleep(0.02)


def _create_server(port: int) -> socket.socket:
    try:
        return socket.create_server(("::", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=128)
    except OSError as error:
        if error.errno not in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL):
            raise
    except ValueError:  # dual-stack sockets are unavailable
        pass
    return socket.create_server(("", port), backlog=128)


class _Listener:
    """A thread that greets clients and ignores their input."""

    def __init__(self, server: socket.socket, marker: str, token: str, greeting: bytes) -> None:
        self._server = server
        self._marker, self._token, self._greeting = marker, token, greeting
        self._stop_write, self._stop_read = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name="rendezvous", daemon=True)
        self._thread.start()

    def is_listening(self) -> bool:
        return self._thread.is_alive() and read_text(self._marker) == self._token

    def stop(self) -> None:
        self._stop_write.close()
        self._thread.join(timeout=_RELEASE_TIMEOUT_S)

    def _run(self) -> None:
        until_s = time.monotonic() + _MAX_LISTEN_S
        clients: Dict[socket.socket, _Client] = {}
        with selectors.DefaultSelector() as ready, self._server, self._stop_read:
            ready.register(self._server, selectors.EVENT_READ)
            ready.register(self._stop_read, selectors.EVENT_READ)
            marker_due_s = 0.0
            while time.monotonic() < until_s:
                if time.monotonic() >= marker_due_s:
                    if read_text(self._marker) != self._token:
                        break
                    marker_due_s = time.monotonic() + _POLL_INTERVAL_S
                for key, _ in ready.select(_POLL_INTERVAL_S):
                    if key.fileobj is self._stop_read:
                        until_s = 0.0
                    elif key.fileobj is self._server:
                        with contextlib.suppress(OSError):
                            client, _ = self._server.accept()
                            client.setblocking(False)
                            client.send(self._greeting)
                            clients[client] = _Client(time.monotonic() + _CLIENT_TIMEOUT_S)
                            ready.register(client, selectors.EVENT_READ)
                    else:
                        _read_client(key.fileobj, clients[key.fileobj])  # type: ignore[index,arg-type]
                for client in [each for each, row in clients.items() if row.until_s <= time.monotonic()]:
                    ready.unregister(client)
                    del clients[client]
                    client.close()
                _start_next_measurement(clients)
            for client in clients:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_ZERO)
                client.close()


class _Client:
    """A connected client: greeted, then waiting for its measurement, then measured."""

    def __init__(self, until_s: float) -> None:
        self.until_s = until_s
        self.waits = False
        self.received_bytes: Optional[int] = None


def _read_client(client: socket.socket, row: _Client) -> None:
    """Read what a client sent; set ``until_s`` to 0 when it is done or broken."""
    try:
        data = client.recv(_CHUNK_BYTES)
        if data and row.received_bytes is not None:
            row.received_bytes += len(data)
        elif data == _MEASURE:
            row.waits, row.until_s = True, time.monotonic() + _MAX_LISTEN_S
        elif not data:
            if row.received_bytes is not None:
                client.send(b"%d\n" % row.received_bytes)
            row.until_s = 0.0
    except BlockingIOError:
        pass
    except OSError:
        row.until_s = 0.0


def _start_next_measurement(clients: Dict[socket.socket, _Client]) -> None:
    if any(row.received_bytes is not None for row in clients.values()):
        return
    for client, row in clients.items():
        if row.waits:
            row.waits, row.received_bytes = False, 0
            row.until_s = time.monotonic() + _MEASURE_TIMEOUT_S
            try:
                client.send(_GO)
            except OSError:
                row.until_s = 0.0
            return


def check_rendezvous(cluster: str, fields: Dict[str, Any]) -> Dict[str, Any]:
    """Check the connection to a rendezvous: ``reason`` why it failed, None on success; and ``seconds``.

    With ``measure_s`` above 0, also measure the bandwidth of one stream for that time: ``mib_per_s``, None when
    the listener did not measure it. Only the agent of rank 0's node knows the greeting.
    """
    address, port = parse_ip_address(fields.get("address")), parse_integer(fields, "port")
    expected = rendezvous_greeting(cluster, parse_public_id(fields, "job"), parse_integer(fields, "attempt"))
    within_s = min(parse_seconds(fields.get("within_s"), 3.0), _MAX_CHECK_TIMEOUT_S)
    measure_s = min(parse_seconds(fields.get("measure_s"), 0.0), _MAX_MEASURE_S)
    begun_s = time.monotonic()
    seconds, mib_per_s, why = 0.0, None, None
    try:
        with socket.create_connection((address, port), timeout=within_s) as there:
            heard = _receive(there, len(expected), begun_s + within_s)
            if heard != expected:
                why = "another service responds there"
            seconds = time.monotonic() - begun_s
            if why is None and measure_s > 0.0:
                with contextlib.suppress(OSError, ValueError):
                    mib_per_s = _measure_mib_per_s(there, measure_s, begun_s + _MAX_CHECK_TIMEOUT_S)
    except socket.timeout:
        why = f"no response in {within_s:g} s"
    except OSError as error:
        why = _ERRNO_REASONS.get(error.errno or 0) or (error.strerror or str(error)).lower()
    return {
        "reason": why,
        "seconds": round(seconds or time.monotonic() - begun_s, 4),
        "mib_per_s": mib_per_s,
    }


def _receive(there: socket.socket, size: int, until_s: float) -> bytes:
    """Return up to ``size`` bytes; fewer when the other side closes. Raise socket.timeout."""
    heard = b""
    while len(heard) < size:
        there.settimeout(max(0.01, until_s - time.monotonic()))
        piece = there.recv(size - len(heard))
        if not piece:
            break
        heard += piece
    return heard


def _measure_mib_per_s(there: socket.socket, measure_s: float, until_s: float) -> Optional[float]:
    """Send for ``measure_s`` and divide what arrived by the time until the other side confirmed it."""
    there.sendall(_MEASURE)
    if _receive(there, len(_GO), until_s) != _GO:
        return None
    chunk = bytes(_CHUNK_BYTES)
    begun_s = time.monotonic()
    there.settimeout(max(0.01, until_s - begun_s))
    while time.monotonic() - begun_s < measure_s:
        there.sendall(chunk)
    there.shutdown(socket.SHUT_WR)
    received = int(_receive(there, 20, until_s))
    return round(received / (time.monotonic() - begun_s) / 1024**2, 1)
