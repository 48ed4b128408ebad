"""Time limits of tests, scaled by how fast this machine runs now."""

from __future__ import annotations

import time

TIMEOUT_FACTOR = 2.5
"""How many times as long waits without ``budget_s`` take on a loaded machine."""
_ADDITIONS = 3_000_000
_REFERENCE_S = 0.15
"""Seconds for so many additions on the machine for which the limits in the tests are written."""


def budget_s(seconds: float) -> float:
    """Return ``seconds``, longer where this machine is slower than the reference, or busy, at this moment."""
    began_s = time.monotonic()
    total = 0
    for number in range(_ADDITIONS):
        total += number
    return seconds * max(1.0, (time.monotonic() - began_s) / _REFERENCE_S)


def budget_ms(seconds: float) -> float:
    """Return ``budget_s`` in milliseconds, for Playwright."""
    return 1000 * budget_s(seconds)
