"""Volumes: declared by administrators, referenced by jobs, and resolved to mounts on nodes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from django.db import IntegrityError, transaction
from django.db.models import Q, QuerySet
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from agents.node.spec.task_spec import mount_target_error
from portal.access import require_admin
from portal.domain.projects.project_tree import path_to_root
from portal.domain.states import LIVE_JOB_STATES, NodeState, RuntimeKind
from portal.domain.storage.volumes import (
    MAX_VOLUMES_PER_JOB,
    QUOTA_KINDS,
    VolumeKind,
    VolumeScope,
    default_mount_path,
    home_mount_path,
)
from portal.errors import Conflict, InvalidRequest
from portal.models import Job, Node, NodePool, Project, User, Volume
from portal.models.public_id import name_error
from portal.outbox import trigger_cycle
from portal.services.audit import record_action
from portal.services.lifecycle.rights_changes import DEFAULT_CHOICE, JobChoice, applying_choice

VolumeReference = Mapping[str, Any]
"""``volume`` by name; ``target`` and ``read_only`` as the job sets them, or None."""
MAX_QUOTA_MIB = 2**40


@dataclass(frozen=True)
class VolumeInput:
    """Input of a volume; without nodes, pool or projects it is available to all."""

    name: str
    kind: VolumeKind
    scope: VolumeScope = VolumeScope.NODE
    path: str = ""
    description: str = ""
    read_only: bool = False
    quota_mib: int | None = None
    pool: NodePool | None = None
    nodes: Sequence[Node] = ()
    projects: Sequence[Project] = ()


def do_save_volume(
    actor: User,
    spec: VolumeInput,
    row: Volume | None = None,
    *,
    reason: str = "",
    choice: JobChoice | None = DEFAULT_CHOICE,
) -> Volume:
    """Create or change a volume; name and kind are fixed. Running jobs are not affected.

    ``choice``: what to do with jobs whose project may not use it any more.
    """
    require_admin(actor, "change volumes")
    if wrong := _validation_errors(spec, row):
        raise InvalidRequest(fields=wrong)
    try:
        with transaction.atomic():
            saved = Volume.objects.select_for_update(of=("self",)).get(pk=row.pk) if row else Volume()
            before = _audit_values(saved) if row else None
            for key in ("path", "description", "quota_mib", "pool", "name", "read_only"):
                setattr(saved, key, getattr(spec, key))
            saved.kind, saved.scope = spec.kind.value, spec.scope.value
            jobs = Job.objects.filter(volumes__contains=[{"volume": spec.name}])
            with applying_choice(actor, saved, jobs if row else Job.objects.none(), choice):
                saved.save()
                saved.nodes.set(spec.nodes)
                saved.projects.set(spec.projects)
            record_action(
                actor, "volume.save", saved, before=before, after=_audit_values(saved), reason=reason
            )
            trigger_cycle("volume")
    except IntegrityError as error:
        fault = _("There is already a volume called {name}.").format(name=spec.name)
        if "volume_one_declared_home" in str(error):
            fault = _("There is only one volume for homes; change that one.")
        raise InvalidRequest(fields={"name": fault}, code="already_exists") from error
    return saved


def do_delete_volume(actor: User, row: Volume, *, reason: str = "") -> None:
    """Delete a volume; its files remain.

    Raise Conflict ``volume_in_use`` while live jobs or data sets reference it.
    """
    require_admin(actor, "change volumes")
    with transaction.atomic():
        locked = Volume.objects.select_for_update(of=("self",)).get(pk=row.pk)
        live = Job.objects.filter(state__in=LIVE_JOB_STATES, volumes__contains=[{"volume": locked.name}])
        if jobs := live.count():
            message = ngettext(
                "{count} unfinished job uses it.", "{count} unfinished jobs use it.", jobs
            ).format(count=jobs)
            raise Conflict(message, code="volume_in_use", details={"jobs": jobs})
        if versions := locked.data_set_versions.count():
            message = ngettext(
                "{count} version of a data set is on it. Delete it first.",
                "{count} versions of data sets are on it. Delete them first.",
                versions,
            ).format(count=versions)
            raise Conflict(message, code="volume_in_use", details={"data_set_versions": versions})
        record_action(actor, "volume.delete", locked, before=_audit_values(locked), reason=reason)
        trigger_cycle("volume")
        locked.delete()


def declared_volumes() -> QuerySet[Volume]:
    """Return all volumes except users' own homes."""
    return Volume.objects.filter(owner__isnull=True)


def node_restricted_volumes() -> QuerySet[Volume]:
    return declared_volumes().filter(Q(pool__isnull=False) | Q(nodes__isnull=False)).distinct()


def usable_volumes(project: Project) -> QuerySet[Volume]:
    """Return the volumes that jobs of a project may reference: for all, or for it or an ancestor."""
    line = [each.pk for each in path_to_root(project, lambda below: below.parent)]
    rows = declared_volumes().exclude(kind=VolumeKind.HOME.value)
    return rows.filter(Q(projects__isnull=True) | Q(projects__in=line)).distinct()


def normalize_volume_references(references: Iterable[VolumeReference]) -> list[dict[str, Any]]:
    """Return the references of a job in stored form, with mount path; read-only by default."""
    return [
        {
            "volume": str(each["volume"]),
            "target": str(each.get("target") or default_mount_path(str(each["volume"]))).rstrip("/"),
            "read_only": bool(each.get("read_only")),
        }
        for each in references
    ]


def volume_references_error(owner: User, runtime: str, references: Sequence[VolumeReference]) -> str | None:
    """Return what is wrong with the volume references of a job, or None."""
    if not references:
        return None
    if runtime == RuntimeKind.PROCESS.value:
        return _("Volumes need an environment with a container.")
    if len(references) > MAX_VOLUMES_PER_JOB:
        return _("A job can use at most {max_volumes_per_job} volumes.").format(
            max_volumes_per_job=MAX_VOLUMES_PER_JOB
        )
    wanted = normalize_volume_references(references)
    targets = [each["target"] for each in wanted]
    for target in targets:
        if fault := mount_target_error(target):
            return fault
        if PurePosixPath(target).is_relative_to(home_mount_path(owner.username)):
            return _("{target} is inside the home; choose a path outside it.").format(target=target)
        if targets.count(target) > 1:
            return _("Two volumes have the mount path {target}.").format(target=target)
    return None


def volume_location_error(references: Sequence[VolumeReference], pool: NodePool | None) -> str | None:
    """Return why no node has all referenced volumes, or None."""
    names = [str(each["volume"]) for each in references]
    return _no_common_node_reason(list(declared_volumes().filter(name__in=names)), pool) if names else None


def nodes_by_volume(rows: Iterable[Volume]) -> dict[int, set[int]]:
    """Return node ids by volume id, in two queries; volumes on all nodes are left out."""
    rows = list(rows)
    if not rows:
        return {}
    members: dict[int, set[int]] = defaultdict(set)
    for node, pool in Node.objects.values_list("id", "pool_id"):
        members[pool].add(node)
    limits: dict[int, list[set[int]]] = {row.pk: [members[row.pool_id]] for row in rows if row.pool_id}
    named: dict[int, set[int]] = defaultdict(set)
    through = Volume.nodes.through.objects.filter(volume__in=rows)
    for volume, node in through.values_list("volume_id", "node_id"):
        named[volume].add(node)
    for volume, nodes in named.items():
        limits.setdefault(volume, []).append(nodes)
    return {volume: set.intersection(*sets) for volume, sets in limits.items()}


def _no_common_node_reason(rows: list[Volume], pool: NodePool | None) -> str | None:
    limited = nodes_by_volume(rows)
    if not limited:
        return None
    nodes = Node.objects.filter(pk__in=set.intersection(*limited.values()))
    nodes = nodes.exclude(state=NodeState.RETIRED.value)
    if pool is not None:
        nodes = nodes.filter(pool=pool)
    if nodes.exists():
        return None
    names = ", ".join(sorted(row.name for row in rows if row.pk in limited))
    where = _("No node of {name}").format(name=pool.name) if pool else _("No node")
    return (
        _("{where} has {names}.").format(where=where, names=names)
        if len(limited) == 1
        else _("{where} has all of {names}.").format(where=where, names=names)
    )


def _validation_errors(spec: VolumeInput, row: Volume | None) -> dict[str, str]:
    wrong: dict[str, str] = {}
    kind = spec.kind
    if row is None and (fault := name_error(spec.name)):
        wrong["name"] = fault
    if row is not None and (row.name, row.kind) != (spec.name, kind.value):
        wrong["kind"] = _("The name and kind of a volume cannot be changed; delete it and create another.")
    pathless = kind is VolumeKind.SCRATCH or (kind is VolumeKind.HOME and spec.scope is VolumeScope.NODE)
    if pathless and spec.path:
        wrong["path"] = _("The node's settings define this path; leave it empty.")
    elif not pathless and (not spec.path.startswith("/") or mount_target_error(spec.path.rstrip("/"))):
        wrong["path"] = _("Enter the full path of the folder on the nodes.")
    if kind is VolumeKind.SCRATCH and spec.scope is VolumeScope.SHARED:
        wrong["reach"] = _("A scratch folder is always local to its node.")
    if kind is VolumeKind.NFS and spec.scope is VolumeScope.NODE:
        wrong["reach"] = _("A network share is the same on every node; choose shared.")
    if kind is VolumeKind.SCRATCH and spec.read_only:
        wrong["read_only"] = _("A scratch folder must be writable.")
    if spec.quota_mib is not None and kind not in QUOTA_KINDS:
        wrong["quota_mib"] = _("A node can limit only homes, project folders and scratch folders.")
    elif spec.quota_mib is not None and not 1 <= spec.quota_mib <= MAX_QUOTA_MIB:
        wrong["quota_mib"] = _("Must be at least 1.")
    if kind is VolumeKind.HOME and (spec.projects or spec.nodes or spec.pool or spec.read_only):
        wrong["kind"] = _("Homes must be available to all projects, pools and nodes.")
    return wrong


def _audit_values(row: Volume) -> dict[str, Any]:
    keys = ("name", "kind", "scope", "path", "description", "read_only", "quota_mib")
    return {key: getattr(row, key) for key in keys} | {
        "pool": row.pool.name if row.pool else None,
        "nodes": sorted(row.nodes.values_list("name", flat=True)),
        "projects": sorted(row.projects.values_list("name", flat=True)),
    }
