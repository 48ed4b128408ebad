"""SSH to running jobs with the OpenSSH client, through a WebSocket of the portal."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
import select
import shlex
import socket
import ssl
import sys
import threading
import urllib.parse
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

from .api import Fairway, FairwayError, Refused, Unreachable, config_path

SUFFIX = ".fairway"
"""Of host names: JOB.fairway, or JOB.RANK.fairway for another rank than 0."""
OPEN_TIMEOUT_S = 45.0
_JOB = re.compile("[a-z0-9]{1,32}")
_HOST_KEY = re.compile("[a-z0-9@.-]{3,60} [A-Za-z0-9+/]{40,2000}={0,2}")
_READ_BYTES = 32 * 1024
_MAX_HEAD_BYTES = 16 * 1024
_BINARY, _CLOSE = 0x2, 0x8


def host_options(server: Fairway) -> dict[str, str]:
    """Return the options of OpenSSH for hosts ``*.fairway``. The proxy pins the host key, see ``proxy``."""
    return {
        "ProxyCommand": f"{shlex.join(_own_command())} ssh-proxy %h",
        "HostKeyAlias": _alias(server),
        "UserKnownHostsFile": f'"{_known_hosts()}"',
        "StrictHostKeyChecking": "yes",
        "PreferredAuthentications": "none",
        "ServerAliveInterval": "30",
    }


def config_block(server: Fairway) -> str:
    """Return the block for ~/.ssh/config.

    OpenSSH passes ProxyCommand to a shell, older versions with any host name (CVE-2023-51385): names with characters
    that the shell acts on are no hosts of the block.
    """
    lines = [f"    {name} {value}" for name, value in host_options(server).items()]
    refused = " ".join(f"!*{character}*" for character in "$`;&|<>")
    return "\n".join([f"Host *{SUFFIX} {refused}", *lines, ""])


def ssh_command(server: Fairway, job: str, rank: int, arguments: Sequence[str]) -> list[str]:
    """Return the arguments of ssh, which reads none of them as an option. Raise ValueError for what is not an id."""
    options = [word for name, value in host_options(server).items() for word in ("-o", f"{name}={value}")]
    command = arguments[1:] if arguments[:1] == ["--"] else arguments
    return ["ssh", *options, "--", _host(job, rank), *command]


def _host(job: str, rank: int) -> str:
    if not _JOB.fullmatch(job):
        raise ValueError(f"{job!r} is not the id of a job, such as ad3ek52866")
    if rank < 0:
        raise ValueError(f"{rank} is not a rank; ranks are numbered from 0")
    return job + (f".{rank}" if rank else "") + SUFFIX


def proxy(server: Fairway, host: str, source: BinaryIO, sink: BinaryIO) -> None:
    """Carry an SSH connection to a host between two streams and the portal, until either ends.

    The portal tells its host key over TLS; it is written to the known hosts before the client compares it.
    """
    job, _, rank = host.removesuffix(SUFFIX).partition(".")
    if not _JOB.fullmatch(job) or (rank and not re.fullmatch("[0-9]{1,6}", rank)):
        raise ValueError(f"{host!r} is not JOB{SUFFIX} or JOB.RANK{SUFFIX}")
    opened = server.call("POST", f"jobs/{job}/ssh/", json.dumps({"rank": int(rank or 0)}))
    if not _HOST_KEY.fullmatch(opened["host_key"]):
        raise ValueError("The portal sent no host key")
    _pin(_alias(server), opened["host_key"])
    wire = _Wire(server, opened["socket"])
    threading.Thread(target=wire.send_from, args=(source,), daemon=True).start()
    wire.receive_to(sink)


def _known_hosts() -> Path:
    return config_path().with_name("known_hosts")


def _alias(server: Fairway) -> str:
    return urllib.parse.urlsplit(server.url).netloc.replace(":", "-")


def _pin(alias: str, host_key: str) -> None:
    path = _known_hosts()
    lines = path.read_text(encoding="utf-8", errors="surrogateescape").split("\n") if path.exists() else []
    pinned = [*(line for line in lines if line and line.split(" ")[0] != alias), f"{alias} {host_key}"]
    if pinned != lines:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        new = path.with_suffix(f".{os.getpid()}")
        new.write_text("\n".join([*pinned, ""]), encoding="utf-8", errors="surrogateescape")
        new.replace(path)


def _own_command() -> list[str]:
    program = Path(sys.argv[0])
    if program.name == "fairway" and os.access(program, os.X_OK):
        return [str(program.absolute())]
    return [sys.executable, "-m", __package__ or "fairway"]


class _Wire:
    """Client side of a WebSocket (RFC 6455) with binary messages; one thread sends while another receives."""

    def __init__(self, server: Fairway, path: str) -> None:
        parts = urllib.parse.urlsplit(server.url)
        secure, host = parts.scheme == "https", parts.hostname or ""
        self._received = bytearray()
        self._lock = threading.Lock()  # a TLS connection is not safe for two threads
        try:
            self._sock = socket.create_connection(
                (host, parts.port or (443 if secure else 80)), OPEN_TIMEOUT_S
            )
            if secure:
                self._sock = ssl.create_default_context().wrap_socket(self._sock, server_hostname=host)
            self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._open(parts.path + path, parts.netloc, server.authorization)
            self._sock.setblocking(False)
        except OSError as error:
            raise Unreachable(f"{server.url} does not answer: {error}") from error

    def _open(self, path: str, netloc: str, authorization: str) -> None:
        key = base64.b64encode(os.urandom(16)).decode()
        lines = [f"GET {path} HTTP/1.1", f"Host: {netloc}", "Upgrade: websocket", "Connection: Upgrade"]
        lines += [f"Sec-WebSocket-Key: {key}", "Sec-WebSocket-Version: 13", f"Authorization: {authorization}"]
        lines += ["Accept: application/json", "", ""]
        self._sock.sendall("\r\n".join(lines).encode())
        while b"\r\n\r\n" not in self._received:
            data = self._sock.recv(_READ_BYTES)
            self._received += data
            if not data or len(self._received) > _MAX_HEAD_BYTES:
                raise ConnectionError("the answer is not HTTP")
        head, _, rest = bytes(self._received).partition(b"\r\n\r\n")
        self._received = bytearray(rest)
        words = head.split(None, 2)
        status = int(words[1]) if len(words) > 1 and words[1].isdigit() else 502
        if status != 101:
            raise Refused(
                status, {"detail": self._refusal() or f"The connection was refused with status {status}."}
            )

    def _refusal(self) -> str:
        """Return the message of a refusal, whose connection the server closes."""
        while (data := self._sock.recv(_READ_BYTES)) and len(self._received) < _MAX_HEAD_BYTES:
            self._received += data
        try:
            found = json.loads(self._received)
        except ValueError:
            return ""
        return str(found.get("detail") or "") if isinstance(found, dict) else ""

    def send_from(self, source: BinaryIO) -> None:
        with contextlib.suppress(OSError):  # the other direction reports it
            while data := os.read(source.fileno(), _READ_BYTES):
                self._send(_BINARY, data)
            self._send(_CLOSE, b"")

    def receive_to(self, sink: BinaryIO) -> None:
        """Write received messages until the connection ends. Raise FairwayError with the reason of the server."""
        while head := self._read(2):
            size = head[1] & 0x7F
            if size >= 126:
                size = int.from_bytes(self._read(2 if size == 126 else 8), "big")
            payload, kind = self._read(size), head[0] & 0x0F
            if kind == _CLOSE:
                if payload[2:]:
                    raise FairwayError(payload[2:].decode("utf-8", "replace"))
                return
            if kind == _BINARY:
                sink.write(payload)
                sink.flush()

    def _read(self, size: int) -> bytes:
        """Return that many bytes; none at the end of the connection."""
        while len(self._received) < size:
            with self._lock:
                try:
                    data = self._sock.recv(_READ_BYTES)
                except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
                    data = None
            if data is None:
                select.select([self._sock], [], [])
            elif data:
                self._received += data
            else:
                return b""
        data = bytes(self._received[:size])
        del self._received[:size]
        return data

    def _send(self, kind: int, payload: bytes) -> None:
        size, mask = len(payload), os.urandom(4)
        head = bytes([0x80 | kind, 0x80 | (size if size < 126 else 126)])
        head += size.to_bytes(2, "big") if size >= 126 else b""
        pattern = (mask * (size // 4 + 1))[:size]
        masked = (int.from_bytes(payload, "big") ^ int.from_bytes(pattern, "big")).to_bytes(size, "big")
        left = head + mask + masked
        while left:
            with self._lock:
                try:
                    left = left[self._sock.send(left) :]
                except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
                    pass
            if left:
                select.select([], [self._sock], [])
