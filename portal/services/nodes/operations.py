"""Operations on nodes: connection tests, and upgrades, checks and garbage collection by their actors.

For the latter the row is the request: the node's actor finds it even if its notification is lost, and may
execute it twice. ``do_`` functions are called by administrators, ``record_`` by the scheduler.
"""

from __future__ import annotations

import datetime as dt
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from django.db import transaction
from django.db.models import OuterRef, Q, Subquery
from django.db.models.functions import Now
from django.utils import timezone
from django.utils.translation import gettext as _

from portal.access import Permission, require_admin, require_permission
from portal.domain.nodes.node_operations import (
    CONNECT,
    CONTROL_CHANNEL_OPERATIONS,
    FULL_DISK_GC_INTERVAL_S,
    OPERATION_TIMEOUT_S,
    OPERATION_TITLES,
    OPERATIONS,
    OWN_CONNECTION_TIMEOUT_S,
    OperationKind,
    RolloutStatus,
    startable_count,
)
from portal.domain.states import DISK_FULL_REASON, NodeState
from portal.domain.stored_texts import stored_text
from portal.errors import Conflict
from portal.live_events import publish_on_commit
from portal.models import AgentRollout, Node, NodeOperation, NodePool, User
from portal.outbox import enqueue_task, notify_node, notify_nodes
from portal.selectors.nodes.agent_version import bundled_agent, runs_bundled_agent
from portal.selectors.scheduling.settings import effective_pool_settings
from portal.services.audit import record_action
from portal.services.nodes.locks import lock_node

# -- for administrators ----------------------------------------------------------------------------


def do_request_operation(actor: User, node: Node, kind: OperationKind) -> NodeOperation:
    """Request an operation on a node, or return the unfinished one of this kind.

    Raise Conflict while the node is unreachable or if it is retired, ServiceUnavailable for an upgrade without a
    signed agent.
    """
    require_permission(actor, Permission.CHANGE, node)
    if kind is OperationKind.UPGRADE:
        bundled_agent()
    with transaction.atomic():
        row = lock_node(node)
        under_way = NodeOperation.objects.filter(node=row, kind=kind.value, finished_at__isnull=True).first()
        if under_way is not None:
            return under_way
        if not row.reachable:
            message = _("{name} is unreachable, so this operation cannot be started.").format(name=row.name)
            raise Conflict(message, code="node_unreachable")
        check = request_operation(row, kind, actor)
        record_action(actor, f"node.{kind.value}", row)
    return check


def do_upgrade_all(actor: User) -> AgentRollout:
    """Upgrade every node with another agent: one first, then several in parallel, until one fails.

    Unreachable nodes are left out. Raise Conflict while another rollout runs, or if none is needed.
    """
    require_admin(actor, "upgrade nodes")
    bundled_agent()
    with transaction.atomic():
        if AgentRollout.objects.select_for_update().filter(finished_at__isnull=True).exists():
            raise Conflict(_("The nodes are already being upgraded."), code="rollout_in_progress")
        nodes = [node for node in Node.objects.order_by("name") if _needs_upgrade(node)]
        if not nodes:
            raise Conflict(_("Every reachable node already runs this agent."), code="nothing_to_upgrade")
        rollout = AgentRollout.objects.create(actor=actor)
        NodeOperation.objects.bulk_create(
            NodeOperation(node=node, kind=OperationKind.UPGRADE.value, actor=actor, rollout=rollout)
            for node in nodes
        )
        record_action(actor, "nodes.upgrade_all", rollout, after={"nodes": [node.name for node in nodes]})
        _advance_rollout(rollout)
    return rollout


def _needs_upgrade(node: Node) -> bool:
    answers = node.reachable and node.state not in (NodeState.RETIRED.value, NodeState.ENROLLING.value)
    return answers and not runs_bundled_agent(node)


def do_start_connection_test(actor: User, node: Node) -> NodeOperation:
    """Make the process with the node key test the connection; steps are added to the row."""
    require_permission(actor, Permission.CHANGE, node)
    with transaction.atomic():
        check = NodeOperation.objects.create(node=lock_node(node), kind=OperationKind.TEST.value, actor=actor)
        enqueue_task("scheduler.check_node", [check.public_id], "nodes")
    return check


# -- for the scheduler -----------------------------------------------------------------------------


def request_operation(node: Node, kind: OperationKind, actor: User | None = None) -> NodeOperation:
    """Create an operation for a node's actor, within the caller's transaction, without a permission check."""
    return request_operations([node], kind, actor)[0]


def request_operations(nodes: Sequence[Node], kind: OperationKind, actor: User | None) -> list[NodeOperation]:
    """As ``request_operation``, for several nodes."""
    now = timezone.now()
    rows = NodeOperation.objects.bulk_create(
        NodeOperation(node=node, kind=kind.value, actor=actor, dispatched_at=now) for node in nodes
    )
    notify_nodes({node.public_id: (OPERATIONS, "") for node in nodes})
    return rows


def due_operations(node_id: int) -> list[NodeOperation]:
    """Return the operations to execute on a node now, in the order of the requests."""
    rows = NodeOperation.objects.filter(_is_due(), node_id=node_id).order_by("id")
    return list(rows.select_related("node"))


def nodes_with_due_operations() -> list[str]:
    """Return the public ids of nodes with due operations, even if their notification was lost."""
    return list(NodeOperation.objects.filter(_is_due()).values_list("node__public_id", flat=True).distinct())


def record_program_sent(operation_id: int, program: str) -> None:
    """Record that the new program is installed on the node; its next answer shows whether it runs."""
    NodeOperation.objects.filter(pk=operation_id).update(program_sha256=program)


def record_operation_finished(operation_id: int, ok: bool) -> None:
    """Record the result. A successful upgrade is followed by a check, and by the next nodes of a rollout."""
    with transaction.atomic():
        check = _lock_operation(pk=operation_id)
        if check.finished_at is not None:
            return
        _finish(check, ok)
        if ok and check.kind == OperationKind.UPGRADE.value:
            request_operation(check.node, OperationKind.PREFLIGHT, check.actor)
        if check.rollout_id is not None:
            _advance_rollout(AgentRollout.objects.select_for_update().get(pk=check.rollout_id))
        news = {"kind": "node", "node": check.node.public_id, "state": check.node.state}
        publish_on_commit("cluster", news)


def record_images_removed(operation: NodeOperation, removed: Sequence[Mapping[str, Any]]) -> None:
    """Audit the removal of images, and have the presence of environments checked again."""
    if not removed:
        return
    columns = {"names": "names", "mib": "size_mib", "unused_s": "unused_s"}
    images = [{name: row[key] for name, key in columns.items()} for row in removed]
    with transaction.atomic():
        record_action(operation.actor, "node.images_removed", operation.node, after={"images": images})
        notify_node(operation.node.public_id, "images")


def request_gc_if_full(node: Node, used_percent: float | None) -> None:
    """Request garbage collection if the image store is too full; at most every quarter of an hour."""
    high = float(effective_pool_settings([node.pool])[node.pool_id]["image_gc_high_threshold_percent"])
    since = timezone.now() - dt.timedelta(seconds=FULL_DISK_GC_INTERVAL_S)
    if used_percent is None or used_percent < high:
        return
    if not node.operations.filter(kind=OperationKind.GC.value, started_at__gt=since).exists():
        with transaction.atomic():
            request_operation(node, OperationKind.GC)


def request_due_gc() -> None:
    """Request periodic garbage collection, more often if the disk is full."""
    newest = NodeOperation.objects.filter(node=OuterRef("pk"), kind=OperationKind.GC.value).order_by("-id")
    nodes = Node.objects.filter(reachable=True, state__in=[NodeState.READY.value, NodeState.CORDONED.value])
    columns = ("pk", "pool_id", "state_reason", "created_at", "tidied_at")
    tidied_at = Subquery(newest.values("started_at")[:1])
    rows = list(nodes.annotate(tidied_at=tidied_at).values_list(*columns, named=True))
    # after the rows, so that the pools of all are included
    settings, now = effective_pool_settings(NodePool.objects.all()), timezone.now()
    due = []
    for row in rows:
        every_s = float(settings[row.pool_id]["gc_interval_s"])
        if every_s and row.state_reason.startswith(DISK_FULL_REASON):
            every_s = min(every_s, FULL_DISK_GC_INTERVAL_S)
        last = row.tidied_at or row.created_at
        if every_s and now - last >= dt.timedelta(seconds=every_s):
            due.append(row.pk)
    for node in Node.objects.filter(pk__in=due) if due else ():
        with transaction.atomic():
            request_operation(node, OperationKind.GC)


def fail_overdue_operations() -> None:
    """Fail operations that are not finished in time: the node does not answer, or no process executed them."""
    _fail_lost_operations()
    late = NodeOperation.objects.filter(
        _is_due(), dispatched_at__lt=Now() - dt.timedelta(seconds=OPERATION_TIMEOUT_S)
    )
    for check in late.select_related("node"):
        message = stored_text(f"{check.node.name} did not respond within {OPERATION_TIMEOUT_S:.0f} s.")
        if check.program_sha256:
            message += stored_text(
                " The new agent may be installed; unless it is confirmed, the node rolls back."
            )
        record_operation_step(
            check.public_id,
            name=OPERATION_TITLES[OperationKind(check.kind)],
            ok=False,
            message=message,
            seconds=OPERATION_TIMEOUT_S,
        )
        record_operation_finished(check.pk, ok=False)


def _fail_lost_operations() -> None:
    """Fail operations of a process that ended meanwhile, or whose message was lost."""
    since = Now() - dt.timedelta(seconds=OWN_CONNECTION_TIMEOUT_S)
    kinds = [kind.value for kind in OperationKind if kind not in CONTROL_CHANNEL_OPERATIONS]
    lost = NodeOperation.objects.filter(kind__in=kinds, finished_at__isnull=True, started_at__lt=since)
    for operation in lost:
        record_operation_step(
            operation.public_id,
            name=OPERATION_TITLES[OperationKind(operation.kind)],
            ok=False,
            message=stored_text("It was interrupted; start it again."),
            seconds=OWN_CONNECTION_TIMEOUT_S,
        )
        record_operation_finished(operation.pk, ok=False)


def record_operation_step(
    operation_id: str, *, name: str, ok: bool, message: str, seconds: float, skipped: bool = False
) -> None:
    """Add a step of a connection test, for the page that waits; a skipped one is not ``ok``."""
    with transaction.atomic():
        check = NodeOperation.objects.select_for_update(no_key=True).get(public_id=operation_id)
        step = {
            "name": name,
            "ok": ok,
            "message": message[:1000],
            "seconds": round(seconds, 3),
            "skipped": skipped,
        }
        check.steps = [*check.steps, step]
        check.save(update_fields=["steps"])


def record_connection_test_finished(operation_id: str, ok: bool) -> None:
    """Record the result, unless it is overdue; after a success the node's actor connects now."""
    with transaction.atomic():
        check = _lock_operation(public_id=operation_id)
        if check.finished_at is not None:
            return
        _finish(check, ok)
        if ok:
            notify_node(check.node.public_id, CONNECT)


def _lock_operation(**key: Any) -> NodeOperation:
    return NodeOperation.objects.select_for_update(no_key=True).select_related("node").get(**key)


def _finish(check: NodeOperation, ok: bool) -> None:
    check.ok, check.finished_at = ok, timezone.now()
    check.save(update_fields=["ok", "finished_at"])


def _is_due() -> Q:
    acts = [act.value for act in CONTROL_CHANNEL_OPERATIONS]
    return Q(kind__in=acts, dispatched_at__isnull=False, finished_at__isnull=True)


def _advance_rollout(rollout: AgentRollout) -> None:
    """Start the next nodes of a rollout (row locked), or end it."""
    checks = list(rollout.operations.select_related("node").order_by("node__name"))
    turns = [check.rollout_status for check in checks]
    begin = startable_count(turns)
    for check in [check for check in checks if check.rollout_status is RolloutStatus.PENDING][:begin]:
        check.dispatched_at = timezone.now()
        check.save(update_fields=["dispatched_at"])
        notify_node(check.node.public_id, OPERATIONS)
    if begin == 0 and RolloutStatus.RUNNING not in turns:
        _finish_rollout(rollout, checks)


def _finish_rollout(rollout: AgentRollout, operations: list[NodeOperation]) -> None:
    by_status: dict[RolloutStatus, list[NodeOperation]] = defaultdict(list)
    for check in operations:
        by_status[check.rollout_status].append(check)
    failed = [check.node.name for check in by_status[RolloutStatus.FAILED]]
    left = [check.pk for check in by_status[RolloutStatus.PENDING]]
    NodeOperation.objects.filter(pk__in=left).delete()  # never started
    rollout.ok, rollout.finished_at = not failed, timezone.now()
    worked = len(by_status[RolloutStatus.SUCCEEDED])
    rollout.message = stored_text(f"{worked} of {len(operations)} nodes run the new agent.")
    if failed:
        rollout.message += stored_text(f" It stopped at {', '.join(failed)}; {len(left)} were not upgraded.")
    rollout.message = rollout.message[:500]
    rollout.save(update_fields=["ok", "finished_at", "message"])
