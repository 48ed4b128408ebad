"""CUDA requirement of an image, from the variables that NVIDIA's images set."""

from __future__ import annotations

import re
from typing import Dict, Optional, Sequence, Tuple

_AT_LEAST = re.compile(r"cuda>=(\d{1,3}\.\d{1,3})(?:\D|\Z)")
_VERSION = re.compile(r"(\d{1,3}\.\d{1,3})(?:\.|\Z)")


def required_cuda_version(variables: Sequence[str]) -> Optional[str]:
    """Return the minimum CUDA version of the driver, such as 12.4; None when unknown.

    ``NVIDIA_REQUIRE_CUDA`` is what NVIDIA's runtime enforces (alternatives separated by spaces; those with
    brand and driver are for forward compatibility and are ignored), ``CUDA_VERSION`` what the image was built
    with. An empty ``NVIDIA_REQUIRE_CUDA`` requires nothing.
    """
    found: Dict[str, str] = dict(each.partition("=")[::2] for each in variables)
    required = found.get("NVIDIA_REQUIRE_CUDA")
    if required is not None:
        versions = _AT_LEAST.findall(required)
        return min(versions, key=_version_tuple) if versions else None
    version = _VERSION.match(found.get("CUDA_VERSION", ""))
    return version.group(1) if version else None


def _version_tuple(version: str) -> Tuple[int, ...]:
    return tuple(int(each) for each in version.split("."))
