"""Mounts of a task: its owner's home, and the volumes that its job names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from portal.domain.states import RuntimeKind
from portal.domain.volumes import FIRST_PROJECT_GID, VolumeKind, VolumeScope
from portal.models import Job, Node, Volume
from portal.services.projects.volumes import declared_volumes, usable_volumes


class VolumeNotAllowedError(Exception):
    """A volume of the job was deleted, or its project may no longer use it."""


class JobVolumes(NamedTuple):
    """The stored volumes of one job."""

    home: Volume | None = None
    shared_homes: Volume | None = None  # the declared parent of all homes
    volumes: Mapping[str, Volume] = {}  # those the job names


def is_basic_mount(mount: Mapping[str, Any]) -> bool:
    """Return True for a mount that agents of every version support."""
    return mount["kind"] in ("home", "host_path") and mount.keys() <= {
        "kind",
        "source",
        "target",
        "read_only",
    }


def read_job_volumes(job: Job) -> JobVolumes:
    """Return the volumes of a job in at most four queries. Raise VolumeNotAllowedError."""
    home = Volume.objects.filter(owner_id=job.owner_id, kind=VolumeKind.HOME.value).first()
    homes = declared_volumes().filter(kind=VolumeKind.HOME.value).first()
    names = {each["volume"] for each in job.volumes}
    rows = {row.name: row for row in usable_volumes(job.project).filter(name__in=names)} if names else {}
    for name in sorted(names - rows.keys()):
        raise VolumeNotAllowedError(
            f"The volume {name} no longer exists, or {job.project.name} may not use it"
        )
    return JobVolumes(home, homes, rows)


def build_mounts(job: Job, volumes: JobVolumes, node: Node) -> tuple[list[dict[str, Any]], str | None]:
    """Return the mounts of a task and its working directory."""
    home, workdir = _build_home_mount(job, volumes, node)
    return [
        home,
        *(_build_volume_mount(job, each, volumes.volumes[each["volume"]]) for each in job.volumes),
    ], workdir


def _build_home_mount(job: Job, volumes: JobVolumes, node: Node) -> tuple[dict[str, Any], str | None]:
    target = f"/home/{job.owner.username[:32]}"
    own, homes = volumes.home, volumes.shared_homes
    mount: dict[str, Any] = {"target": target, "read_only": False}
    shared = next((row for row in (own or homes,) if row and row.scope == VolumeScope.SHARED.value), None)
    if shared is not None and shared.path:
        source = f"{shared.path.rstrip('/')}/{job.owner.username}"
        return {"kind": "host_path", "source": source, **mount}, target
    mount = {"kind": "home", "source": job.owner.username, **mount}
    if homes is not None and homes.quota_mib is not None:
        mount["quota_mib"] = homes.quota_mib
    # a process has no mounts of its own: its home is the directory on the node
    return mount, None if node.runtime == RuntimeKind.PROCESS.value else target


def _build_volume_mount(job: Job, requested: Mapping[str, Any], row: Volume) -> dict[str, Any]:
    mount: dict[str, Any] = {
        "kind": "host_path",
        "source": row.path,
        "target": requested["target"],
        "read_only": row.read_only or requested["read_only"],
    }
    if row.kind == VolumeKind.SCRATCH.value:
        mount |= {"kind": "scratch", "source": row.name}
    elif row.kind == VolumeKind.PROJECT.value:
        gid = FIRST_PROJECT_GID + job.project_id
        mount |= {"kind": "project", "folder": job.project.public_id, "gid": gid}
    elif row.kind == VolumeKind.NFS.value:
        mount["filesystem"] = "nfs"
    if row.quota_mib is not None:
        mount["quota_mib"] = row.quota_mib
    return mount
