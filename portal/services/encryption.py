"""Encrypts secrets at rest: AES-256-GCM, bound to the table, row and field of the value.

The location is authenticated, so a value that is copied to another row does not decrypt there. Keys are
derived from SECRET_KEY; values encrypted under a fallback key still decrypt.
"""

from __future__ import annotations

import base64
import hashlib
import secrets
from dataclasses import dataclass
from functools import lru_cache

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from django.conf import settings

_NONCE_BYTES = 12
_FORMAT = "v1"


class DecryptionError(Exception):
    """Wrong key, wrong location, or modified ciphertext."""


@dataclass(frozen=True)
class EncryptionContext:
    table: str
    row: str
    field: str

    def associated_data(self, key_id: str) -> bytes:
        """Return the associated data; parts are length-prefixed, so that it is unique per location."""
        parts = [_FORMAT, key_id, self.table, self.row, self.field]
        return b"".join(len(part.encode()).to_bytes(4, "big") + part.encode() for part in parts)


@lru_cache(maxsize=8)
def _key(secret: str) -> tuple[str, AESGCM]:
    derived = HKDF(algorithm=SHA256(), length=32, salt=None, info=b"fairway sealing v1").derive(
        secret.encode()
    )
    return hashlib.sha256(b"id" + derived).hexdigest()[:8], AESGCM(derived)


def readable_prefixes() -> list[str]:
    """Return how the values begin that the present secret key and its fallbacks decrypt."""
    return [
        f"{_FORMAT}.{_key(secret)[0]}." for secret in [settings.SECRET_KEY, *settings.SECRET_KEY_FALLBACKS]
    ]


def encrypt(plaintext: str, context: EncryptionContext) -> str:
    """Return ``v1.<key id>.<base64>`` of ``plaintext``, bound to ``context``."""
    key_id, cipher = _key(settings.SECRET_KEY)
    nonce = secrets.token_bytes(_NONCE_BYTES)
    sealed = cipher.encrypt(nonce, plaintext.encode(), context.associated_data(key_id))
    return f"{_FORMAT}.{key_id}.{base64.urlsafe_b64encode(nonce + sealed).decode()}"


def decrypt(ciphertext: str, context: EncryptionContext) -> str:
    """Return the plaintext. Raise DecryptionError."""
    form, _, rest = ciphertext.partition(".")
    named, _, text = rest.partition(".")
    if form != _FORMAT:
        raise DecryptionError("unknown format")
    for secret in [settings.SECRET_KEY, *settings.SECRET_KEY_FALLBACKS]:
        key_id, cipher = _key(secret)
        if key_id != named:
            continue
        try:
            raw = base64.urlsafe_b64decode(text)
            return cipher.decrypt(
                raw[:_NONCE_BYTES], raw[_NONCE_BYTES:], context.associated_data(key_id)
            ).decode()
        except (InvalidTag, ValueError) as error:
            raise DecryptionError("it was modified, or copied from another row") from error
    raise DecryptionError("its key is unknown")
