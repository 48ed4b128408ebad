"""Periodic pass: enforces deadlines, resends lost messages, marks unreachable nodes and deletes old rows."""

from __future__ import annotations

import datetime as dt
import logging

from django.db import transaction
from django.db.models import F
from django.db.models.functions import Now

from portal.domain.formatting import format_duration
from portal.domain.jobs.reasons import EndReason, end_message
from portal.domain.serving.model_servers import unready_message, unresponsive_message
from portal.domain.states import AttemptState, JobKind, NodeState
from portal.domain.stored_texts import stored_text
from portal.models import (
    Attempt,
    Node,
    OutboxMessage,
    Task,
)
from portal.outbox import send_outbox_rows
from portal.selectors.jobs.time_limits import attempts_with_limit
from portal.services.cluster import recovery
from portal.services.jobs import stalls, time_limits
from portal.services.jobs.code_archives import delete_unused_archives
from portal.services.jobs.dependencies import cancel_dependents
from portal.services.jobs.logs import delete_expired_logs
from portal.services.lifecycle import job_control
from portal.services.nodes import drains, network_links, nodes, operations, quarantine
from portal.services.notices.inbox import delete_old_notices
from portal.services.projects.quota_additions import record_ended_additions
from portal.services.requests.user_requests import expire_requests
from portal.services.scheduling import reservations
from portal.services.storage.data_set_sizes import repair_measurements
from portal.services.storage.storage_usage import delete_outdated_usage
from portal.services.workspaces.secret_replacement import request_replacements
from scheduler import clock
from scheduler.failed_cycles import delete_old_failed_cycles
from scheduler.forecast.forecast_store import score_started
from scheduler.retention import delete_expired_rows

log = logging.getLogger(__name__)

READY_WITHIN_S = 120
SILENT_AFTER_S = 45
UNSENT_AFTER_S = 20
GANG_NODE_WAIT_S = 20
"""A gang waits this long for an unreachable node before its prepared tasks are stopped."""
OUTBOX_AFTER_S = 1


def run_periodic_pass() -> None:
    """Run one pass; each part is independent and idempotent."""
    stop_overdue_attempts()
    time_limits.warn_before_ends()
    expire_requests()
    record_ended_additions()
    stop_unready_servers()
    request_replacements()
    stalls.detect_stalls()
    stop_unsent_on_unreachable_nodes()
    stop_gangs_on_unreachable_nodes()
    mark_unreachable_nodes()
    operations.fail_overdue_operations()
    operations.request_due_gc()
    repair_measurements()
    network_links.update_slow_nodes()
    quarantine.evaluate_breakers()
    if not clock.was_set_forward():
        reservations.drain_started_reservations()
        drains.move_saved_jobs()
    recovery.end_recovery_if_complete()
    cancel_dependents()
    score_started()


def stop_overdue_attempts() -> None:
    """Stop attempts that reached their time limit."""
    known = clock.observe()
    rows = attempts_with_limit().filter(ends_at__lt=Now()).annotate(now=Now())
    for attempt, seconds, ends_at, now in rows.values_list("pk", "job__time_limit_s", "ends_at", "now"):
        if (now - ends_at).total_seconds() > known.ahead_s(attempt):
            _stop(attempt, EndReason.TIME_LIMIT, limit=format_duration(seconds or 0))


def stop_unready_servers() -> None:
    """Stop workspaces and replicas of services whose server is not ready in time."""
    known = clock.observe()
    unready = (
        Attempt.objects.filter(
            state=AttemptState.RUNNING.value, stop_requested_at__isnull=True, ready_at__isnull=True
        )
        .exclude(task_rows__node__reachable=False)  # an unreachable node reports nothing about the server
        .annotate(now=Now())
    )
    rows = unready.filter(
        job__kind=JobKind.WORKSPACE.value, running_at__lt=Now() - dt.timedelta(seconds=READY_WITHIN_S)
    )
    for attempt, running_at, now in rows.values_list("pk", "running_at", "now"):
        if running_at and (now - running_at).total_seconds() - READY_WITHIN_S > known.ahead_s(attempt):
            _stop(attempt, EndReason.READINESS_TIMEOUT, seconds=READY_WITHIN_S)
    limit_s = F("job__replica__version__readiness_timeout_s")
    overdue = unready.filter(
        job__kind=JobKind.SERVICE.value, running_at__lt=Now() - limit_s * dt.timedelta(seconds=1)
    )
    for row in overdue.select_related("job__replica__version"):
        version = row.job.replica.version
        waited_s = (row.now - row.running_at).total_seconds() if row.running_at else 0.0
        if waited_s - version.readiness_timeout_s > known.ahead_s(row.pk):
            message = unready_message(version.port, version.readiness_path, version.readiness_timeout_s)
            job_control.request_stop(row.pk, EndReason.READINESS_TIMEOUT, message=message)
    _stop_unresponsive_replicas(known)


def _stop_unresponsive_replicas(known: clock.ClockRecord) -> None:
    """Stop replicas whose server was ready and has not answered for their liveness timeout."""
    limit_s = F("job__replica__version__liveness_timeout_s")
    rows = (
        Attempt.objects.filter(
            state=AttemptState.RUNNING.value,
            stop_requested_at__isnull=True,
            unresponsive_since__lt=Now() - limit_s * dt.timedelta(seconds=1),
        )
        .exclude(task_rows__node__reachable=False)
        .annotate(now=Now())
    )
    for row in rows.select_related("job__replica__version"):
        version = row.job.replica.version
        timeout_s = version.liveness_timeout_s or 0
        silent_s = (row.now - row.unresponsive_since).total_seconds() if row.unresponsive_since else 0.0
        if silent_s - timeout_s > known.ahead_s(row.pk):
            message = unresponsive_message(version.port, version.readiness_path, timeout_s)
            job_control.request_stop(row.pk, EndReason.READINESS_TIMEOUT, message=message)


def stop_unsent_on_unreachable_nodes() -> None:
    """End attempts that were never sent to their nodes when one of these is unreachable; frees their GPUs."""
    rows = Attempt.objects.filter(
        state=AttemptState.CONFIGURING.value,
        stop_requested_at__isnull=True,
        start_sent_at__isnull=True,
        created_at__lt=Now() - dt.timedelta(seconds=UNSENT_AFTER_S),
        task_rows__node__reachable=False,
    )
    for attempt in rows.distinct().select_related("job"):
        away = Node.objects.filter(task_rows__attempt=attempt, reachable=False).first()
        if away is not None:
            _stop(
                attempt.pk,
                EndReason.START_REFUSED,
                node=away.name,
                detail=stored_text("it does not respond."),
            )


def stop_gangs_on_unreachable_nodes() -> None:
    """Stop gangs with an unreachable node whose task does not run yet.

    Tasks on the other nodes end; GPUs on the unreachable node stay allocated until it answers.
    """
    rows = Task.objects.filter(
        attempt__gang_start=True,
        attempt__state=AttemptState.CONFIGURING.value,
        attempt__stop_requested_at__isnull=True,
        attempt__start_sent_at__isnull=False,
        state=AttemptState.CONFIGURING.value,
        node__reachable=False,
        node__unreachable_since__lt=Now() - dt.timedelta(seconds=GANG_NODE_WAIT_S),
    )
    for attempt, node in rows.values_list("attempt_id", "node__name"):
        _stop(attempt, EndReason.START_REFUSED, node=node, detail=stored_text("it does not respond."))


def _stop(attempt: int, reason: EndReason, **details: object) -> None:
    job_control.request_stop(attempt, reason, message=end_message(reason, **details))


def mark_unreachable_nodes() -> None:
    """Mark nodes silent for ``SILENT_AFTER_S`` as unreachable, also when no worker-nodes process runs."""
    rows = Node.objects.filter(
        reachable=True, last_seen_at__lt=Now() - dt.timedelta(seconds=SILENT_AFTER_S)
    ).exclude(state=NodeState.RETIRED.value)
    for node in rows:
        nodes.record_unreachable(node.pk, stored_text(f"It has not responded for {SILENT_AFTER_S} s."))


def send_outbox() -> int:
    """Resend messages that were not sent; return their number."""
    with transaction.atomic():
        rows = (
            OutboxMessage.objects.select_for_update(skip_locked=True)
            .filter(sent_at__isnull=True, created_at__lt=Now() - dt.timedelta(seconds=OUTBOX_AFTER_S))
            .order_by("id")[:500]
        )
        return send_outbox_rows(list(rows))


def delete_old_rows() -> None:
    """Delete expired rows and files, a bounded number per pass; none for an hour after the clock was set forward."""
    if clock.was_set_forward():
        return
    delete_expired_rows()
    delete_old_failed_cycles()
    delete_unused_archives()
    delete_expired_logs()
    delete_old_notices()
    delete_outdated_usage()
