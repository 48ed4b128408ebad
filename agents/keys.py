"""Key pairs of a cluster: three to log in to nodes, each for one process, and one that signs the agent."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import re
import struct
from pathlib import Path
from typing import Literal, get_args

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from agents.launchers.gang import SshKeys
from agents.node.host.atomic_files import make_folder, write_atomic

Purpose = Literal["control", "watch", "tunnel", "signing"]
PURPOSES: tuple[Purpose, ...] = get_args(Purpose)

SIGNATURE_NAMESPACE = "fairway-node"
_SIGNATURE_MAGIC = b"SSHSIG"
_SIGNATURE_VERSION = 1
_KEY_TYPE = b"ssh-ed25519"
_ARMOR_LINE_LENGTH = 70
_COMMENT = re.compile(rf"fairway-(.+)-({'|'.join(PURPOSES)})")


def key_path(folder: Path, purpose: Purpose) -> Path:
    """Return the path of a private key; the public key has the suffix ``.pub``."""
    return folder / f"{purpose}_ed25519"


def make_keys(folder: Path, cluster: str) -> dict[Purpose, Path]:
    """Create the missing key pairs in a folder (mode 700; private files 600) and return their paths.

    Existing keys are never replaced, because nodes trust their public halves.
    """
    make_folder(str(folder), 0o700)
    for purpose in PURPOSES:
        path = key_path(folder, purpose)
        if not path.exists():
            _make_key(path, comment=f"fairway-{cluster}-{purpose}")
    return {purpose: key_path(folder, purpose) for purpose in PURPOSES}


def missing_keys(folder: Path) -> list[Path]:
    """Return the private keys that a folder lacks; an empty file is none."""
    return [
        path
        for path in (key_path(folder, purpose) for purpose in PURPOSES)
        if not path.is_file() or not path.stat().st_size
    ]


def cluster_of_keys(folder: Path) -> str:
    """Return the id of the cluster for which the keys in a folder were made; blank: unknown, or no keys."""
    for purpose in PURPOSES:
        with contextlib.suppress(OSError, ValueError, IndexError):  # unreadable, no text, empty
            found = _COMMENT.fullmatch(read_public_key(key_path(folder, purpose)).split()[-1])
            if found is not None:
                return found[1]
    return ""


def derive_ssh_keys(secret: str) -> SshKeys:
    """Return the keys of an attempt, which follow from its secret, so that every start sends the same."""
    user, host = (
        Ed25519PrivateKey.from_private_bytes(hashlib.sha256(f"{purpose} {secret}".encode()).digest())
        for purpose in ("ssh user", "ssh host")
    )
    return SshKeys(_private_text(user), _public_text(user), _private_text(host), _public_text(host))


def derive_host_key(secret: str) -> tuple[str, str]:
    """Return the private and the public key of the portal's SSH server, which follow from the portal's secret."""
    key = Ed25519PrivateKey.from_private_bytes(
        HKDF(algorithm=SHA256(), length=32, salt=None, info=b"fairway ssh host key v1").derive(
            secret.encode()
        )
    )
    return _private_text(key), _public_text(key)


def _private_text(key: Ed25519PrivateKey) -> str:
    text = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    )
    return text.decode()


def _public_text(key: Ed25519PrivateKey) -> str:
    text = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    return text.decode()


def read_public_key(private_key_path: Path) -> str:
    """Return the public key as one line: type, base64, comment."""
    return private_key_path.with_name(private_key_path.name + ".pub").read_text().strip()


def fingerprint(public_key: str) -> str:
    """Return the SHA256 fingerprint of a public key line in the format of ``ssh-keygen -l``."""
    blob = base64.b64decode(public_key.split()[1], validate=True)
    digest = hashlib.sha256(blob).digest()
    return "SHA256:" + base64.b64encode(digest).decode().rstrip("=")


def sign_agent(program: bytes, signing_key_path: Path) -> str:
    """Return the signature of the agent program that a node's loader verifies.

    The format is OpenSSH's (PROTOCOL.sshsig), so a node needs only ``ssh-keygen -Y verify``.
    """
    private = _load_key(signing_key_path)
    public_blob = _ssh_string(_KEY_TYPE) + _ssh_string(private.public_key().public_bytes_raw())
    namespace, hash_name = SIGNATURE_NAMESPACE.encode(), b"sha512"
    signed = (
        _SIGNATURE_MAGIC
        + _ssh_string(namespace)
        + _ssh_string(b"")
        + _ssh_string(hash_name)
        + _ssh_string(hashlib.sha512(program).digest())
    )
    signature_blob = _ssh_string(_KEY_TYPE) + _ssh_string(private.sign(signed))
    envelope = (
        _SIGNATURE_MAGIC
        + struct.pack(">I", _SIGNATURE_VERSION)
        + _ssh_string(public_blob)
        + _ssh_string(namespace)
        + _ssh_string(b"")
        + _ssh_string(hash_name)
        + _ssh_string(signature_blob)
    )
    text = base64.b64encode(envelope).decode()
    lines = [text[start : start + _ARMOR_LINE_LENGTH] for start in range(0, len(text), _ARMOR_LINE_LENGTH)]
    return "\n".join(["-----BEGIN SSH SIGNATURE-----", *lines, "-----END SSH SIGNATURE-----", ""])


def _make_key(path: Path, comment: str) -> None:
    private = Ed25519PrivateKey.generate()
    public = private.public_key().public_bytes(
        serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    )
    write_atomic(f"{path}.pub", f"{public.decode()} {comment}\n".encode(), mode=0o644)
    # the private key is renamed into place last, so an interrupted run leaves no partial key
    write_atomic(str(path), _private_text(private).encode())


def _load_key(path: Path) -> Ed25519PrivateKey:
    key = serialization.load_ssh_private_key(path.read_bytes(), password=None)
    if not isinstance(key, Ed25519PrivateKey):
        raise ValueError(f"{path} is not an ed25519 key.")
    return key


def _ssh_string(value: bytes) -> bytes:
    return struct.pack(">I", len(value)) + value
