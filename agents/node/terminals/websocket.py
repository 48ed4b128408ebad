"""Server side of WebSocket (RFC 6455), pure: handshake response, frames, message parser."""

from __future__ import annotations

import base64
import hashlib
import hmac
import struct
from typing import Dict, List, Optional, Tuple

TEXT, BINARY, CLOSE, PING, PONG = 0x1, 0x2, 0x8, 0x9, 0xA
MAX_HEAD_BYTES = 16 * 1024
MAX_MESSAGE_BYTES = 256 * 1024
_CONTINUATION = 0x0
_MAGIC = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"


class WebSocketProtocolError(Exception):
    """Invalid data, or a message longer than MAX_MESSAGE_BYTES."""


def handshake_response(head: bytes, secret: str) -> Optional[bytes]:
    """Return the response to a handshake (``head`` up to its empty line); None without the right secret."""
    lines = head.split(b"\r\n")
    fields: Dict[bytes, bytes] = {}
    for line in lines[1:]:
        name, colon, value = line.partition(b":")
        if colon:
            fields[name.strip().lower()] = value.strip()
    reported = fields.get(b"authorization", b"")
    if not hmac.compare_digest(reported, b"Bearer " + secret.encode("ascii")):
        return None
    key = fields.get(b"sec-websocket-key", b"")
    if not lines[0].startswith(b"GET ") or fields.get(b"upgrade", b"").lower() != b"websocket" or not key:
        return None
    accepted = base64.b64encode(hashlib.sha1(key + _MAGIC).digest())  # noqa: S324 - RFC 6455 names it
    return (
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        b"Sec-WebSocket-Accept: " + accepted + b"\r\n\r\n"
    )


def frame(kind: int, payload: bytes) -> bytes:
    """Return one message as an unmasked server frame."""
    size = len(payload)
    if size < 126:
        head = bytes([0x80 | kind, size])
    elif size < 65_536:
        head = struct.pack("!BBH", 0x80 | kind, 126, size)
    else:
        head = struct.pack("!BBQ", 0x80 | kind, 127, size)
    return head + payload


class MessageReader:
    """Assembles the messages of one client."""

    def __init__(self) -> None:
        self._data = bytearray()
        self._kind: Optional[int] = None
        self._parts: List[bytes] = []

    def feed(self, data: bytes) -> List[Tuple[int, bytes]]:
        """Return the messages (TEXT, BINARY, CLOSE, PING, PONG) completed by these bytes.

        Raise WebSocketProtocolError.
        """
        self._data += data
        whole: List[Tuple[int, bytes]] = []
        while True:
            found = self._frame()
            if found is None:
                return whole
            message = self._message(*found)
            if message is not None:
                whole.append(message)

    def _frame(self) -> Optional[Tuple[bool, int, bytes]]:
        """Return the next frame: final flag, opcode, payload."""
        data = self._data
        if len(data) < 2:
            return None
        first, second = data[0], data[1]
        if first & 0x70 or not second & 0x80:
            raise WebSocketProtocolError("a frame with an extension, or without a mask")
        size, at = second & 0x7F, 2
        if size >= 126:
            end = 4 if size == 126 else 10
            if len(data) < end:
                return None
            size, at = int.from_bytes(data[2:end], "big"), end
        if size > MAX_MESSAGE_BYTES or (first & 0x08 and size > 125):
            raise WebSocketProtocolError("a frame that is too long")
        if len(data) < at + 4 + size:
            return None
        payload = _unmasked(bytes(data[at + 4 : at + 4 + size]), bytes(data[at : at + 4]))
        del data[: at + 4 + size]
        return bool(first & 0x80), first & 0x0F, payload

    def _message(self, last: bool, opcode: int, payload: bytes) -> Optional[Tuple[int, bytes]]:
        if opcode in (CLOSE, PING, PONG):
            if not last:
                raise WebSocketProtocolError("a fragmented control frame")
            return opcode, payload
        if opcode not in (_CONTINUATION, TEXT, BINARY) or (opcode == _CONTINUATION) != (
            self._kind is not None
        ):
            raise WebSocketProtocolError("an unexpected frame")
        if opcode != _CONTINUATION:
            self._kind = opcode
        self._parts.append(payload)
        if sum(map(len, self._parts)) > MAX_MESSAGE_BYTES:
            raise WebSocketProtocolError("a message that is too long")
        if not last or self._kind is None:
            return None
        message = self._kind, b"".join(self._parts)
        self._kind, self._parts = None, []
        return message


def _unmasked(payload: bytes, mask: bytes) -> bytes:
    size = len(payload)
    pattern = (mask * (size // 4 + 1))[:size]
    number = int.from_bytes(payload, "big") ^ int.from_bytes(pattern, "big")
    return number.to_bytes(size, "big")
