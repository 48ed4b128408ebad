"""Image names: the one parser of image references, normalization, and the registry host."""

from __future__ import annotations

import re
from typing import NamedTuple, Optional

_DOCKER_HUB, _DOCKER_HUB_NAMESPACE, _LOCAL = "docker.io/", "library/", "localhost/"
UNKNOWN_ARCHIVE = "-"
"""Placeholder name for an archive with unknown content."""
_ID = re.compile(r"(?:sha256:)?([0-9a-f]{64})\Z")
_DIGEST = re.compile(r"(?P<name>.+?)(?::[^:/@]+)?@(?P<digest>sha256:[0-9a-f]{64})\Z")

SAVED_IMAGES = "fairway-saved/"
"""Repositories of images that users saved from their jobs; only their environments may name them."""
MAX_REFERENCE_LENGTH = 512
_TRANSPORTS = (
    *("atomic", "containers-storage", "dir", "docker", "docker-archive", "docker-daemon"),
    *("oci", "oci-archive", "ostree", "sif", "tarball"),
)
"""Prefixes by which podman reads files of the node, or other stores, instead of a registry."""
_HOST = re.compile(
    r"(?:[A-Za-z0-9]([A-Za-z0-9.-]{0,250}[A-Za-z0-9])?|\[[0-9A-Fa-f:]{2,39}\])(?::[0-9]{1,5})?\Z"
)
_COMPONENT = r"[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*"
_PATH = re.compile(
    rf"(?P<repository>{_COMPONENT}(?:/{_COMPONENT})*)"
    r"(?::(?P<tag>[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}))?(?:@(?P<digest>sha256:[0-9a-f]{64}))?\Z"
)
_SHORT_ID = re.compile(r"(?:sha256:)?[0-9a-f]{12,64}\Z")


class InvalidImageError(ValueError):
    """The text is not a reference to an image in a registry; the message says why, as a sentence."""


class ImageReference(NamedTuple):
    """``registry/repository:tag@digest``; None for what is absent. A short name has no registry."""

    registry: Optional[str]
    repository: str
    tag: Optional[str]
    digest: Optional[str]

    @property
    def is_saved_image(self) -> bool:
        """Return True for the name of an image that a user saved, also as a short name."""
        local = self.registry in (None, "localhost", "docker.io")
        return local and normalize_image_name(self.repository).startswith(SAVED_IMAGES)


def parse_image_reference(text: str) -> ImageReference:
    """Parse ``[host[:port]/]path[:tag][@sha256:digest]``, the only form in which an image may be named.

    Raise InvalidImageError for transports (``docker-archive:``), paths, options, image ids and all else.
    """
    prefix, colon, _ = text.partition(":")
    if colon and prefix.lower() in _TRANSPORTS:
        raise InvalidImageError(f"{prefix.lower()}: is not allowed: only images of registries can be named.")
    if _SHORT_ID.match(text):
        raise InvalidImageError("It is the id of an image on a node, not a name.")
    registry = registry_host(text)
    found = _PATH.match(text if registry is None else text[len(registry) + 1 :])
    if len(text) > MAX_REFERENCE_LENGTH or found is None or not _HOST.match(registry or "localhost"):
        raise InvalidImageError("It is not a name such as registry.example/name:tag or name@sha256:….")
    return ImageReference(registry, **found.groupdict())


def is_image_name(text: str) -> bool:
    """Return True for what a task may start: a reference, or the full id of an image on the node."""
    if _ID.match(text):
        return True
    try:
        parse_image_reference(text)
    except InvalidImageError:
        return False
    return True


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
