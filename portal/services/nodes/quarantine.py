"""The only writer of node breaker states: stores incidents and applies ``portal.domain.nodes.node_breaker``.

``record_`` functions are called by the scheduler, ``do_`` by administrators. A node's row is locked before
any job's; if jobs are locked already, locking the node does not wait.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable
from typing import Any

from django.db import transaction
from django.db.models import Count, F, Q, QuerySet
from django.db.models.functions import Now
from django.utils import timezone

from portal.access import Permission, require_permission
from portal.domain.jobs.exit_codes import describe_exit
from portal.domain.jobs.reasons import EndReason
from portal.domain.nodes import node_breaker
from portal.domain.nodes.node_breaker import BreakerState, Incident, IncidentKind, NodeBreaker
from portal.domain.states import AttemptState, NodeState
from portal.domain.stored_texts import stored_text
from portal.errors import Conflict
from portal.live_events import publish_on_commit
from portal.models import Attempt, Job, Node, NodeIncident, Task, User
from portal.outbox import trigger_cycle
from portal.services.audit import record_action
from portal.services.nodes.locks import lock_node

_WINDOW = dt.timedelta(seconds=node_breaker.INCIDENT_WINDOW_S)
_EARLY_FAILURE = dt.timedelta(seconds=node_breaker.EARLY_FAILURE_S)
_MAX_INCIDENTS_READ = 50
_REPORT_DELAY = dt.timedelta(seconds=5)
_NODE_CAUSED_REASONS = frozenset({EndReason.EXIT_CODE, EndReason.CONTAINER_LOST})
"""End reasons that the node may have caused; only several of them indicate that."""
_SELF_REPORTED = frozenset({IncidentKind.MALFORMED, IncidentKind.EPOCH_AHEAD})
"""Incidents that a node can cause by what it sends, without limit."""


# -- incidents ---------------------------------------------------------------------------------------


def record_incident(
    node_id: int, kind: IncidentKind, *, job: Job | None = None, peer_id: int | None = None, message: str = ""
) -> None:
    """Store an incident of a node, and quarantine the node if that suffices."""
    with transaction.atomic():
        node = Node.objects.select_for_update(no_key=True).get(pk=node_id)
        if kind in _SELF_REPORTED and node.breaker_state == BreakerState.QUARANTINED.value:
            return  # it could add rows without limit
        NodeIncident.objects.create(
            node=node, at=timezone.now(), kind=kind.value, job=job, peer_id=peer_id, message=message[:500]
        )
        _evaluate_locked(node)


def record_peer_unreachable(node_id: int, peer_id: int, *, job: Job, message: str) -> int | None:
    """Record that two nodes did not reach each other, an incident of both.

    Return the id of the likely culprit, or None.
    """
    recent = _recent_unreachable([node_id, peer_id]).values_list("node_id", "peer_id")
    before = [(str(one), str(other)) for one, other in recent[:_MAX_INCIDENTS_READ]]
    for one, other in sorted([(node_id, peer_id), (peer_id, node_id)]):
        record_incident(one, IncidentKind.PEER_UNREACHABLE, job=job, peer_id=other, message=message)
    cause = node_breaker.likely_culprit((str(node_id), str(peer_id)), before)
    return None if cause is None else int(cause)


def unreachable_peers(node_id: int) -> list[int]:
    """Return the ids of nodes that recently could not connect with this node."""
    peers = _recent_unreachable([node_id]).values_list("peer_id", flat=True)
    return [peer for peer in peers if peer is not None]


def _recent_unreachable(nodes: Iterable[int]) -> QuerySet[NodeIncident]:
    since = timezone.now() - _WINDOW
    return NodeIncident.objects.filter(node__in=nodes, kind=IncidentKind.PEER_UNREACHABLE.value, at__gt=since)


def record_stuck_job(node_id: int, job: Job) -> None:
    """Quarantine a node until a job's unkillable process is gone."""
    with transaction.atomic():
        node = Node.objects.select_for_update(no_key=True).get(pk=node_id)
        now = timezone.now()
        after = node_breaker.quarantine_stuck(breaker_of(node), now.timestamp())
        if after != breaker_of(node):
            words = stored_text(f"A task of {job.public_id} was killed but still exists.")
            NodeIncident.objects.create(
                node=node, at=now, kind=IncidentKind.STUCK.value, job=job, message=words
            )
            _save_breaker(node, after, words)


def record_task_failure(task_id: int, reason: EndReason) -> None:
    """Record an incident of the node if the task failed by itself soon after its start."""
    if reason not in _NODE_CAUSED_REASONS:
        return
    task = Task.objects.select_related("attempt__job").get(pk=task_id)
    ended_at = task.ended_at or timezone.now()
    if task.running_at is None or ended_at - task.running_at <= _EARLY_FAILURE:
        exit_code = describe_exit(task.exit_code)
        message = stored_text(
            f"Exit code {exit_code}." if task.exit_code is not None else "Its container disappeared."
        )
        record_incident(task.node_id, IncidentKind.EARLY_FAILURES, job=task.attempt.job, message=message)


def evaluate_breakers() -> None:
    """Evaluate the breakers of all affected nodes: quarantines, probations, and incidents of other nodes."""
    quarantined = Q(breaker_state=BreakerState.QUARANTINED.value) & (
        Q(probe_at__lte=Now()) | Q(breaker_cause=IncidentKind.STUCK.value)
    )
    troubled = Q(breaker_state=BreakerState.HEALTHY.value, incidents__at__gt=Now() - _WINDOW)
    rows = Node.objects.filter(quarantined | Q(breaker_state=BreakerState.PROBATION.value) | troubled)
    for node_id in rows.order_by("pk").distinct().values_list("pk", flat=True):
        with transaction.atomic():
            rows = Node.objects.select_for_update(of=("self",), no_key=True).select_related(
                "probation_attempt"
            )
            _evaluate_node(rows.get(pk=node_id))


def start_probations(attempts: Iterable[tuple[Attempt, Iterable[Node]]]) -> None:
    """Bind nodes on probation to attempts, in the transaction that starts these.

    Raise Conflict if a node already has an attempt on probation, OperationalError if its row is locked.
    """
    wanted = {
        node.pk: attempt
        for attempt, nodes in attempts
        for node in nodes
        if node.breaker_state == BreakerState.PROBATION.value
    }
    if not wanted:
        return
    rows = Node.objects.select_for_update(no_key=True, nowait=True).filter(pk__in=wanted).order_by("pk")
    for node in rows:
        if node.breaker_state == BreakerState.QUARANTINED.value:
            raise Conflict("A node of the plan no longer accepts jobs.", code="node_changed")
        if node.breaker_state == BreakerState.PROBATION.value:
            if node.probation_attempt_id not in (None, wanted[node.pk].pk):
                raise Conflict(f"{node.name} is on probation with another job.", code="node_on_probation")
            node.probation_attempt = wanted[node.pk]
            node.save(update_fields=["probation_attempt"])


def do_clear_node_quarantine(actor: User, node: Node, *, reason: str = "") -> Node:
    """End the quarantine of a node and reset its trip count. Repeatable."""
    require_permission(actor, Permission.CHANGE, node)
    with transaction.atomic():
        row = lock_node(node)
        if row.breaker_state != BreakerState.HEALTHY.value or row.trip_count:
            healthy = NodeBreaker(since_s=timezone.now().timestamp())
            _save_breaker(row, healthy, reason, actor)
    return row


def breaker_of(node: Node) -> NodeBreaker:
    """Return the breaker state stored in the node's row."""
    return NodeBreaker(
        state=BreakerState(node.breaker_state),
        cause=IncidentKind(node.breaker_cause) if node.breaker_cause else None,
        since_s=node.breaker_since.timestamp() if node.breaker_since else 0.0,
        probe_at_s=node.probe_at.timestamp() if node.probe_at else None,
        trip_count=node.trip_count,
        tripped_s=node.tripped_at.timestamp() if node.tripped_at else None,
    )


def _evaluate_node(node: Node) -> None:
    now_s = timezone.now().timestamp()
    stood = breaker_of(node)
    match stood.state:
        case BreakerState.HEALTHY:
            _evaluate_locked(node)
        case BreakerState.QUARANTINED if stood.cause is IncidentKind.STUCK:
            if not _unreleased_tasks(node).exists():
                _save_breaker(node, node_breaker.end_stuck(stood, now_s), "The stuck task is gone.")
        case BreakerState.QUARANTINED:
            due = node_breaker.start_probation_if_due(stood, now_s)
            _save_breaker(node, due, "It is probed with one job.")
        case BreakerState.PROBATION if node.probation_attempt is not None:
            tasks = list(Task.objects.filter(node=node, attempt=node.probation_attempt))
            if any(map(_has_succeeded, tasks)):
                _save_breaker(node, node_breaker.close_breaker(stood, now_s), "The probe job succeeded.")
            elif all(map(_is_settled, tasks)):  # no evidence about the node: the next attempt decides
                node.probation_attempt = None
                node.save(update_fields=["probation_attempt"])
                trigger_cycle("trust")


def _evaluate_locked(node: Node) -> None:
    """Evaluate the incidents of a locked node and store the result."""
    now = timezone.now()
    recent = NodeIncident.objects.filter(node=node, at__gt=now - _WINDOW).select_related("job")
    rows = list(recent[:_MAX_INCIDENTS_READ])
    incidents = [
        Incident(
            row.at.timestamp(),
            IncidentKind(row.kind),
            row.job.public_id if row.job else "",
            str(row.job.owner_id) if row.job else "",
            str(row.peer_id or ""),
        )
        for row in rows
    ]
    failed_jobs = {each.job for each in incidents if each.kind in node_breaker.JOB_INCIDENTS}
    several = len(failed_jobs) >= node_breaker.MIN_FAILED_JOBS
    owners = {row.job.owner_id for row in rows if row.job is not None}
    probation_job = Job.objects.filter(attempts=node.probation_attempt_id).first()
    new = node_breaker.evaluate(
        breaker_of(node),
        incidents,
        now_s=now.timestamp(),
        last_success_s=_last_success_s(node, now) if several else None,
        owners_healthy_elsewhere=_owners_healthy_elsewhere(node, owners, now) if several else (),
        probation_job=probation_job.public_id if probation_job else "",
        may_quarantine=_may_quarantine(node),
    )
    last = next((row.message for row in rows if row.kind == (new.cause or "")), "")
    _save_breaker(node, new, last)


def _last_success_s(node: Node, now: dt.datetime) -> float | None:
    """Return when a job last succeeded on a node: completed, or ran long enough."""
    rows = Task.objects.filter(node=node, running_at__isnull=False).order_by("-pk")[:_MAX_INCIDENTS_READ]
    well = [(task.ended_at or now) for task in rows if task.state == AttemptState.COMPLETED]
    well += [
        task.running_at + _EARLY_FAILURE
        for task in rows
        if task.running_at and _run_time(task) > _EARLY_FAILURE
    ]
    return max((moment.timestamp() for moment in well), default=None)


def _owners_healthy_elsewhere(node: Node, owners: Iterable[int], now: dt.datetime) -> set[str]:
    """Return those owners whose jobs succeeded on another node within the window."""
    rows = Task.objects.filter(attempt__job__owner__in=owners, running_at__isnull=False).exclude(node=node)
    long = Q(ended_at__isnull=True, running_at__lte=now - _EARLY_FAILURE) | Q(
        ended_at__gt=F("running_at") + _EARLY_FAILURE
    )
    recent = rows.filter(Q(ended_at__isnull=True) | Q(ended_at__gt=now - _WINDOW))
    well = recent.filter(long | Q(state=AttemptState.COMPLETED.value))
    return {str(owner) for owner in well.values_list("attempt__job__owner_id", flat=True).distinct()}


def _may_quarantine(node: Node) -> bool:
    """Allow a third of a pool's nodes, and at least one, in quarantine.

    If more nodes are affected, the nodes are unlikely to be the cause.
    """
    others = Node.objects.filter(pool=node.pool_id).exclude(state=NodeState.RETIRED.value)
    count = others.aggregate(
        every=Count("pk"),
        quarantined=Count("pk", filter=~Q(breaker_state=BreakerState.HEALTHY.value) & ~Q(pk=node.pk)),
    )
    return bool(count["quarantined"] + 1 <= max(1, count["every"] // 3))


def _has_succeeded(task: Task) -> bool:
    return task.state == AttemptState.COMPLETED or _run_time(task) > _EARLY_FAILURE


def _run_time(task: Task) -> dt.timedelta:
    now = timezone.now()
    return (task.ended_at or now) - (task.running_at or now)


def _is_settled(task: Task) -> bool:
    """Return True if the task is gone and its failure, if any, would have been reported by now."""
    return task.container_removed and (
        task.ended_at is None or timezone.now() - task.ended_at > _REPORT_DELAY
    )


def _unreleased_tasks(node: Node) -> Any:
    asked = Q(attempt__stop_requested_at__isnull=False) | Q(eviction_requested_at__isnull=False)
    return Task.objects.filter(asked, node=node, container_removed=False)


def _save_breaker(node: Node, new: NodeBreaker, message: str, actor: User | None = None) -> None:
    """Store the breaker of a locked node with audit row and event, if it changed."""
    if new == breaker_of(node):
        return
    before = _audit_values(node)
    node.breaker_state, node.breaker_cause = new.state.value, new.cause.value if new.cause else ""
    # visible to all users, so without the messages of single incidents, which may name jobs
    node.breaker_message = node_breaker.CAUSE_MESSAGES[new.cause] if new.cause else ""
    node.breaker_since = dt.datetime.fromtimestamp(new.since_s, dt.UTC)
    node.probe_at = _to_datetime(new.probe_at_s)
    node.trip_count, node.tripped_at = new.trip_count, _to_datetime(new.tripped_s)
    node.probation_attempt = None
    node.save(update_fields=_BREAKER_FIELDS)
    record_action(actor, "node.breaker", node, before=before, after=_audit_values(node), reason=message)
    publish_on_commit("cluster", {"kind": "node", "node": node.public_id, "trust": node.breaker_state})
    trigger_cycle("trust")


_BREAKER_FIELDS = (
    "breaker_state",
    "breaker_cause",
    "breaker_message",
    "breaker_since",
    "probe_at",
    "trip_count",
    "tripped_at",
    "probation_attempt",
)


def _audit_values(node: Node) -> dict[str, Any]:
    return {
        "state": node.breaker_state,
        "cause": node.breaker_cause,
        "probe_at": node.probe_at.isoformat() if node.probe_at else None,
    }


def _to_datetime(at_s: float | None) -> dt.datetime | None:
    return None if at_s is None else dt.datetime.fromtimestamp(at_s, dt.UTC)
