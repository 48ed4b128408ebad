"""Versions of NVIDIA's driver, such as 535.104.05: which one will do for an environment that needs another."""

from __future__ import annotations

import re

DRIVER = re.compile(r"\d{1,4}(\.\d{1,4}){0,3}")
SIMULATED = "simulated"
"""What nodes with pretend GPUs tell as their driver: it is as new as any."""


def driver_will_do(driver: str | None, needed: str) -> bool:
    """True when ``driver``, as a node tells it, is at least ``needed``; blank needs nothing, not even a driver.

    A driver that is not known will not do.
    """
    if not needed or driver == SIMULATED:
        return True
    if driver is None or not DRIVER.fullmatch(driver):
        return False
    return _numbers(driver) >= _numbers(needed)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(each) for each in version.split("."))
