"""Records whether the server of a workspace or service answers."""

from __future__ import annotations

from django.db import transaction
from django.utils import timezone

from portal.domain.states import AttemptState
from portal.domain.stored_texts import stored_text
from portal.models import Attempt
from portal.services.lifecycle.state_events import record_event
from portal.services.lifecycle.transitions import announce_replica


def record_attempt_ready(attempt_id: int) -> None:
    """Record that the server of a workspace or service answered, so that it can be used."""
    with transaction.atomic():
        attempt = Attempt.objects.select_for_update(no_key=True).get(pk=attempt_id)
        if attempt.ready_at is None and attempt.state == AttemptState.RUNNING:
            attempt.ready_at = timezone.now()
            attempt.save(update_fields=["ready_at"])
            record_event(attempt, "ready", "ready", stored_text("Its server responds."))
            announce_replica(attempt.job)


def record_attempt_responsive(attempt_id: int, responsive: bool) -> None:
    """Record that the server of a replica that was ready stopped or started answering again. Repeatable."""
    with transaction.atomic():
        attempt = Attempt.objects.select_for_update(no_key=True).get(pk=attempt_id)
        if (attempt.unresponsive_since is None) is responsive or attempt.state != AttemptState.RUNNING:
            return
        attempt.unresponsive_since = None if responsive else timezone.now()
        attempt.save(update_fields=["unresponsive_since"])
        kind, message = (
            ("ready", stored_text("Its server responds again."))
            if responsive
            else ("unresponsive", stored_text("Its server does not respond."))
        )
        record_event(attempt, kind, kind, message)
        announce_replica(attempt.job)
