"""A fixed loop, reported beside every absolute figure, to compare machines."""

from __future__ import annotations

import time

ROUNDS = 2_000_000


def calibration_ms() -> float:
    """Return milliseconds for a fixed loop of integer arithmetic, the best of three."""
    return min(_once_ms() for _ in range(3))


def _once_ms() -> float:
    begin = time.perf_counter()
    value = 1
    for i in range(ROUNDS):
        value = (value * 1_103_515_245 + i) & 0x7FFFFFFF
    return (time.perf_counter() - begin) * 1_000
