"""Image names: normalization, and the registry host."""

from __future__ import annotations

import re
from typing import Optional

_DOCKER_HUB, _DOCKER_HUB_NAMESPACE, _LOCAL = "docker.io/", "library/", "localhost/"
UNKNOWN_ARCHIVE = "-"
"""Placeholder name for an archive with unknown content."""
_ID = re.compile(r"(?:sha256:)?([0-9a-f]{64})\Z")
_DIGEST = re.compile(r"(?P<name>.+?)(?::[^:/@]+)?@(?P<digest>sha256:[0-9a-f]{64})\Z")


def normalize_image_name(name: str) -> str:
    """Return the canonical name: without docker.io, with a tag; an id without ``sha256:``."""
    identity = _ID.match(name)
    if identity is not None:
        return identity.group(1)
    by_digest = _DIGEST.match(name)
    whole = by_digest.group("name") if by_digest else name
    for start in (_LOCAL, _DOCKER_HUB, _DOCKER_HUB_NAMESPACE):
        if whole.startswith(start):
            whole = whole[len(start) :]
    if by_digest:
        return f"{whole}@{by_digest.group('digest')}"
    return whole if ":" in whole.rsplit("/", 1)[-1] else f"{whole}:latest"


def registry_host(image: str) -> Optional[str]:
    """Return the registry host with port; None when the name has none."""
    first, slash, _ = image.partition("/")
    return first if slash and ("." in first or ":" in first or first == "localhost") else None
