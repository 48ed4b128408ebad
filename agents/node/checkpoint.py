"""When a task last saved its work: it touches a file that was made for it, and the time of the file is the word.

The file stands in the task's folder, belongs to the account of the task, and is empty; a container sees this one
file and nothing around it. Its time is zero until the task has said something. What is in it is never read.
"""

from __future__ import annotations

import contextlib
import os
import stat
from typing import Optional

VARIABLE = "FAIRWAY_CHECKPOINT_FILE"
FILE_IN_CONTAINER = "/run/fairway-checkpoint"


def file_in(folder: str) -> str:
    """Where the file lies; ``folder`` is the task's own."""
    return os.path.join(folder, "checkpoint")


def make_file(folder: str, uid: Optional[int], gid: Optional[int]) -> None:
    """The file of a task that is about to be created, owned by ``uid`` (ourselves when None). Repeatable."""
    path = file_in(folder)
    with contextlib.suppress(FileExistsError):
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    if uid is not None:
        os.chown(path, uid, gid if gid is not None else -1, follow_symlinks=False)
    os.utime(path, (0, 0), follow_symlinks=False)


def saved_ago_s(folder: str, started_s: Optional[float], now_s: float) -> Optional[float]:
    """Seconds since the task last said that it saved its work; None when it has not, or when there is no such file.

    Never less than 0, never more than since ``started_s``: whatever time a task gives the file, no save lies in
    the future or before the task.
    """
    try:
        facts = os.lstat(file_in(folder))
    except OSError:
        return None
    if not stat.S_ISREG(facts.st_mode) or facts.st_mtime == 0:
        return None
    first_s = facts.st_mtime if started_s is None else max(facts.st_mtime, started_s)
    return max(0.0, now_s - first_s)
