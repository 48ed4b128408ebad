"""Finds running jobs that write nothing, report nothing and leave their GPUs idle, and notifies or ends them."""

from __future__ import annotations

import datetime as dt
from collections import defaultdict
from typing import Any

from django.db import transaction
from django.db.models import DateTimeField, F, QuerySet
from django.db.models.functions import Greatest
from django.utils import timezone

from portal.domain.formatting import format_duration
from portal.domain.jobs.reasons import EndReason, end_message
from portal.domain.scheduling.policy_settings import STALL_TIMEOUT
from portal.domain.states import AttemptState, JobKind
from portal.domain.stored_texts import stored_text
from portal.models import Allocation, Attempt, AttemptObservation, NodeMetricsMinute
from portal.selectors.scheduling.settings import effective_pool_settings
from portal.services.lifecycle import job_control
from portal.services.lifecycle.state_events import record_event, record_owner_event

CONFIRM_AFTER = dt.timedelta(seconds=60)
"""A stall counts once it is found twice, this far apart: after a restart of the portal, reports come first."""
MAX_STALLS = 500
"""Attempts handled per pass; the next pass continues."""


def detect_stalls() -> None:
    """Run one pass over running attempts. Repeatable."""
    now = timezone.now()
    rows = list(_observed_attempts())
    settings = effective_pool_settings({row.pool for row in rows}) if rows else {}
    quiet = []
    for row in rows:
        policy = settings[row.pool_id]
        timeout_s = row.job.stall_timeout_s or float(policy[STALL_TIMEOUT])
        if timeout_s and row.last_activity_at < now - dt.timedelta(seconds=timeout_s):
            quiet.append((row, float(policy["idle_gpu_percent"]), timeout_s))
        elif row.observation.stall_suspected_at is not None:
            _continue(row)
    for row, idle_percent, timeout_s in quiet[:MAX_STALLS]:
        seen: AttemptObservation = row.observation
        if not _gpus_are_idle(row, idle_percent, now):
            if seen.stall_suspected_at is not None:
                _continue(row)
        elif seen.stall_suspected_at is None:
            AttemptObservation.objects.filter(pk=row.pk).update(stall_suspected_at=now)
        elif seen.stalled_at is None and seen.stall_suspected_at <= now - CONFIRM_AFTER:
            _act(row, timeout_s, now)


def _observed_attempts() -> QuerySet[Any]:
    """Return running attempts with stall detection, on reachable nodes only, with their last activity."""
    rows = Attempt.objects.filter(
        state=AttemptState.RUNNING.value,
        stop_requested_at__isnull=True,
        job__kind=JobKind.TRAINING.value,
        running_at__isnull=False,
        observation__output_at__isnull=False,
    )
    return (
        rows.exclude(task_rows__node__reachable=False)
        .select_related("job__owner", "job__project", "pool", "observation")
        .annotate(
            last_activity_at=Greatest(
                F("running_at"),
                F("checkpoint_at"),
                F("observation__output_at"),
                F("progress__reported_at"),
                output_field=DateTimeField(),
            )
        )
        .order_by("pk")
    )


def _gpus_are_idle(row: Any, idle_percent: float, now: dt.datetime) -> bool:
    """Return True if all minutes since the last activity are known for its GPUs, and none was used.

    True for a job without GPUs; False while metrics are missing.
    """
    held = Allocation.objects.filter(task__attempt=row, ended_at__isnull=True)
    by_node: dict[int, list[str]] = defaultdict(list)
    for node, uuid in held.values_list("gpu__node_id", "gpu__uuid"):
        by_node[node].append(uuid)
    since = row.last_activity_at + dt.timedelta(minutes=1)
    minutes = NodeMetricsMinute.objects.filter(node__in=by_node, minute__gte=since)
    measured: set[int] = set()
    for node, uuids, used in minutes.values_list("node_id", "gpu_uuids", "utilisation_percent"):
        found = dict(zip(uuids, used, strict=False))
        for uuid in by_node[node]:
            percent = found.get(uuid)
            if percent is None or percent >= idle_percent:
                return False
        measured.add(node)
    return measured == set(by_node)


def _act(row: Attempt, timeout_s: float, now: dt.datetime) -> None:
    message = end_message(EndReason.STALLED, duration=format_duration(timeout_s))
    if row.job.on_stall == "end":
        job_control.request_stop(row.pk, EndReason.STALLED, message=message)
        return
    with transaction.atomic():
        if AttemptObservation.objects.filter(pk=row.pk, stalled_at__isnull=True).update(stalled_at=now):
            record_owner_event(row, "stalled", message)


def _continue(row: Attempt) -> None:
    with transaction.atomic():
        seen = AttemptObservation.objects.select_for_update().get(pk=row.pk)
        if seen.stalled_at is not None:
            record_event(row, "continues", "", stored_text("It is active again."))
        seen.stall_suspected_at = seen.stalled_at = None
        seen.save(update_fields=["stall_suspected_at", "stalled_at"])
