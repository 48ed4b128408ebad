"""Frames of a stream between the portal and a task: one byte for the kind, four for the length, and the payload.

The first frame of a stream is a REQUEST (JSON), the last one from the node an END (JSON).
"""

from __future__ import annotations

import json
import socket
import struct
from typing import Any, Dict, Iterator, Tuple

REQUEST, DATA, STDERR, EOF, SIZE, END = range(6)
"""EOF: no more input. SIZE: JSON with ``cols`` and ``rows``. END: JSON with ``exit_code``, and ``error`` if any."""
MAX_PAYLOAD_BYTES = 64 * 1024
_HEAD = struct.Struct("!BI")


class FrameError(Exception):
    """A frame that is too long, or of an unknown kind."""


def frame(kind: int, payload: bytes = b"") -> bytes:
    return _HEAD.pack(kind, len(payload)) + payload


def json_frame(kind: int, content: Dict[str, Any]) -> bytes:
    return frame(kind, json.dumps(content).encode())


def is_closed(sock: socket.socket) -> bool:
    """Return True if the other side of a socket, on which it sends nothing, has closed it."""
    try:
        return not sock.recv(1, socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True


class FrameReader:
    """Assembles frames from bytes."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> Iterator[Tuple[int, bytes]]:
        """Yield the frames completed by these bytes. Raise FrameError."""
        self._data += data
        while len(self._data) >= _HEAD.size:
            kind, size = _HEAD.unpack_from(self._data)
            if kind > END or size > MAX_PAYLOAD_BYTES:
                raise FrameError(f"kind {kind}, {size} bytes")
            end = _HEAD.size + size
            if len(self._data) < end:
                return
            payload = bytes(self._data[_HEAD.size : end])
            del self._data[:end]
            yield kind, payload
