"""Reads volumes that a user may see, the usage of their folders, and the disks behind them as nodes report them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import PurePosixPath

from django.db.models import F, Prefetch, Q, QuerySet
from django.utils.translation import gettext as _
from django.utils.translation import gettext_noop

from portal.access import Requester, nameable_projects, visible_volume_usage, visible_volumes
from portal.domain.states import NodeState
from portal.domain.storage.volumes import VolumeKind
from portal.models import Node, User, Volume, VolumeUsage
from portal.selectors.lookup import get_by_key


def list_volumes(requester: Requester) -> QuerySet[Volume]:
    """Return the visible declared volumes by name, with the projects that may be named."""
    nodes = Prefetch("nodes", Node.objects.only("public_id", "name"))
    projects = Prefetch("projects", nameable_projects(requester).order_by("name"))
    rows = visible_volumes(requester).select_related("pool").prefetch_related(nodes, projects)
    return rows.order_by("name", "id")


def get_volume(requester: Requester, key: str) -> Volume:
    return get_by_key(list_volumes(requester), key, _("There is no such volume."))


DISK_USES = (gettext_noop("homes"), gettext_noop("scratch"), gettext_noop("volumes"))
"""What an agent reports a disk to be for."""


@dataclass(frozen=True)
class NodeDisk:
    """A disk of a node for directories of volumes, as last reported."""

    node: str
    use: str  # one of DISK_USES
    path: str
    filesystem: str
    size_mib: int
    free_mib: int | None
    quotas: bool


def node_disks() -> list[NodeDisk]:
    """Return the disks behind homes, scratch and project directories, by node, in one query."""
    rows = Node.objects.exclude(state=NodeState.RETIRED.value).order_by("name")
    reported = [key for key in NodeDisk.__dataclass_fields__ if key != "node"]
    return [
        NodeDisk(node=name, **{key: each.get(key) for key in reported})
        for name, hello in rows.values_list("name", "agent_info")
        for each in hello.get("storage", ())
    ]


def quota_enforcement_message(row: Volume, reported: Iterable[NodeDisk]) -> str | None:
    """Return whether the quota of a volume is enforced, or None without a quota."""
    if row.quota_mib is None:
        return None
    use = {VolumeKind.HOME.value: "homes", VolumeKind.SCRATCH.value: "scratch"}.get(row.kind, "volumes")
    on = [
        disk
        for disk in reported
        if disk.use == use and (use != "volumes" or PurePosixPath(row.path).is_relative_to(disk.path))
    ]
    holding = sorted({disk.node for disk in on if disk.quotas})
    without = sorted({disk.node for disk in on if not disk.quotas})
    if not holding:
        return _(
            "No node reports that its file system enforces this limit; this needs the mount option prjquota."
        )
    text = _("Enforced on {nodes}, not on {others}.") if without else _("Enforced on {nodes}.")
    return text.format(nodes=", ".join(holding), others=", ".join(without))


NODE_HOMES = "-"
"""Stands for the homes on the disks of nodes, which no declared volume has, where a volume is named."""


def list_usage(requester: Requester, *, volume: str = "", search: str = "") -> QuerySet[VolumeUsage]:
    """Return the visible folders, largest first; of one volume, and by user, project, volume or node."""
    rows = visible_volume_usage(requester).select_related("volume", "owner", "project", "node")
    if volume == NODE_HOMES:
        rows = rows.filter(volume__isnull=True)
    elif volume:
        rows = rows.filter(volume__name=volume)
    if search:
        columns = ("owner__username", "owner__full_name", "project__name", "volume__name", "node__name")
        found = Q()
        for column in columns:
            found |= Q((f"{column}__icontains", search))
        rows = rows.filter(found)
    return rows.order_by("-used_mib", "-id")


def list_home_usage(owner: User) -> QuerySet[VolumeUsage]:
    """Return the homes of a user on all nodes, largest first."""
    return list_usage(owner).filter(owner=owner)


def list_full_homes(owner: User) -> QuerySet[VolumeUsage]:
    """Return the homes of a user that have reached their limit."""
    return list_home_usage(owner).filter(used_mib__gte=F("limit_mib"))


def storage_problems() -> list[tuple[str, str]]:
    """Return the name of each node whose latest measurement is missing or incomplete, and why."""
    rows = Node.objects.exclude(storage_problem="").exclude(state=NodeState.RETIRED.value)
    return list(rows.order_by("name").values_list("name", "storage_problem"))
