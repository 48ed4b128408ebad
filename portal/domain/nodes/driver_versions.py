"""Versions of the NVIDIA driver (535.104.05) and CUDA (12.4): which of them an environment can use."""

from __future__ import annotations

import re
from collections.abc import Iterable

DRIVER_VERSION = re.compile(r"\d{1,4}(\.\d{1,4}){0,3}")
SIMULATED_DRIVER = "simulated"
"""The driver version that nodes with simulated GPUs report; it satisfies every requirement."""


def is_driver_sufficient(driver: str | None, needed: str) -> bool:
    """Return True if ``driver``, as a node reports it, is at least ``needed``.

    A blank ``needed`` requires no driver. An unknown driver is not sufficient.
    """
    if not needed or driver == SIMULATED_DRIVER:
        return True
    if driver is None or not DRIVER_VERSION.fullmatch(driver):
        return False
    return _version_tuple(driver) >= _version_tuple(needed)


CUDA_VERSION = re.compile(r"\d{1,3}\.\d{1,3}")
NO_CUDA = "none"
"""Value of an administrator's override: the image needs no particular CUDA version."""


def required_cuda(from_image: str, override: str) -> str:
    """Return the CUDA version that a driver must support for an environment; blank: any.

    The administrator's override precedes the image's own requirement, because an image may contain
    forward-compatibility packages.
    """
    if override == NO_CUDA:
        return ""
    return override or from_image


def is_cuda_sufficient(supported: str | None, needed: str) -> bool:
    """Return True if a driver that supports CUDA up to ``supported`` can run ``needed``.

    Also True if either version is unknown.
    """
    if not CUDA_VERSION.fullmatch(needed) or supported is None or not CUDA_VERSION.fullmatch(supported):
        return True
    return _version_tuple(supported) >= _version_tuple(needed)


def newest_cuda(versions: Iterable[str]) -> str | None:
    """Return the newest of the reported CUDA versions, or None."""
    return max(filter(CUDA_VERSION.fullmatch, versions), key=_version_tuple, default=None)


def _version_tuple(version: str) -> tuple[int, ...]:
    return tuple(int(each) for each in version.split("."))
