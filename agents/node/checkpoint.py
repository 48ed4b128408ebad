"""When a task last saved its work: it touches a file that was made for it, and the time of the file is the word.

What is in the file is never read.
"""

from __future__ import annotations

import os
import stat
from typing import Optional

from agents.node.spec.report_files import CHECKPOINT_FILE, report_age_s


def checkpoint_age_s(folder: str, started_s: Optional[float], now_s: float) -> Optional[float]:
    """Seconds since the task last said that it saved its work; None when it has not, or has no such file."""
    try:
        facts = os.lstat(CHECKPOINT_FILE.path(folder))
    except OSError:
        return None
    return report_age_s(facts.st_mtime, started_s, now_s) if stat.S_ISREG(facts.st_mode) else None
