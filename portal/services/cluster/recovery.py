"""Recovery after a restore: nothing starts until each node is reconciled with the restored database.

``ClusterSettings.recovery_mode`` is set from the restore until every node was reconciled or fenced. A running
container without a row is never ended automatically (I18): it is recorded as an orphan, and an administrator
adopts or stops it. Until then its node counts as not reconciled.
"""

from __future__ import annotations

import datetime as dt
import logging
from collections.abc import Sequence

from django.db import connection, transaction
from django.db.models import Max, Value
from django.db.models.functions import Concat, Substr
from django.utils import timezone
from django.utils.translation import gettext as _

from agents.engines.replies import Container
from portal.access import Permission, require_permission
from portal.domain.nodes.node_breaker import BreakerState, IncidentKind
from portal.domain.states import FENCED_REASON, JobKind, RuntimeKind
from portal.domain.stored_texts import stored_text
from portal.errors import Conflict
from portal.live_events import publish_on_commit
from portal.models import ClusterSettings, Environment, Gpu, Job, Lease, Node, OrphanContainer, Project, User
from portal.models.public_id import MAX_ID_LENGTH
from portal.outbox import notify_node, trigger_cycle
from portal.selectors.cluster.recovery import nodes_to_reconcile
from portal.services.audit import record_action
from portal.services.lifecycle.adoption import adopt_attempt, advance_attempt_number

log = logging.getLogger(__name__)

ADOPTED_PROJECT = "kept-after-restore"
"""The project of adopted jobs whose own project is unknown."""
RECONCILE = "compare"
"""The verb that makes a node's actor reconcile now."""

MAX_ORPHANS = 1000
"""Maximum number of recorded orphans per node; a node with more counts as not reconciled."""

RESTORED_EPOCH_LEASE = "restored"
"""Name of the lease row that holds the minimum for all further epochs."""
EPOCHS_PER_SECOND = 2**20
EPOCHS_SKIPPED = 2**32


# -- start and end ---------------------------------------------------------------------------------


def begin_recovery() -> None:
    """Mark the state of all nodes as outdated after a restore. Must run in a transaction."""
    _raise_epochs()
    ClusterSettings.objects.update_or_create(id=1, defaults={"recovery_mode": True})
    OrphanContainer.objects.all().delete()
    Node.objects.filter(state_reason__startswith=FENCED_REASON).update(
        state_reason=Substr(Concat(Value("Before the restore: "), "state_reason"), 1, 500)
    )
    Node.objects.update(reconciled_at=None, reachable=False)
    # these epochs were valid: issued after the backup was made
    Node.objects.filter(breaker_cause=IncidentKind.EPOCH_AHEAD.value).update(
        breaker_state=BreakerState.HEALTHY.value,
        breaker_cause="",
        breaker_message="",
        breaker_since=timezone.now(),
        probe_at=None,
    )


def _raise_epochs() -> None:
    """End every lease, and make later epochs exceed all that were issued since the backup.

    Nodes refuse an epoch lower than the highest they have seen. They are not queried for it, because they
    could report a false one. Epochs therefore continue from the clock, at a rate that no installation reaches
    by issuing them one by one. If the clock is wrong, they continue far above those of the backup.
    """
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_advisory_xact_lock(%s)", [Lease.EPOCH_LOCK])
    highest: int = Lease.objects.aggregate(highest=Max("epoch"))["highest"] or 0
    now = timezone.now()
    epoch = max(highest + EPOCHS_SKIPPED, int(now.timestamp()) * EPOCHS_PER_SECOND)
    Lease.objects.all().delete()
    Lease.objects.create(name=RESTORED_EPOCH_LEASE, holder=RESTORED_EPOCH_LEASE, epoch=epoch, expires_at=now)


def end_recovery_if_complete() -> bool:
    """End the recovery if every node is reconciled or fenced; return True if it ended now."""
    if not ClusterSettings.objects.filter(recovery_mode=True).exists():
        return False
    with transaction.atomic():
        cluster = ClusterSettings.objects.select_for_update(no_key=True).get(id=1)
        if not cluster.recovery_mode or nodes_to_reconcile().exists():
            return False
        cluster.recovery_mode = False
        cluster.save(update_fields=["recovery_mode"])
        record_action(None, "cluster.recovered", cluster, after={"recovery_mode": False})
        publish_on_commit("cluster", {"kind": "restored", "adopting": False})
        trigger_cycle("adopted")
    log.info("every node was reconciled with the restored database; jobs start again")
    return True


# -- reports of nodes ------------------------------------------------------------------------------


def record_orphans(node: Node, live: Sequence[Container]) -> set[tuple[str, int]]:
    """Record the running containers of a node without a row; earlier orphans not among them are gone.

    Return the (job, attempt) pairs that an administrator decided to stop.
    """
    with transaction.atomic():
        rows = {
            row.name: row
            for row in OrphanContainer.objects.select_for_update(no_key=True).filter(node=node).order_by("pk")
        }
        for container in live:
            if container.name not in rows and len(rows) < MAX_ORPHANS:
                rows[container.name] = _upsert_orphan(node, container)
        names = {container.name for container in live}
        for row in rows.values():
            if row.removed_at is None and row.decision != "adopt" and row.name not in names:
                row.removed_at = timezone.now()
                row.save(update_fields=["removed_at"])
                _record(None, "container.gone", row, stopped=bool(row.decision))
        return {
            (row.job, row.attempt) for row in rows.values() if row.decision == "stop" and row.name in names
        }


def _upsert_orphan(node: Node, container: Container) -> OrphanContainer:
    started_s = container.started_s
    row = OrphanContainer.objects.create(
        node=node,
        name=container.name,
        job=container.key.job,
        attempt=container.key.attempt,
        rank=container.key.task,
        owner=container.owner,
        project=container.project,
        gpus=[{"uuid": uuid, "milli": milli} for uuid, milli in container.gpus],
        ports=container.ports,
        started_at=None if started_s is None else dt.datetime.fromtimestamp(started_s, dt.UTC),
    )
    _record(None, "container.unknown", row)
    return row


# -- decisions of administrators -------------------------------------------------------------------


def do_stop_orphan(actor: User, row: OrphanContainer) -> OrphanContainer:
    """Stop an orphan container and every rank of its attempt, permanently by a tombstone. Repeatable.

    It counts as gone when its node reports so.
    """
    require_permission(actor, Permission.CHANGE, row)
    with transaction.atomic():
        rows = _mark_decided(actor, row, "stop")
        advance_attempt_number(row.job, row.attempt)
        for each in rows:
            _record(actor, "container.stop", each, rank=each.rank)
            notify_node(each.node.public_id, RECONCILE)
    return OrphanContainer.objects.select_related("node").get(pk=row.pk)


def do_adopt_orphan(actor: User, row: OrphanContainer) -> Job:
    """Create the rows of an orphan container and of every rank of its attempt seen so far.

    It is added to its job if that exists, else to a placeholder job of the owner and project on its labels,
    or of the administrator. It then is a job like others: its GPUs count, its end is recorded, its owner can
    stop it. Raise Conflict if that is not possible. Repeatable.
    """
    require_permission(actor, Permission.CHANGE, row)
    with transaction.atomic():
        rows = _mark_decided(actor, row, "adopt")
        job = Job.objects.select_for_update(of=("self",), no_key=True).filter(public_id=row.job).first()
        if not rows:
            if job is None:
                raise Conflict(_("It is gone."), code="container_gone")
            return job
        if job is None:
            job = _create_placeholder_job(actor, rows)
        elif job.is_placeholder:  # ranks on other nodes were adopted before
            Job.objects.filter(pk=job.pk).update(tasks=job.tasks + len(rows))
        nodes = ", ".join(sorted({each.node.name for each in rows}))
        message = stored_text(f"Found running on {nodes} after a restore, and adopted by {actor.username}.")
        if job.kind == JobKind.WORKSPACE.value:
            message += stored_text(" Its access secret was lost with the database: it can only be stopped.")
        found = [(each, _gpus_of(each)) for each in rows]
        adopt_attempt(job, row.attempt, found, actor=actor.username, message=message)
        for each in rows:
            labels = {"owner": job.owner.username, "project": job.project.name, "stub": job.is_placeholder}
            _record(actor, "container.adopt", each, rank=each.rank, **labels)
            notify_node(each.node.public_id, RECONCILE)
        return job


def _mark_decided(actor: User, row: OrphanContainer, decision: str) -> list[OrphanContainer]:
    """Lock and mark the open rows of the attempt; return none if the same was decided before.

    Raise Conflict if another decision was made, the container is gone, or recovery has ended.
    """
    if not ClusterSettings.objects.select_for_update(no_key=True).get(id=1).recovery_mode:
        raise Conflict(
            _("Every node has been reconciled; no container is undecided."), code="not_in_recovery"
        )
    rows = list(
        OrphanContainer.objects.select_for_update(of=("self",), no_key=True)
        .filter(job=row.job, attempt=row.attempt, removed_at__isnull=True)
        .select_related("node__pool")
        .order_by("pk")
    )
    if not any(each.pk == row.pk for each in rows):
        raise Conflict(_("It has already ended."), code="container_gone")
    if any(each.decision not in ("", decision) for each in rows):
        other = "stopped" if decision == "adopt" else "adopted"
        raise Conflict(_("It is already being {other}.").format(other=other), code="already_decided")
    fresh = [each for each in rows if each.decision == ""]
    for each in fresh:
        each.decision, each.decided_by, each.decided_at = decision, actor, timezone.now()
        each.save(update_fields=["decision", "decided_by", "decided_at"])
    return fresh


def _gpus_of(row: OrphanContainer) -> list[tuple[int, int]]:
    """Return (GPU id, milli) of a container. Raise Conflict if its node does not report one of its GPUs."""
    rows = dict(Gpu.objects.filter(node=row.node).values_list("uuid", "pk"))
    missing = [share["uuid"] for share in row.gpus if share["uuid"] not in rows]
    if missing:
        message = _("{name} reports no GPU {missing}; it can only be stopped.").format(
            name=row.node.name, missing=missing[0]
        )
        raise Conflict(message, code="no_such_gpu")
    return [(rows[share["uuid"]], int(share["milli"])) for share in row.gpus]


def _create_placeholder_job(actor: User, rows: Sequence[OrphanContainer]) -> Job:
    """Create a job for an attempt of which only the containers are known."""
    first = rows[0]
    if len(first.job) > MAX_ID_LENGTH:
        raise Conflict(_("Its label has no valid id; it can only be stopped."), code="not_managed")
    owner = User.objects.filter(public_id=first.owner).first() if first.owner else None
    project = Project.objects.filter(public_id=first.project).first() if first.project else None
    if project is None:
        title = "Adopted after a restore"
        project = Project.objects.get_or_create(name=ADOPTED_PROJECT, defaults={"title": title})[0]
    shares = max((each.gpus for each in rows), key=len)
    return Job.objects.create(
        public_id=first.job,
        name=f"kept-{first.job}",
        kind=JobKind.TRAINING.value,
        project=project,
        owner=owner or actor,
        pool=first.node.pool,
        environment=_placeholder_environment(first.node.runtime),
        is_placeholder=True,
        preemptible=False,
        tasks=len(rows),
        gpus_per_task=len(shares),
        milli_per_gpu=shares[0]["milli"] if shares else 1000,
        cpu_milli=0,
        memory_mib=0,
    )


def _placeholder_environment(runtime: str) -> Environment:
    defaults = {
        "title": f"Unknown ({RuntimeKind(runtime).value})",
        "description": "Placeholder for the environment of a container found after a restore.",
        "runtime": runtime,
        "enabled": False,
    }
    return Environment.objects.get_or_create(name=f"unknown-{runtime}", defaults=defaults)[0]


def _record(actor: User | None, action: str, row: OrphanContainer, **more: object) -> None:
    """Write the audit row and publish the change."""
    after = {"node": row.node.name, "job": row.job, "attempt": row.attempt, **more}
    record_action(actor, action, row, after=after)
    publish_on_commit("cluster", {"kind": "restored", "node": row.node.public_id, "wanted": row.decision})
