"""Stores the input of failed cycles for replay."""

from __future__ import annotations

import datetime as dt
import gzip
import logging

from django.db import transaction
from django.utils import timezone

from portal.models import ClusterSettings, FailedCycle
from scheduler import leases
from scheduler.core.model.policy import PolicyError
from scheduler.core.model.serialization import case_to_json
from scheduler.core.model.validation import SnapshotError
from scheduler.counters import count_failed_cycle
from scheduler.leases import HeldLease
from scheduler.snapshot.decision_input import DecisionInput

log = logging.getLogger(__name__)

MAX_KEPT = 20
RETENTION = dt.timedelta(days=30)


def save_failed_cycle(
    leader: HeldLease, settings: ClusterSettings, inputs: DecisionInput | None, error: Exception, trigger: str
) -> str:
    """Save the failed cycle, or count it when it repeats the previous failure; return the alert message.

    Raise LeaseLostError when another scheduler leads.
    """
    kind, field, message = _describe_error(error)
    log.error("a scheduling cycle failed: %s", message, exc_info=error)
    now = timezone.now()
    with transaction.atomic():
        leases.check(leader)
        count_failed_cycle()
        newest = FailedCycle.objects.defer("content").order_by("-id").first()
        if newest is not None and settings.scheduler_alert and newest.message == message:
            newest.repeat_count, newest.last_at = newest.repeat_count + 1, now
            newest.save(update_fields=["repeat_count", "last_at"])
            return message
        content = _serialize_inputs(inputs, settings)
        FailedCycle.objects.create(
            first_at=now,
            last_at=now,
            kind=kind,
            field=field[:300],
            message=message,
            trigger=trigger[:40],
            content=content,
            size_bytes=len(content),
        )
        delete_old_failed_cycles()
    return message


def delete_old_failed_cycles() -> None:
    """Delete all but the newest ``MAX_KEPT`` failed cycles within ``RETENTION``."""
    kept = FailedCycle.objects.filter(last_at__gt=timezone.now() - RETENTION).order_by("-id")
    FailedCycle.objects.exclude(pk__in=list(kept.values_list("pk", flat=True)[:MAX_KEPT])).delete()


def _describe_error(error: Exception) -> tuple[str, str, str]:
    """Return the kind, the field and the message for administrators."""
    match error:
        case SnapshotError():
            kind, field, what, why = "snapshot", error.field, "The snapshot is invalid", str(error)
        case PolicyError():
            kind, field, what, why = "policy", error.field, "A policy setting is invalid", str(error)
        case _:
            kind, field, what = "fault", "", "The decision failed with"
            why = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return kind, field, f"{what}: {why[:900].rstrip('.')}."


def _serialize_inputs(inputs: DecisionInput | None, settings: ClusterSettings) -> bytes:
    """Return the snapshot and policy settings as gzip JSON; empty when they cannot be serialized."""
    snapshot = inputs.snapshot if inputs else None
    pool_settings = inputs.policy.settings() if inputs else settings.policy
    try:
        return gzip.compress(case_to_json(snapshot, pool_settings).encode(), mtime=0)
    except (TypeError, ValueError, RecursionError) as error:
        log.warning("the failed cycle could not be saved for replay: %s", error)
        return b""
