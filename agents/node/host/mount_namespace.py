"""Mounts that only one process and its children see: a namespace of its own, and what is shown in it."""

from __future__ import annotations

import ctypes
import os
from typing import Optional

CLONE_NEWNS, CLONE_NEWIPC, CLONE_NEWUSER = 0x00020000, 0x08000000, 0x10000000
NOSUID, NODEV, RDONLY, REMOUNT, BIND = 2, 4, 1, 32, 4096
_REC, _PRIVATE = 16384, 1 << 18


def unshare(flags: int) -> None:
    """Gives this process namespaces of its own of these kinds, mounts always among them. OSError where it may not."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNS | flags) != 0:
        raise OSError(ctypes.get_errno(), "this machine does not allow private mounts")


def make_mounts_private() -> None:
    """What is mounted from now on stays in this namespace."""
    mount("none", "/", None, _REC | _PRIVATE)


def mount(source: str, target: str, kind: Optional[str], flags: int, data: Optional[str] = None) -> None:
    """Mounts, or raises OSError with the place."""
    libc = ctypes.CDLL(None, use_errno=True)
    words = [None if word is None else word.encode() for word in (source, target, kind, data)]
    if libc.mount(words[0], words[1], words[2], flags, words[3]) != 0:
        raise OSError(ctypes.get_errno(), f"mounting at {target} failed")


def map_own_ids(uid: int, gid: int) -> None:
    """In a user namespace of one's own: the account keeps its numbers, and there is no other."""
    for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        descriptor = os.open(f"/proc/self/{name}", os.O_WRONLY)
        try:
            os.write(descriptor, text.encode())
        finally:
            os.close(descriptor)
