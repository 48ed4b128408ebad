"""Kinds of volumes, and what a job and an administrator may say of them."""

from __future__ import annotations

from enum import StrEnum


class VolumeKind(StrEnum):
    """What a volume is, which says what a node does for it."""

    HOME = "home"  # a folder for each person
    PROJECT = "project"  # a folder for each project, which its members share
    DATASET = "dataset"  # a folder that is there, and that no job changes
    HOST_PATH = "host_path"  # a folder that is there
    NFS = "nfs"  # the same, where an NFS share is mounted
    SCRATCH = "scratch"  # an empty folder for each task, gone with it


class VolumeScope(StrEnum):
    """``node``: each node has its own content under the same path; ``shared``: all have the same."""

    NODE = "node"
    SHARED = "shared"


QUOTA_KINDS = frozenset({VolumeKind.HOME, VolumeKind.PROJECT, VolumeKind.SCRATCH})
"""Their folders are made by the node, so it can say how much each may hold."""
FIRST_PROJECT_GID = 2_100_000_000
"""The group of a project's folders is this and its row number: the same on every node, and nobody's else."""
MAX_VOLUMES_PER_JOB = 32
"""A job names at most so many."""


def default_mount_path(name: str) -> str:
    """Where a volume stands in a container unless a job says another place."""
    return f"/volumes/{name}"
