"""Private mount namespaces and mounts in them."""

from __future__ import annotations

import ctypes
import os
from typing import Optional

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


def map_own_ids(uid: int, gid: int) -> None:
    """Map only the current account to itself in a new user namespace."""
    for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        with opened(f"/proc/self/{name}", os.O_WRONLY) as descriptor:
            os.write(descriptor, text.encode())
