"""Crash-safe files with explicit modes: locked with flock, replaced atomically, fsynced; a full disk is a refusal."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
from typing import Any, Iterator, Optional

from agents.node.errors import DISK_FULL, AgentError

_DISK_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

PRIVATE_UMASK = 0o077
"""The umask of every process of Fairway: a file is private unless ``make_folder`` or ``write_atomic`` opens it."""


@contextlib.contextmanager
def disk_full_as_error(path: str) -> Iterator[None]:
    """Convert "no space left" errors in the block to the refusal ``disk_full``."""
    try:
        yield
    except OSError as error:
        if error.errno in _DISK_FULL_ERRNOS:
            raise AgentError(DISK_FULL, f"The disk of the node is full: {path} cannot be written.") from error
        raise


@contextlib.contextmanager
def file_lock(path: str, *, wait: bool = True, shared: bool = False) -> Iterator[Optional[int]]:
    """Hold a flock on ``path``, exclusive unless ``shared``, and yield its descriptor.

    Yield None when it is held and ``wait`` is false. The lock belongs to the open file, so a child process
    that inherits the descriptor keeps it.
    """
    with disk_full_as_error(path):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        yield descriptor if _try_flock(descriptor, wait, fcntl.LOCK_SH if shared else fcntl.LOCK_EX) else None
    finally:
        os.close(descriptor)


def _try_flock(descriptor: int, wait: bool, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind if wait else kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextlib.contextmanager
def opened(path: str, flags: int, mode: int = 0o600) -> Iterator[int]:
    """Yield a descriptor, closed at the end of the block."""
    descriptor = os.open(path, flags | os.O_CLOEXEC, mode)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def make_folder(path: str, mode: int) -> None:
    """Create a folder, and the missing ones above it, with exactly this mode; one that exists keeps its own."""
    try:
        os.mkdir(path, mode)
    except FileNotFoundError:
        above = os.path.dirname(path)
        if above == path or os.path.isdir(above):  # /proc refuses a folder like this
            raise
        make_folder(above, mode)
        make_folder(path, mode)
        return
    except FileExistsError:
        if os.path.isdir(path):
            return
        raise
    # the umask applied to it; a link that replaced it meanwhile is refused
    with opened(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW) as descriptor:
        os.fchmod(descriptor, mode)


def file_sha256(path: str) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as stream:
        for piece in iter(lambda: stream.read(1 << 20), b""):
            digest.update(piece)
    return digest.hexdigest()


def remove_file(path: str) -> None:
    """Remove a file if it exists."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def write_atomic(path: str, content: bytes, *, mode: int = 0o600, sync: bool = True) -> None:
    """Replace ``path`` atomically; after a crash it has the old or the new content."""
    part = f"{path}.{os.getpid()}.{os.urandom(4).hex()}.part"
    with disk_full_as_error(path):
        try:
            with opened(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode) as descriptor:
                os.fchmod(descriptor, mode)
                view = memoryview(content)
                while view:
                    view = view[os.write(descriptor, view) :]
                if sync:
                    os.fsync(descriptor)
            os.replace(part, path)
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(part)
            raise
        if sync:
            fsync_dir(os.path.dirname(path))


def fsync_dir(path: str) -> None:
    """Make renames and new names in a folder durable."""
    with opened(path, os.O_RDONLY | os.O_DIRECTORY) as descriptor:
        os.fsync(descriptor)


def read_json(path: str) -> Optional[Any]:
    """Return the value in a JSON file, None when the file does not exist."""
    try:
        with open(path, encoding="utf-8") as stream:
            return json.load(stream)
    except FileNotFoundError:
        return None


def write_json(path: str, value: object, *, mode: int = 0o600) -> None:
    """Replace a JSON file atomically and durably."""
    write_atomic(path, json.dumps(value, separators=(",", ":"), sort_keys=True).encode(), mode=mode)


def free_mib(path: str) -> Optional[int]:
    """Return free space for unprivileged users in MiB, None when the path does not exist."""
    try:
        facts = os.statvfs(path)
    except OSError:
        return None
    return facts.f_bavail * facts.f_frsize // (1024 * 1024)
