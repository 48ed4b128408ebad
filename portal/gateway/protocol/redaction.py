"""Removes the secret of an attempt from what its tool answers, should a tool print what the gateway sent it."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Sequence

from portal.gateway.asgi_types import Headers


def base64_forms(secret: bytes) -> list[bytes]:
    """Return what is the same in the base64 of every text that contains the secret, by its place in it modulo 3."""
    return [
        b64encode(b"\0" * offset + secret)[(offset * 8 + 5) // 6 : (offset + len(secret)) * 8 // 6]
        for offset in range(3)
    ]


class Redaction:
    """Replaces secrets by as many asterisks, in headers and in a body that arrives in pieces.

    A piece that ends with the beginning of a secret is kept back in part until the next one.
    """

    def __init__(self, secrets: Sequence[bytes]) -> None:
        self._secrets = [secret for secret in secrets if secret]
        self._kept = b""

    def headers(self, pairs: Headers) -> Headers:
        return [(name, self._replace(value)) for name, value in pairs]

    def feed(self, data: bytes, *, is_last: bool) -> bytes:
        """Return the bytes of the body that can be sent now."""
        data = self._replace(self._kept + data)
        held = 0 if is_last else max((self._overlap(data, secret) for secret in self._secrets), default=0)
        self._kept = data[len(data) - held :]
        return data[: len(data) - held]

    def _replace(self, data: bytes) -> bytes:
        for secret in self._secrets:
            if secret in data:
                data = data.replace(secret, b"*" * len(secret))
        return data

    @staticmethod
    def _overlap(data: bytes, secret: bytes) -> int:
        """Return how many bytes at the end of the data are the beginning of the secret."""
        longest = min(len(secret) - 1, len(data))
        return next((size for size in range(longest, 0, -1) if data.endswith(secret[:size])), 0)
