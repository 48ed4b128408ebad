"""Versions of NVIDIA's driver (535.104.05) and the CUDA that each knows (12.4): which will do for an environment."""

from __future__ import annotations

import re
from collections.abc import Iterable

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


CUDA = re.compile(r"\d{1,3}\.\d{1,3}")
NO_CUDA = "none"
"""In place of a version: an administrator says that an image needs no particular one."""


def cuda_needed(said_by_image: str, chosen: str) -> str:
    """The CUDA version that a driver must know for an environment; blank: any will do.

    What an administrator chose outranks what the image says of itself: an image may bring packages for forward
    compatibility.
    """
    if chosen == NO_CUDA:
        return ""
    return chosen or said_by_image


def cuda_will_do(known: str | None, needed: str) -> bool:
    """True when a driver that knows CUDA up to ``known`` can run what needs ``needed``; not told will do."""
    if not CUDA.fullmatch(needed) or known is None or not CUDA.fullmatch(known):
        return True
    return _numbers(known) >= _numbers(needed)


def newest_cuda(told: Iterable[str]) -> str | None:
    """The newest of some CUDA versions, as nodes tell them; None of none."""
    return max(filter(CUDA.fullmatch, told), key=_numbers, default=None)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(each) for each in version.split("."))
