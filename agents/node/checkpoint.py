"""Checkpoint reports: a task touches a file of its own, and the file's time is the time of the checkpoint.

The content of the file is never read.
"""

from __future__ import annotations

import os
import stat
from typing import Optional

from agents.node.spec.report_files import CHECKPOINT_FILE, report_age_s


def checkpoint_age_s(folder: str, started_s: Optional[float], now_s: float) -> Optional[float]:
    """Return seconds since the last reported checkpoint; None without a report."""
    try:
        facts = os.lstat(CHECKPOINT_FILE.path(folder))
    except OSError:
        return None
    return report_age_s(facts.st_mtime, started_s, now_s) if stat.S_ISREG(facts.st_mode) else None
