"""Counts the disk space that a task uses, in a process of its own that gives way to everything else on the node."""

from __future__ import annotations

import errno
import json
import os
import stat
import sys
from typing import Any, Dict, List, NamedTuple, Sequence, Set, Tuple

MAX_ENTRIES = 5_000_000
"""More files than this are not counted: a task could otherwise keep the count from ever ending."""
_BLOCK_BYTES = 512  # of st_blocks, on every file system
_NICE = 19


class DiskUsage(NamedTuple):
    """Bytes on the disk of each path. ``complete`` False: too many files, or paths too long to be opened."""

    used_bytes: List[int]
    complete: bool


def measure_disk_usage(paths: Sequence[str], pid: int = 0) -> DiskUsage:
    """Count each path and what lies below it, links not followed. Raise OSError for a path that cannot be read.

    To the first path is added what process ``pid`` and those of its container or account hold open after it was
    removed; 0: nothing is.
    """
    seen: Set[Tuple[int, int]] = set()
    entries, complete, used = 0, True, []
    for path in paths:
        try:
            top = os.lstat(path)
        except FileNotFoundError:
            used.append(0)
            continue
        total, folders = top.st_blocks * _BLOCK_BYTES, [path] if stat.S_ISDIR(top.st_mode) else []
        while folders:
            folder = folders.pop()
            try:
                with os.scandir(folder) as listed:
                    for entry in listed:
                        entries += 1
                        facts = entry.stat(follow_symlinks=False)
                        if stat.S_ISDIR(facts.st_mode):
                            folders.append(entry.path)
                        elif facts.st_nlink > 1:
                            if (facts.st_dev, facts.st_ino) in seen:
                                continue
                            seen.add((facts.st_dev, facts.st_ino))
                        total += facts.st_blocks * _BLOCK_BYTES
                        if entries >= MAX_ENTRIES:
                            return DiskUsage([*used, total], False)
            except OSError as error:
                if folder == path:
                    raise
                complete = complete and error.errno not in (errno.ENAMETOOLONG, errno.ELOOP)
        used.append(total)
    if used and pid:
        used[0] += _deleted_open_bytes(pid)
    return DiskUsage(used, complete)


def _deleted_open_bytes(pid: int) -> int:
    """Bytes of regular files on disks that no folder names any more, held by processes of one task."""
    held: Dict[Tuple[int, int], int] = {}
    whose = _task_identity(pid)
    for name in os.listdir("/proc") if whose else ():
        if not name.isdigit() or _task_identity(int(name)) != whose:
            continue
        try:
            descriptors = os.listdir(f"/proc/{name}/fd")
        except OSError:
            continue
        for descriptor in descriptors:
            path = f"/proc/{name}/fd/{descriptor}"
            try:
                facts = os.stat(path)
            except OSError:
                continue
            in_memory = _read_link(path).startswith(("/memfd:", "/dev/shm/"))  # noqa: S108 - bounded as memory
            if stat.S_ISREG(facts.st_mode) and facts.st_nlink == 0 and not in_memory:
                held[facts.st_dev, facts.st_ino] = facts.st_blocks * _BLOCK_BYTES
    return sum(held.values())


def _task_identity(pid: int) -> str:
    """What processes of one task have in common: their process namespace, else their account; blank: nothing."""
    namespace = _read_link(f"/proc/{pid}/ns/pid")
    if namespace != _read_link("/proc/self/ns/pid"):
        return namespace
    try:
        uid = os.stat(f"/proc/{pid}").st_uid
    except OSError:
        return ""
    return f"uid {uid}" if uid not in (0, os.geteuid()) else ""


def _read_link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


def main(request: str) -> int:
    """Count what a JSON request names, and print the answer as JSON."""
    os.nice(_NICE)
    fields: Dict[str, Any] = json.loads(request)
    sys.stdout.write(json.dumps(measure_disk_usage(fields["paths"], fields["pid"])._asdict()) + "\n")
    return 0
