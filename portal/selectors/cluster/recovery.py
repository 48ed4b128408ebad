"""Reads what is missing after a restore, by node; a fixed number of queries."""

from __future__ import annotations

from dataclasses import dataclass, field

from django.db.models import Q, QuerySet
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from portal.domain.states import FENCED_REASON, NodeState
from portal.models import ClusterSettings, Gpu, Job, Node, OrphanContainer, Project, User

IS_UNDECIDED = Q(removed_at__isnull=True) & ~Q(decision="adopt")
"""Containers that await a decision or are being stopped."""


def nodes_to_reconcile() -> QuerySet[Node]:
    """Return the nodes that block the start of jobs: neither reconciled since the restore, nor fenced."""
    rows = Node.objects.filter(reconciled_at__isnull=True).exclude(state=NodeState.RETIRED.value)
    return rows.exclude(state=NodeState.CORDONED.value, state_reason__startswith=FENCED_REASON)


def open_orphans() -> QuerySet[OrphanContainer]:
    rows = OrphanContainer.objects.filter(IS_UNDECIDED).exclude(node__state=NodeState.RETIRED.value)
    return rows.select_related("node").order_by("id")


@dataclass
class OrphanView:
    """An orphan container with the rows that its labels and GPUs name; None if unknown."""

    row: OrphanContainer
    job: Job | None
    owner: User | None
    project: Project | None
    gpus: str


@dataclass
class UnreconciledNode:
    node: Node
    containers: list[OrphanView] = field(default_factory=list)

    @property
    def undecided(self) -> int:
        return sum(1 for held in self.containers if not held.row.decision)

    @property
    def reason(self) -> str:
        """What is missing, as a message."""
        if not self.node.reachable:
            return self.node.status_message or _("It is unreachable.")
        if self.undecided:
            return ngettext(
                "{count} container needs a decision.", "{count} containers need a decision.", self.undecided
            ).format(count=self.undecided)
        if self.containers:
            return _("Waiting for proof that stopped containers are gone.")
        return _("It is being reconciled with the database.")


@dataclass
class RecoveryStatus:
    """Status of the recovery after a restore. ``nodes`` is empty outside recovery mode."""

    in_recovery: bool
    nodes: list[UnreconciledNode] = field(default_factory=list)
    adopted: list[OrphanView] = field(default_factory=list)

    @property
    def message(self) -> str:
        """A summary of what is missing, for the banner."""
        silent = sum(1 for left in self.nodes if not left.node.reachable)
        undecided = sum(left.undecided for left in self.nodes)
        parts = [
            ngettext("{count} node is unreachable", "{count} nodes are unreachable", silent).format(
                count=silent
            )
            if silent
            else "",
            ngettext(
                "{count} unknown container needs a decision",
                "{count} unknown containers need a decision",
                undecided,
            ).format(count=undecided)
            if undecided
            else "",
        ]
        reported = [part for part in parts if part]
        return (_(" and ").join(reported) or _("the nodes are being reconciled")) + "."


def recovery_status() -> RecoveryStatus:
    """Return what is missing before jobs start again: one query outside recovery mode, else eight."""
    if not ClusterSettings.objects.filter(id=1, recovery_mode=True).exists():
        return RecoveryStatus(in_recovery=False)
    left = {node.pk: UnreconciledNode(node) for node in nodes_to_reconcile().order_by("name")}
    rows = list(open_orphans())
    kept = list(OrphanContainer.objects.filter(decision="adopt").select_related("node").order_by("id"))
    held = orphan_views([*rows, *kept])
    for one in held[: len(rows)]:
        left.setdefault(one.row.node_id, UnreconciledNode(one.row.node)).containers.append(one)
    return RecoveryStatus(True, list(left.values()), held[len(rows) :])


def orphan_views(rows: list[OrphanContainer]) -> list[OrphanView]:
    """Return the rows with the jobs, users, projects and GPUs that their labels name, in four queries."""
    jobs = Job.objects.in_bulk({row.job for row in rows}, field_name="public_id")
    owners = User.objects.in_bulk({row.owner for row in rows}, field_name="public_id")
    projects = Project.objects.in_bulk({row.project for row in rows}, field_name="public_id")
    uuids = {share["uuid"] for row in rows for share in row.gpus}
    indexes = dict(Gpu.objects.filter(uuid__in=uuids).values_list("uuid", "index"))
    return [
        OrphanView(
            row,
            jobs.get(row.job),
            owners.get(row.owner),
            projects.get(row.project),
            ", ".join(_gpu_text(share, indexes) for share in row.gpus),
        )
        for row in rows
    ]


def _gpu_text(share: dict[str, object], indexes: dict[str, int]) -> str:
    uuid, milli = str(share["uuid"]), share["milli"]
    name = f"GPU {indexes[uuid]}" if uuid in indexes else uuid
    return name if milli == 1000 else _("{milli} thousandths of {name}").format(milli=milli, name=name)
