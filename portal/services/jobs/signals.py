"""Signals from users to running jobs: requested here, sent by node actors at most once."""

from __future__ import annotations

import datetime as dt

from django.db import transaction
from django.db.models import Q
from django.db.models.functions import Now
from django.utils import timezone
from django.utils.translation import gettext as _

from portal.access import Permission, require_permission
from portal.domain.jobs.signals import SIGNAL_TTL_S, SIGNALS
from portal.domain.nodes.node_operations import OPERATIONS
from portal.domain.states import AttemptState
from portal.domain.stored_texts import stored_text
from portal.errors import Conflict, InvalidRequest
from portal.models import Job, JobSignal, Task, User
from portal.outbox import notify_nodes
from portal.services.audit import record_action
from portal.services.lifecycle.state_events import record_event


def do_send_signal(actor: User, job: Job, name: str) -> list[JobSignal]:
    """Send a signal to every rank of the job's present attempt.

    Raise InvalidRequest for a signal that is not allowed, Conflict if the job does not run or is stopping.
    """
    require_permission(actor, Permission.CONTROL, job)
    if name not in SIGNALS:
        raise InvalidRequest(
            fields={"signal": _("Must be one of {signals}.").format(signals=", ".join(SIGNALS))}
        )
    with transaction.atomic():
        attempts = job.attempts.select_for_update(no_key=True).select_related("job")
        attempt = attempts.filter(state=AttemptState.RUNNING.value, stop_requested_at__isnull=True).first()
        if attempt is None:
            raise Conflict(_("It is not running and cannot receive signals."), code="not_running")
        running = Task.objects.filter(
            attempt=attempt, state=AttemptState.RUNNING.value, container_removed=False
        )
        nodes = dict(running.order_by("node_id").values_list("node_id", "node__public_id").distinct())
        rows = [JobSignal(attempt=attempt, node_id=node, signal=name, actor=actor) for node in nodes]
        JobSignal.objects.bulk_create(rows)
        record_action(actor, "job.signal", job, after={"signal": name, "attempt": attempt.number})
        message = stored_text(
            f"{actor.username} sent {name} to {'it' if running.count() == 1 else 'all its ranks'}."
        )
        record_event(attempt, "signal", "", message, actor.username)
        notify_nodes(dict.fromkeys(nodes.values(), (OPERATIONS, "")))
    return rows


# -- for the scheduler -----------------------------------------------------------------------------


def nodes_with_signals() -> list[str]:
    """Return the public ids of nodes with signals to send, even if their notification was lost."""
    return list(JobSignal.objects.filter(_is_due()).values_list("node__public_id", flat=True).distinct())


def claim_signals(node_id: int) -> list[JobSignal]:
    """Return the signals to send on a node now. Each is returned once, so that none is sent twice."""
    with transaction.atomic():
        rows = JobSignal.objects.select_for_update(no_key=True, of=("self",)).filter(
            _is_due(), node_id=node_id
        )
        found = list(rows.select_related("attempt__job", "node").order_by("id"))
        JobSignal.objects.filter(pk__in=[row.pk for row in found]).update(sent_at=timezone.now())
    return found


def record_signal_delivery(row: JobSignal, refusal: str = "") -> None:
    """Record that the node delivered the signal, or why it did not."""
    with transaction.atomic():
        JobSignal.objects.filter(pk=row.pk).update(acknowledged_at=timezone.now())
        if refusal:
            message = stored_text(
                f"{row.signal} was not delivered to its ranks on {row.node.name}: {refusal}"
            )
            record_event(row.attempt, "signal", "", message)


def _is_due() -> Q:
    """Select signals of attempts that still run; a signal is never sent to a later attempt."""
    return Q(
        sent_at__isnull=True,
        requested_at__gt=Now() - dt.timedelta(seconds=SIGNAL_TTL_S),
        attempt__state=AttemptState.RUNNING.value,
        attempt__stop_requested_at__isnull=True,
    )
