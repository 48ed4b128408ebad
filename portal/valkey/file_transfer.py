"""Passes the answer to a file request from worker-nodes to the web process, a few pieces ahead of the reader.

Pieces wait in a list in Valkey; the reader acknowledges each in a second list, so a slow browser slows its node.
Both expire: nothing here outlives the transfer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from portal.valkey.client import valkey_client

HEADER, DATA, END, ERROR = b"h", b"d", b"e", b"x"
PIECES_AHEAD = 4
SENDER_WAIT_S = 30
"""After this time without an acknowledgement the reader is gone."""
RECEIVER_WAIT_S = 30
TTL_S = 60
_SOCKET_TIMEOUT_S = 35.0
_STOP = b"stop"


def _keys(request: str) -> tuple[str, str]:
    return f"fairway:files:{request}", f"fairway:files:{request}:read"


class FileSender:
    """The node's side of one request (public id). Raise RedisError when Valkey does not answer."""

    def __init__(self, request: str) -> None:
        self._store = valkey_client(_SOCKET_TIMEOUT_S)
        self._pieces, self._acknowledged = _keys(request)
        self._ahead = 0

    def send_header(self, header: Mapping[str, Any]) -> None:
        self._send(HEADER + json.dumps(header).encode())

    def send_data(self, data: bytes) -> bool:
        """Send bytes; wait when the reader is ``PIECES_AHEAD`` behind. Return False when it is gone."""
        if self._ahead >= PIECES_AHEAD:
            answer = self._store.blpop([self._acknowledged], timeout=SENDER_WAIT_S)
            if answer is None or answer[1] == _STOP:
                return False
            self._ahead -= 1
        self._send(DATA + data)
        self._ahead += 1
        return True

    def send_end(self) -> None:
        self._send(END)

    def send_error(self, code: str, message: str) -> None:
        self._send(ERROR + json.dumps({"code": code, "message": message}).encode())

    def _send(self, piece: bytes) -> None:
        with self._store.pipeline(transaction=False) as commands:
            commands.rpush(self._pieces, piece)
            commands.expire(self._pieces, TTL_S)
            commands.execute()


class FileReceiver:
    """The reader's side of one request."""

    def __init__(self, request: str) -> None:
        self._store = valkey_client(_SOCKET_TIMEOUT_S)
        self._pieces, self._acknowledged = _keys(request)

    def receive(self, within_s: float) -> tuple[bytes, bytes] | None:
        """Return the next piece with its kind, or None if none comes in time."""
        answer: Any = self._store.blpop([self._pieces], timeout=within_s)
        return None if answer is None else (answer[1][:1], answer[1][1:])

    def acknowledge(self, word: bytes = b"") -> None:
        with self._store.pipeline(transaction=False) as commands:
            commands.rpush(self._acknowledged, word)
            commands.expire(self._acknowledged, TTL_S)
            commands.execute()

    def stop(self) -> None:
        """Tell the sender to end, and forget what it has sent."""
        self.acknowledge(_STOP)
        self._store.delete(self._pieces)
