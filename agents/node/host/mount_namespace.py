"""Private mount namespaces and mounts in them."""

from __future__ import annotations

import contextlib
import ctypes
import os
import stat
from typing import Iterable, Iterator, List, Optional

from agents.node.host.atomic_files import opened

CLONE_NEWNS, CLONE_NEWIPC, CLONE_NEWUSER = 0x00020000, 0x08000000, 0x10000000
NOSUID, NODEV, RDONLY, REMOUNT, BIND = 2, 4, 1, 32, 4096
_REC, _PRIVATE = 16384, 1 << 18


def unshare(flags: int) -> None:
    """Unshare namespaces, always including mounts. Raise OSError when not permitted."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNS | flags) != 0:
        raise OSError(ctypes.get_errno(), "this machine does not allow private mounts")


def make_mounts_private() -> None:
    """Keep later mounts within this namespace."""
    mount("none", "/", None, _REC | _PRIVATE)


def mount(source: str, target: str, kind: Optional[str], flags: int, data: Optional[str] = None) -> None:
    """Mount; raise OSError with the target."""
    libc = ctypes.CDLL(None, use_errno=True)
    words = [None if word is None else word.encode() for word in (source, target, kind, data)]
    if libc.mount(words[0], words[1], words[2], flags, words[3]) != 0:
        raise OSError(ctypes.get_errno(), f"mounting at {target} failed")


def cover_folder(folder: str, by: str, kept: Iterable[str]) -> None:
    """Mount ``by`` over a folder, and in it again those of the paths ``kept`` that are below the folder.

    ``by`` belongs to a job, so no link in it is followed. Changes the umask.
    """
    os.umask(0)
    paths = {each for path in kept for each in (path, os.path.realpath(path))}
    below: List[str] = []
    for path in sorted(os.path.normpath(each) for each in paths):
        if path.startswith(folder + "/") and not (below and path.startswith(below[-1] + "/")):
            below.append(path)
    with contextlib.ExitStack() as held:
        sources = {}
        for path in below:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                sources[path] = held.enter_context(opened(path, os.O_PATH))
        mount(by, folder, None, BIND)
        for path, source in sources.items():
            point = held.enter_context(_mount_point(folder, path, stat.S_ISDIR(os.fstat(source).st_mode)))
            mount(f"/proc/self/fd/{source}", f"/proc/self/fd/{point}", None, BIND | _REC)


@contextlib.contextmanager
def _mount_point(folder: str, path: str, is_folder: bool) -> Iterator[int]:
    """Create an empty file or folder with the folders above it; yield its descriptor."""
    *above, name = os.path.relpath(path, folder).split("/")
    with contextlib.ExitStack() as held:
        inside = held.enter_context(opened(folder, os.O_PATH | os.O_DIRECTORY))
        for each in (*above, name) if is_folder else above:
            with contextlib.suppress(FileExistsError):
                os.mkdir(each, 0o711, dir_fd=inside)
            inside = held.enter_context(_opened_at(inside, each, os.O_PATH | os.O_DIRECTORY))
        if not is_folder:
            inside = held.enter_context(_opened_at(inside, name, os.O_RDONLY | os.O_CREAT))
        yield inside


@contextlib.contextmanager
def _opened_at(folder: int, name: str, flags: int) -> Iterator[int]:
    descriptor = os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=folder)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def map_own_ids(uid: int, gid: int) -> None:
    """Map only the current account to itself in a new user namespace."""
    for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        with opened(f"/proc/self/{name}", os.O_WRONLY) as descriptor:
            os.write(descriptor, text.encode())
