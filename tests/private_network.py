"""A network with nothing but a loopback interface, for a browser and its server.

Chromium drops requests when an interface appears or disappears, as container tests make them on this machine.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

CLONE_NEWNET = 0x40000000
SIOCSIFFLAGS, IFF_UP = 0x8914, 1
Result = TypeVar("Result")
_libc = ctypes.CDLL(None, use_errno=True)


class PrivateNetwork:
    """A network namespace that exists until `close`. Only root can make one."""

    def __init__(self) -> None:
        self._namespace = _in_thread(_make_namespace)

    def listen(self) -> socket.socket:
        """Return a socket that listens on 127.0.0.1 there; any thread can accept its connections."""

        def listen() -> socket.socket:
            _check(_libc.setns(self._namespace, CLONE_NEWNET))
            return listen_here()

        return _in_thread(listen)

    def write_launcher(self, program: str, path: Path) -> Path:
        """Write a program that runs another one there, while this process lives."""
        namespace = f"/proc/{os.getpid()}/fd/{self._namespace}"
        path.write_text(f'#!/bin/sh\nexec nsenter --net={namespace} -- {program} "$@"\n')
        path.chmod(0o755)
        return path

    def close(self) -> None:
        os.close(self._namespace)


def listen_here() -> socket.socket:
    """Return a socket that listens on a free port of 127.0.0.1."""
    return socket.create_server(("127.0.0.1", 0), backlog=128)


def _in_thread(act: Callable[[], Result]) -> Result:
    """Call it in a thread that ends afterwards: a namespace is entered by a thread."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(act).result()


def _make_namespace() -> int:
    _check(_libc.unshare(CLONE_NEWNET))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        fcntl.ioctl(control, SIOCSIFFLAGS, struct.pack("16sH22x", b"lo", IFF_UP))
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY)


def _check(result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
