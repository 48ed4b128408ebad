"""SSH packets under AES-GCM as OpenSSH speaks it (RFC 4253 section 6, RFC 5647): sealed and opened, nothing sent."""

from __future__ import annotations

import os
from typing import Any

TAG_BYTES = 16
LENGTH_BYTES = 4
MAX_PACKET_BYTES = 256 * 1024
"""Longer than any packet that a peer may send to us; a longer one is not a packet."""
_BLOCK_BYTES = 16
_RANDOM_BYTES = 4096
_COUNTER_MASK = (1 << 64) - 1


class Sealer:
    """Makes packets. ``engine`` is an AES-GCM of the cryptography package, ``iv`` its first nonce of 12 bytes.

    ``served`` packets have been made with them before.
    """

    __slots__ = ("_counter", "_encrypt", "_fixed", "_random", "_random_at")

    def __init__(self, engine: Any, iv: bytes, served: int = 0) -> None:
        self._encrypt = engine.encrypt
        self._fixed = iv[:4]
        self._counter = (int.from_bytes(iv[4:], "big") + served) & _COUNTER_MASK
        self._random = b""
        self._random_at = _RANDOM_BYTES

    def seal(self, payload: bytes) -> bytes:
        """The packet of a payload, with 4 to 19 bytes of random padding."""
        size = len(payload)
        padding = 19 - (size + 4) % _BLOCK_BYTES
        at = self._random_at
        if at + padding > _RANDOM_BYTES:
            self._random = os.urandom(_RANDOM_BYTES)
            at = 0
        self._random_at = at + padding
        length = (1 + size + padding).to_bytes(LENGTH_BYTES, "big")
        counter = self._counter
        self._counter = (counter + 1) & _COUNTER_MASK
        body = b"%c%b%b" % (padding, payload, self._random[at : at + padding])
        sealed: bytes = self._encrypt(self._fixed + counter.to_bytes(8, "big"), body, length)
        return length + sealed


class Opener:
    """Reads packets, in their order."""

    __slots__ = ("_counter", "_decrypt", "_fixed")

    def __init__(self, engine: Any, iv: bytes, served: int = 0) -> None:
        self._decrypt = engine.decrypt
        self._fixed = iv[:4]
        self._counter = (int.from_bytes(iv[4:], "big") + served) & _COUNTER_MASK

    def open(self, length: bytes, sealed: Any) -> bytes:
        """One byte of padding length, the payload, the padding. Raises InvalidTag for what is not genuine."""
        counter = self._counter
        self._counter = (counter + 1) & _COUNTER_MASK
        opened: bytes = self._decrypt(self._fixed + counter.to_bytes(8, "big"), sealed, length)
        return opened
