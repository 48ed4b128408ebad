"""Versions of NVIDIA's driver (535.104.05) and the CUDA that each knows (12.4): which will do for an environment."""

from __future__ import annotations

import re
from collections.abc import Iterable

DRIVER_VERSION = re.compile(r"\d{1,4}(\.\d{1,4}){0,3}")
SIMULATED_DRIVER = "simulated"
"""What nodes with pretend GPUs tell as their driver: it is as new as any."""


def is_driver_sufficient(driver: str | None, needed: str) -> bool:
    """True when ``driver``, as a node tells it, is at least ``needed``; blank needs nothing, not even a driver.

    A driver that is not known will not do.
    """
    if not needed or driver == SIMULATED_DRIVER:
        return True
    if driver is None or not DRIVER_VERSION.fullmatch(driver):
        return False
    return _version_tuple(driver) >= _version_tuple(needed)


CUDA_VERSION = re.compile(r"\d{1,3}\.\d{1,3}")
NO_CUDA = "none"
"""In place of a version: an administrator says that an image needs no particular one."""


def required_cuda(from_image: str, override: str) -> str:
    """The CUDA version that a driver must know for an environment; blank: any will do.

    What an administrator chose outranks what the image says of itself: an image may bring packages for forward
    compatibility.
    """
    if override == NO_CUDA:
        return ""
    return override or from_image


def is_cuda_sufficient(supported: str | None, needed: str) -> bool:
    """True when a driver that knows CUDA up to ``known`` can run what needs ``needed``; not told will do."""
    if not CUDA_VERSION.fullmatch(needed) or supported is None or not CUDA_VERSION.fullmatch(supported):
        return True
    return _version_tuple(supported) >= _version_tuple(needed)


def newest_cuda(versions: Iterable[str]) -> str | None:
    """The newest of some CUDA versions, as nodes tell them; None of none."""
    return max(filter(CUDA_VERSION.fullmatch, versions), key=_version_tuple, default=None)


def _version_tuple(version: str) -> tuple[int, ...]:
    return tuple(int(each) for each in version.split("."))
