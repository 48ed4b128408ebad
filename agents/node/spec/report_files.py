"""The files by which a program tells us something: made for its task, its own, and never anybody else's.

They stand in the task's folder, belong to the account of the task, and begin empty; a container sees these files
and nothing around them. The time of such a file is zero until the task has written or touched it.
"""

from __future__ import annotations

import contextlib
import os
from typing import Dict, NamedTuple, Optional


class ReportFile(NamedTuple):
    """One of them: the variable that names it to the program, and its name in the folder."""

    variable: str
    name: str

    def path(self, folder: str) -> str:
        """Where it lies; ``folder`` is the task's own."""
        return os.path.join(folder, self.name)

    @property
    def container_path(self) -> str:
        """Where a container sees it."""
        return f"/run/fairway-{self.name}"


CHECKPOINT_FILE = ReportFile("FAIRWAY_CHECKPOINT_FILE", "checkpoint")
PROGRESS_FILE = ReportFile("FAIRWAY_PROGRESS_FILE", "progress")
REPORT_FILES = (CHECKPOINT_FILE, PROGRESS_FILE)


def create_report_file(file: ReportFile, folder: str, uid: Optional[int], gid: Optional[int]) -> None:
    """The file for a task that is about to be created, owned by ``uid`` (ourselves when None). Repeatable."""
    path = file.path(folder)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    with contextlib.suppress(FileExistsError):
        os.close(os.open(path, flags, 0o600))
    if uid is not None:
        os.chown(path, uid, gid if gid is not None else -1, follow_symlinks=False)
    os.utime(path, (0, 0), follow_symlinks=False)


def report_file_variables(folder: str) -> Dict[str, str]:
    """What names the files to a task that sees its folder."""
    return {file.variable: file.path(folder) for file in REPORT_FILES}


def container_report_file_variables() -> Dict[str, str]:
    """What names them to a task that sees them only."""
    return {file.variable: file.container_path for file in REPORT_FILES}


def report_age_s(modified_s: float, started_s: Optional[float], now_s: float) -> Optional[float]:
    """Seconds since a task that began at ``started_s`` wrote to a file with this time; None when it never did.

    Never less than 0, never more than since the start: whatever time a task gives the file, it said nothing in the
    future, nor before it was there.
    """
    if modified_s == 0:
        return None
    first_s = modified_s if started_s is None else max(modified_s, started_s)
    return max(0.0, now_s - first_s)
