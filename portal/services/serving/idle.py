"""Scales services that do not use their GPUs to zero, when the countdowns of all their replicas have ended."""

from __future__ import annotations

from django.db import transaction
from django.db.models.functions import Now

from portal.domain.states import AttemptState
from portal.models import AttemptActivity
from portal.services.jobs.idle import lock_ended_countdown
from portal.services.lifecycle.state_events import record_owner_event
from portal.services.serving.services import announce_service, live_replicas, lock_service


def scale_idle_to_zero(decided: AttemptActivity) -> bool:
    """Scale the service of a replica to zero; return False while another is used, or if anything changed."""
    with transaction.atomic():
        service = lock_service(decided.attempt.job.replica.version.service_id)
        row, message = lock_ended_countdown(decided)
        replicas = [each.job_id for each in live_replicas(service)]
        idle = AttemptActivity.objects.filter(
            attempt__job__in=replicas, attempt__state=AttemptState.RUNNING.value, suspend_at__lte=Now()
        )
        if row is None or row.inactive_since is None or service.asleep or idle.count() < len(replicas):
            return False
        if service.active_at > row.inactive_since:
            return False
        service.asleep, service.message = True, message
        service.save(update_fields=["asleep", "message"])
        record_owner_event(row.attempt, "idle_suspended", message)
        announce_service(service)
        return True
