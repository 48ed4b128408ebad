"""Data sets: who sees them, and what names, labels and paths they may have."""

from __future__ import annotations

import re
from enum import StrEnum

from portal.domain.storage.volumes import VolumeKind, default_mount_path

MAX_DESCRIPTION_LENGTH = 5000
MAX_LABEL_LENGTH = 40
MAX_PATH_LENGTH = 400
MAX_NOTE_LENGTH = 500
MAX_DATA_SETS = 1000
"""Of one project."""
MAX_VERSIONS = 200
"""Of one data set."""
DATA_KINDS = frozenset(VolumeKind) - {VolumeKind.HOME, VolumeKind.SCRATCH}
"""Kinds of volumes that can have data sets: declared, and kept after a job."""
_LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]*")


class DataSetVisibility(StrEnum):
    """``everyone``: all users with a project that may use the volume of a version."""

    PROJECT = "project"
    EVERYONE = "everyone"


def is_label(text: str) -> bool:
    return len(text) <= MAX_LABEL_LENGTH and _LABEL.fullmatch(text) is not None


def is_path(text: str) -> bool:
    """Return True for a plain relative path; blank is the volume itself."""
    parts = text.split("/") if text else []
    return (
        len(text.encode(errors="replace")) <= MAX_PATH_LENGTH
        and text.isprintable()
        and text == text.strip()
        and not any(part in ("", ".", "..") for part in parts)
    )


def variable_name(name: str) -> str:
    """Return the variable that has the path of the data set ``name`` in a container."""
    return f"DATASET_{name.upper().replace('-', '_')}"


def container_path(volume: str, path: str) -> str:
    """Return where a path of a volume is in a container."""
    return f"{default_mount_path(volume)}/{path}".rstrip("/")
