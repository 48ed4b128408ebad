"""How far a task has come: it writes a number into a file that was made for it.

The number counts what it has done so far, in units of its own. Of whatever else may be in the file, or in its
place, nothing is followed, waited for or believed.
"""

from __future__ import annotations

import os
import re
import stat
from typing import NamedTuple, Optional

from agents.node.spec.report_files import PROGRESS_FILE, report_age_s

MAX_BYTES = 64
_NUMBER = re.compile(rb"\s*([0-9]{1,14}(?:\.[0-9]*)?)\s*\Z")
_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


class ProgressReport(NamedTuple):
    """What a task told last: a finite number of at least 0, and how many seconds ago it wrote it."""

    done: float
    age_s: float


def read_progress(folder: str, started_s: Optional[float], now_s: float) -> Optional[ProgressReport]:
    """What the task told last; None when it told nothing, or nothing that is a plain number."""
    try:
        descriptor = os.open(PROGRESS_FILE.path(folder), _FLAGS)
    except OSError:
        return None
    try:
        facts = os.fstat(descriptor)
        if not stat.S_ISREG(facts.st_mode) or facts.st_size > MAX_BYTES:
            return None
        found = _NUMBER.match(os.read(descriptor, MAX_BYTES + 1))
    except OSError:
        return None
    finally:
        os.close(descriptor)
    since_s = report_age_s(facts.st_mtime, started_s, now_s)
    return ProgressReport(float(found.group(1)), since_s) if found and since_s is not None else None
