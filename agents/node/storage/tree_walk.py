"""Walks a directory with everything below it, for counts of its files."""

from __future__ import annotations

import os
import stat
from typing import Callable, Iterator, Set, Tuple


def walk_tree(folder: str, on_error: Callable[[str, OSError], None]) -> Iterator[os.stat_result]:
    """Yield the status of each entry below a folder, in no order.

    Links are not followed, and entries that are removed meanwhile are left out. ``on_error`` gets a folder that
    cannot be listed to its end, and may raise.
    """
    folders = [folder]
    while folders:
        current = folders.pop()
        try:
            with os.scandir(current) as listed:
                for entry in listed:
                    try:
                        status = entry.stat(follow_symlinks=False)
                    except FileNotFoundError:
                        continue
                    if stat.S_ISDIR(status.st_mode):
                        folders.append(entry.path)
                    yield status
        except OSError as error:
            on_error(current, error)


class HardLinks:
    """The files with several names that were found, so that each is counted once."""

    def __init__(self) -> None:
        self._found: Set[Tuple[int, int]] = set()

    def is_repeated(self, status: os.stat_result) -> bool:
        """Return True if another name of this file was given before."""
        if stat.S_ISDIR(status.st_mode) or status.st_nlink < 2:
            return False
        key = (status.st_dev, status.st_ino)
        repeated = key in self._found
        self._found.add(key)
        return repeated
