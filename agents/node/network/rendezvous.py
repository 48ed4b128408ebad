"""Rendezvous of a gang: port check, placeholder listener, and connectivity check.

Until rank 0 starts, its node's agent listens on the port, so that the other nodes can check their connection.
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
from agents.node.host.atomic_files import remove_file
from agents.node.host.procfs import read_text
from agents.node.spec.task_spec import parse_integer, parse_ip_address, parse_public_id, parse_seconds

_POLL_INTERVAL_S = 0.1
_RELEASE_TIMEOUT_S = 1.0
_MAX_LISTEN_S = 900.0
_CLIENT_TIMEOUT_S = 1.0
"""How long a greeted client may take to close; the side that closes first gets the TIME_WAIT."""
_MAX_CHECK_TIMEOUT_S = 10.0
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
            with open(_owner_file(folder), "w", encoding="ascii") as stream:
                stream.write(word)
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
        greeted: Dict[socket.socket, float] = {}
        with selectors.DefaultSelector() as ready, self._server, self._stop_read:
            ready.register(self._server, selectors.EVENT_READ)
            ready.register(self._stop_read, selectors.EVENT_READ)
            while time.monotonic() < until_s and read_text(self._marker) == self._token:
                for key, _ in ready.select(_POLL_INTERVAL_S):
                    if key.fileobj is self._stop_read:
                        until_s = 0.0
                    elif key.fileobj is self._server:
                        with contextlib.suppress(OSError):
                            client, _ = self._server.accept()
                            client.setblocking(False)
                            client.send(self._greeting)
                            greeted[client] = time.monotonic() + _CLIENT_TIMEOUT_S
                            ready.register(client, selectors.EVENT_READ)
                    else:
                        greeted[key.fileobj] = _read_deadline_s(key.fileobj, greeted)  # type: ignore[index,arg-type]
                for client in [each for each, until in greeted.items() if until <= time.monotonic()]:
                    ready.unregister(client)
                    del greeted[client]
                    client.close()
            for client in greeted:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_ZERO)
                client.close()


def _read_deadline_s(client: socket.socket, greeted: Dict[socket.socket, float]) -> float:
    """Return until when a client that sent data may stay; 0 when it closed."""
    with contextlib.suppress(OSError):
        if client.recv(512):
            return greeted[client]
    return 0.0


def check_rendezvous(fields: Dict[str, Any], cluster: str) -> Dict[str, Any]:
    """Check the connection to a rendezvous: ``why`` it failed, None on success; and ``seconds``.

    Only the agent of rank 0's node knows the greeting.
    """
    address, port = parse_ip_address(fields.get("address")), parse_integer(fields, "port")
    expected = rendezvous_greeting(cluster, parse_public_id(fields, "job"), parse_integer(fields, "attempt"))
    within_s = min(parse_seconds(fields.get("within_s"), 3.0), _MAX_CHECK_TIMEOUT_S)
    begun_s = time.monotonic()
    why: Optional[str] = None
    try:
        with socket.create_connection((address, port), timeout=within_s) as there:
            heard = b""
            while len(heard) < len(expected):
                there.settimeout(max(0.01, begun_s + within_s - time.monotonic()))
                piece = there.recv(512)
                if not piece:
                    break
                heard += piece
            if heard != expected:
                why = "another service responds there"
    except socket.timeout:
        why = f"no response in {within_s:g} s"
    except OSError as error:
        why = _ERRNO_REASONS.get(error.errno or 0) or (error.strerror or str(error)).lower()
    return {"reason": why, "seconds": round(time.monotonic() - begun_s, 4)}
