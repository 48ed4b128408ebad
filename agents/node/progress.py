"""Reports of a task by files of its own: a number of completed units, and the time of its last checkpoint.

The files are untrusted: links are not followed, reads never block, and other content is ignored. Of a
checkpoint file only the time counts.
"""

from __future__ import annotations

import os
import re
import stat
from typing import NamedTuple, Optional

from agents.node.spec.report_files import CHECKPOINT_FILE, PROGRESS_FILE, report_age_s

MAX_BYTES = 64
_NUMBER = re.compile(rb"\s*([0-9]{1,14}(?:\.[0-9]*)?)\s*\Z")
_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


class ProgressReport(NamedTuple):
    """Last report of a task: a finite number from 0, and its age in seconds."""

    done: float
    age_s: float


def read_progress(folder: str, started_s: Optional[float], now_s: float) -> Optional[ProgressReport]:
    """Return the last report; None when there is none or it is invalid."""
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


def checkpoint_age_s(folder: str, started_s: Optional[float], now_s: float) -> Optional[float]:
    """Return seconds since the last reported checkpoint; None without a report."""
    try:
        facts = os.lstat(CHECKPOINT_FILE.path(folder))
    except OSError:
        return None
    return report_age_s(facts.st_mtime, started_s, now_s) if stat.S_ISREG(facts.st_mode) else None
