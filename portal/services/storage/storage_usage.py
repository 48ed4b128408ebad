"""Decides which folders a node measures, stores their usage, and notifies the owners of nearly full ones."""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from typing import NamedTuple

from django.db import transaction
from django.db.models import Q
from django.db.models.functions import Now
from django.utils import timezone

from agents.engines.replies import FolderUsage
from agents.verbs import STORAGE_USAGE
from portal.domain.notices.notices import NoticeKind
from portal.domain.projects.project_tree import path_to_root
from portal.domain.scheduling.policy_settings import default_value
from portal.domain.states import NodeState, Role
from portal.domain.storage.volumes import VolumeKind, VolumeScope, nearly_full_changes
from portal.domain.stored_texts import stored_text
from portal.models import Membership, Node, Project, User, Volume, VolumeUsage
from portal.selectors.scheduling.settings import cluster_settings
from portal.services.notices.write import NoticeDraft, write_notices
from portal.services.storage.volumes import declared_volumes, nodes_by_volume

INTERVAL = "storage_usage_interval_s"
_BYTES_PER_MIB = 1024 * 1024


class MeasuredRoot(NamedTuple):
    """A folder whose subfolders belong to users or projects. ``volume`` None: the homes on the node's disk."""

    path: str
    volume: Volume | None
    limit_mib: int | None

    @property
    def is_of_projects(self) -> bool:
        return self.volume is not None and self.volume.kind == VolumeKind.PROJECT.value


def start_measurement(node: Node) -> list[MeasuredRoot]:
    """Return what the node is to measure now, and record that it is asked; empty before the interval is over."""
    interval_s = float(cluster_settings().get(INTERVAL, default_value(INTERVAL)))
    if not interval_s:
        return []
    before = timezone.now() - dt.timedelta(seconds=interval_s)
    due = Node.objects.filter(Q(storage_asked_at__isnull=True) | Q(storage_asked_at__lte=before), pk=node.pk)
    if not due.exclude(state=NodeState.RETIRED.value).update(storage_asked_at=Now()):
        return []
    rows = list(declared_volumes().filter(kind__in=[VolumeKind.HOME.value, VolumeKind.PROJECT.value]))
    homes = next((row for row in rows if row.kind == VolumeKind.HOME.value), None)
    roots = [MeasuredRoot("", None, homes.quota_mib if homes else None)]
    nodes_of = nodes_by_volume(rows)
    able = Node.objects.filter(reachable=True, agent_info__capabilities__contains=[STORAGE_USAGE.capability])
    able_ids = set(able.values_list("pk", flat=True)) | {node.pk}
    for row in rows:
        having = able_ids & nodes_of.get(row.pk, able_ids)
        # one node measures what all nodes share
        measuring = {min(having)} if having and row.scope == VolumeScope.SHARED.value else having
        if row.path and node.pk in measuring:
            roots.append(MeasuredRoot(row.path, row, row.quota_mib))
    return roots


def record_usage(
    node: Node, roots: Sequence[MeasuredRoot], folders: Sequence[FolderUsage], problem: str = ""
) -> None:
    """Store what a node measured. Rows of folders that it does not have any more are deleted.

    ``problem``: why it did not answer; the rows stay.
    """
    faults = [problem, *(each.problem for each in folders if not each.name)]
    with transaction.atomic():
        Node.objects.filter(pk=node.pk).update(storage_problem=" ".join(filter(None, faults))[:300])
        if problem:
            return
        incomplete = {each.root for each in folders if not each.name}
        for number, root in enumerate(roots):
            measured = [each for each in folders if each.root == number and each.name]
            _record_root(node, root, measured, keep_others=number in incomplete)


def delete_outdated_usage() -> None:
    """Delete the usage on retired nodes."""
    VolumeUsage.objects.filter(node__state=NodeState.RETIRED.value).delete()


def _record_root(node: Node, root: MeasuredRoot, folders: Sequence[FolderUsage], keep_others: bool) -> None:
    names = [each.name for each in folders]
    owners: dict[str, User | Project]
    if root.is_of_projects:
        owners = {each.public_id: each for each in Project.objects.filter(public_id__in=names)}
    else:
        owners = {each.username: each for each in User.objects.filter(username__in=names)}
    rows = VolumeUsage.objects.filter(volume=root.volume)
    if root.volume is None or root.volume.scope == VolumeScope.NODE.value:
        rows = rows.filter(node=node)
    stored = {row.owner_id or row.project_id: row for row in rows.select_for_update()}
    found, drafts = [], []
    for folder in folders:
        owner = owners.get(folder.name)
        if owner is None:
            continue
        row = stored.pop(owner.pk, None) or VolumeUsage(volume=root.volume)
        row.node = node
        if isinstance(owner, Project):
            row.project = owner
        else:
            row.owner = owner
        _update(row, folder, root.limit_mib)
        if row.measured_at is not None:
            change = nearly_full_changes(row.used_mib, row.limit_mib, row.notified)
            row.notified = row.notified if change is None else change
            drafts += _drafts(row, owner) if change else []
        found.append(row)
    if not keep_others:
        VolumeUsage.objects.filter(pk__in=[row.pk for row in stored.values()]).delete()
    columns = ["node", "used_mib", "files", "limit_mib", "enforced", "measured_at", "problem", "notified"]
    VolumeUsage.objects.bulk_create([row for row in found if row.pk is None])
    VolumeUsage.objects.bulk_update([row for row in found if row.pk is not None], columns)
    write_notices(drafts)


def _update(row: VolumeUsage, folder: FolderUsage, limit_mib: int | None) -> None:
    row.problem = folder.problem
    row.enforced = folder.limit_bytes is not None
    row.limit_mib = folder.limit_bytes // _BYTES_PER_MIB if folder.limit_bytes is not None else limit_mib
    if folder.used_bytes is not None:
        row.used_mib, row.files = folder.used_bytes // _BYTES_PER_MIB, folder.files or 0
        row.measured_at = timezone.now()


def _drafts(row: VolumeUsage, owner: User | Project) -> list[NoticeDraft]:
    used, limit, node = f"{row.used_mib / 1024:.1f}", f"{(row.limit_mib or 0) / 1024:.1f}", row.node.name
    message = stored_text(f"{used} of {limit} GiB are used on {node}. Delete files that are not needed.")
    kind = NoticeKind.FOLDER_NEARLY_FULL
    if isinstance(owner, User):
        return [NoticeDraft(kind, owner.pk, stored_text("Your home is nearly full"), message, node=row.node)]
    title = stored_text(f"The folder of {owner.name} is nearly full")
    line = [each.pk for each in path_to_root(owner, lambda below: below.parent)]
    managers = Membership.objects.filter(project__in=line, role=Role.MANAGER.value)
    recipients = [*managers.values_list("user_id", flat=True).distinct(), None]
    return [NoticeDraft(kind, user, title, message, node=row.node, project=owner) for user in recipients]
