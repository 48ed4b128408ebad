"""Measures the disk space of a task in a separate process with the lowest priority."""

from __future__ import annotations

import errno
import json
import os
import stat
import sys
from typing import Any, Dict, List, NamedTuple, Sequence, Tuple

from agents.node.storage.tree_walk import HardLinks, walk_tree

MAX_ENTRIES = 5_000_000
"""Limit of counted files: a task could otherwise extend the count forever."""
_BLOCK_BYTES = 512  # unit of st_blocks on every file system
_NICE = 19


class DiskUsage(NamedTuple):
    """Bytes on disk of each path. ``complete`` False: too many files, or paths too long to open.

    ``entries``: files and folders below all paths.
    """

    used_bytes: List[int]
    complete: bool
    entries: int = 0


def measure_disk_usage(paths: Sequence[str], pid: int = 0) -> DiskUsage:
    """Count each path recursively without following links. Raise OSError for an unreadable path.

    The first path includes deleted files that process ``pid``, its container or its account holds open; 0:
    none.
    """
    hard_links = HardLinks()
    entries, complete, used = 0, True, []

    def skip_folder(folder: str, error: OSError) -> None:
        nonlocal complete
        if folder in paths:
            raise error
        complete = complete and error.errno not in (errno.ENAMETOOLONG, errno.ELOOP)

    for path in paths:
        try:
            top = os.lstat(path)
        except FileNotFoundError:
            used.append(0)
            continue
        total = top.st_blocks * _BLOCK_BYTES
        for status in walk_tree(path, skip_folder) if stat.S_ISDIR(top.st_mode) else ():
            entries += 1
            if not hard_links.is_repeated(status):
                total += status.st_blocks * _BLOCK_BYTES
            if entries >= MAX_ENTRIES:
                return DiskUsage([*used, total], False, entries)
        used.append(total)
    if used and pid:
        used[0] += _deleted_open_bytes(pid)
    return DiskUsage(used, complete, entries)


def _deleted_open_bytes(pid: int) -> int:
    """Return bytes of deleted regular files held open by processes of one task."""
    held: Dict[Tuple[int, int], int] = {}
    owner = _task_identity(pid)
    for name in os.listdir("/proc") if owner else ():
        if not name.isdigit() or _task_identity(int(name)) != owner:
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
    """Return what processes of one task share: their pid namespace, else their account; blank: nothing."""
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
    """Measure the paths of a JSON request and print the result as JSON."""
    os.nice(_NICE)
    fields: Dict[str, Any] = json.loads(request)
    sys.stdout.write(json.dumps(measure_disk_usage(fields["paths"], fields["pid"])._asdict()) + "\n")
    return 0
