"""Kinds and limits of volumes."""

from __future__ import annotations

from enum import StrEnum


class VolumeKind(StrEnum):
    HOME = "home"  # a directory per user
    PROJECT = "project"  # a directory per project, shared by its members
    HOST_PATH = "host_path"  # an existing directory
    NFS = "nfs"  # an existing directory on an NFS mount
    SCRATCH = "scratch"  # an empty directory per task, removed with it


class VolumeScope(StrEnum):
    """``node``: each node has its own content under the path; ``shared``: all nodes have the same."""

    NODE = "node"
    SHARED = "shared"


QUOTA_KINDS = frozenset({VolumeKind.HOME, VolumeKind.PROJECT, VolumeKind.SCRATCH})
"""Nodes create the directories of these kinds, so a quota can be enforced."""
FIRST_PROJECT_GID = 2_100_000_000
"""The gid of a project's directories is this plus the project's id: the same on all nodes."""
MAX_VOLUMES_PER_JOB = 32
NEARLY_FULL_PERCENT, NOT_FULL_PERCENT = 90, 80
"""Above the first, the owner of a folder is notified; again only after it was below the second."""


def nearly_full_changes(used_mib: int, limit_mib: int | None, notified: bool) -> bool | None:
    """Return True when the owner of a folder is to be notified, False when that is reset, None otherwise."""
    if limit_mib and not notified and 100 * used_mib > NEARLY_FULL_PERCENT * limit_mib:
        return True
    if notified and (not limit_mib or 100 * used_mib < NOT_FULL_PERCENT * limit_mib):
        return False
    return None


def default_mount_path(name: str) -> str:
    """Return the mount path of a volume in a container unless the job names another."""
    return f"/volumes/{name}"


def home_mount_path(username: str) -> str:
    """Return the mount path of a user's home in a container."""
    return f"/home/{username[:32]}"
