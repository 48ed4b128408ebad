"""Messages to browsers through their push services: encrypted (RFC 8291), and signed with VAPID (RFC 8292)."""

from __future__ import annotations

import base64
import json
import secrets
import time
from dataclasses import dataclass
from urllib.parse import urlsplit

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from django.conf import settings

CURVE = ec.SECP256R1()
AUTH_BYTES = 16
TOKEN_S = 12 * 3600
MESSAGE_TTL_S = 24 * 3600
"""Until then the push service keeps a message for a browser that is not connected."""
_RECORD_BYTES = 4096
_GROUP_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551


@dataclass(frozen=True)
class BrowserKeys:
    """What a subscription of a browser contains, and the portal's public key that it was made for; base64url."""

    p256dh: str
    auth: str
    portal_key: str

    def check(self) -> None:
        """Raise ValueError unless they are a point on the curve and a secret of the right length."""
        ec.EllipticCurvePublicKey.from_encoded_point(CURVE, decode_base64url(self.p256dh))
        if len(decode_base64url(self.auth)) != AUTH_BYTES:
            raise ValueError(f"auth must have {AUTH_BYTES} bytes")


def encode_base64url(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def decode_base64url(text: str) -> bytes:
    """Return the bytes. Raise ValueError."""
    return base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)


def portal_public_key() -> str:
    """Return the key that browsers subscribe with (``applicationServerKey``)."""
    return _encoded(_portal_key(settings.SECRET_KEY).public_key())


def push_headers(url: str, keys: BrowserKeys, *, urgent: bool) -> dict[str, str]:
    """Return the headers of a request to the push service. Raise ValueError if the portal's key has changed."""
    for secret in [settings.SECRET_KEY, *settings.SECRET_KEY_FALLBACKS]:
        key = _portal_key(secret)
        if _encoded(key.public_key()) == keys.portal_key:
            break
    else:
        raise ValueError("The portal's key has changed; allow push messages in this browser again.")
    parts = urlsplit(url)
    claims = {
        "aud": f"{parts.scheme}://{parts.netloc}",
        "exp": int(time.time()) + TOKEN_S,
        "sub": settings.PORTAL_URL,
    }
    signed = ".".join(
        encode_base64url(json.dumps(part).encode()) for part in ({"typ": "JWT", "alg": "ES256"}, claims)
    )
    r, s = decode_dss_signature(key.sign(signed.encode(), ec.ECDSA(SHA256())))
    token = f"{signed}.{encode_base64url(r.to_bytes(32, 'big') + s.to_bytes(32, 'big'))}"
    return {
        "Authorization": f"vapid t={token}, k={keys.portal_key}",
        "Content-Type": "application/octet-stream",
        "Content-Encoding": "aes128gcm",
        "TTL": str(MESSAGE_TTL_S),
        "Urgency": "high" if urgent else "normal",
    }


def encrypt_push(
    plaintext: bytes,
    keys: BrowserKeys,
    sender: ec.EllipticCurvePrivateKey | None = None,
    salt: bytes | None = None,
) -> bytes:
    """Return the body of a message in one record; its key pair and salt are used once (RFC 8291, section 3.4)."""
    sender = sender or ec.generate_private_key(CURVE)
    salt = salt or secrets.token_bytes(16)
    browser, mine = decode_base64url(keys.p256dh), _point(sender.public_key())
    shared = sender.exchange(ec.ECDH(), ec.EllipticCurvePublicKey.from_encoded_point(CURVE, browser))
    secret = _derive(decode_base64url(keys.auth), shared, b"WebPush: info\0" + browser + mine, 32)
    key = _derive(salt, secret, b"Content-Encoding: aes128gcm\0", 16)
    nonce = _derive(salt, secret, b"Content-Encoding: nonce\0", 12)
    header = salt + _RECORD_BYTES.to_bytes(4, "big") + len(mine).to_bytes(1, "big") + mine
    return header + AESGCM(key).encrypt(nonce, plaintext + b"\x02", None)  # 2 ends the last record


def _portal_key(secret: str) -> ec.EllipticCurvePrivateKey:
    """Return the key pair that is derived from a SECRET_KEY: every process has it without a row or a file."""
    derived = _derive(None, secret.encode(), b"fairway web push v1", 48)
    return ec.derive_private_key(int.from_bytes(derived, "big") % (_GROUP_ORDER - 1) + 1, CURVE)


def _derive(salt: bytes | None, secret: bytes, info: bytes, length: int) -> bytes:
    return HKDF(algorithm=SHA256(), length=length, salt=salt, info=info).derive(secret)


def _point(key: ec.EllipticCurvePublicKey) -> bytes:
    return key.public_bytes(Encoding.X962, PublicFormat.UncompressedPoint)


def _encoded(key: ec.EllipticCurvePublicKey) -> str:
    return encode_base64url(_point(key))
