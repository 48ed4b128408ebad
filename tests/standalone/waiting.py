"""Waiting for something to become true, and asking whether a process lives."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path

from tests.time_budget import TIMEOUT_FACTOR

READY_LINE = re.compile(r"Fairway \S+ is ready after")
"""What `up` prints when it can be used."""


def eventually(condition: Callable[[], bool], limit_s: float = 30) -> bool:
    """Whether ``condition()`` became so within the limit, which is longer for a loaded machine.

    The longer a wait, the longer its pauses: they leave the processor to what is awaited.
    """
    began = time.monotonic()
    while (waited := time.monotonic() - began) < limit_s * TIMEOUT_FACTOR:
        if condition():
            return True
        time.sleep(min(0.5, 0.02 + waited / 20))
    return condition()


def alive(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
