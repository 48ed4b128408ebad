"""The periodic pass that finds what was forgotten: deadlines, lost hints, silent nodes, old rows."""

from __future__ import annotations

import datetime as dt
import logging

from django.db import transaction
from django.db.models.functions import Now
from django.utils import timezone

from portal.models import Attempt, BrowserSession, Cycle, Forecast, Node, Outbox, Question, Task
from portal.selectors.time_limits import limited
from portal.services import lifecycle, node_acts, nodes, reservations, restored, time_limits, trust
from portal.services.dependencies import cancel_dependents
from portal.services.idempotency import forget_old_keys
from portal.services.logs import remove_old_logs
from portal.services.terminals import forget_old_terminals
from portal.wake import send_hints
from portal.words.amounts import span
from portal.words.reasons import EndReason, end_sentence
from portal.words.states import AttemptState, JobKind, NodeState
from scheduler.failed import drop_old_failures
from scheduler.forecasts import FORECASTS_KEPT, score_started

log = logging.getLogger(__name__)

READY_WITHIN_S = 120
SILENT_AFTER_S = 45
UNSENT_AFTER_S = 20
GANG_WAITS_S = 20
"""So long a gang waits for a node that does not answer, before those of it that are ready are undone."""
OUTBOX_AFTER_S = 1
OUTBOX_KEPT = dt.timedelta(hours=1)
CYCLES_KEPT = dt.timedelta(days=14)
QUESTIONS_KEPT = dt.timedelta(hours=1)
TRIMMED_AT_ONCE = 20_000


def sweep() -> None:
    """One pass. Each part stands alone and can be repeated."""
    end_overdue()
    time_limits.warn_before_ends()
    time_limits.drop_lapsed()
    end_never_ready()
    end_unsent_on_silent_nodes()
    end_gangs_on_silent_nodes()
    mark_silent_nodes()
    node_acts.give_up_overdue()
    node_acts.tidy_nodes()
    trust.look_again()
    reservations.clear_begun()
    restored.end_looking()
    cancel_dependents()
    score_started()


def end_overdue() -> None:
    """Stops attempts that have run for their time limit."""
    rows = limited().filter(ends_at__lt=Now())
    for attempt, seconds in rows.values_list("pk", "job__time_limit_s"):
        sentence = end_sentence(EndReason.TIME_LIMIT, limit=span(seconds or 0))
        lifecycle.want_stop(attempt, EndReason.TIME_LIMIT, sentence=sentence)


def end_never_ready() -> None:
    """Stops workspaces whose server has not answered in time."""
    rows = Attempt.objects.filter(
        state=AttemptState.RUNNING.value,
        stop_wanted_at__isnull=True,
        ready_at__isnull=True,
        job__kind=JobKind.WORKSPACE.value,
        running_at__lt=Now() - dt.timedelta(seconds=READY_WITHIN_S),
    )
    # a node that cannot be asked says nothing about the server on it
    for attempt in rows.exclude(task_rows__node__reachable=False).values_list("pk", flat=True):
        sentence = end_sentence(EndReason.NEVER_READY, seconds=READY_WITHIN_S)
        lifecycle.want_stop(attempt, EndReason.NEVER_READY, sentence=sentence)


def end_unsent_on_silent_nodes() -> None:
    """Frees the GPUs of attempts that no start command ever left for, when a node of theirs is away."""
    rows = Attempt.objects.filter(
        state=AttemptState.CONFIGURING.value,
        stop_wanted_at__isnull=True,
        sent_at__isnull=True,
        created_at__lt=Now() - dt.timedelta(seconds=UNSENT_AFTER_S),
        task_rows__node__reachable=False,
    )
    for attempt in rows.distinct().select_related("job"):
        away = Node.objects.filter(task_rows__attempt=attempt, reachable=False).first()
        if away is not None:
            sentence = end_sentence(EndReason.START_REFUSED, node=away.name, detail="it does not answer.")
            lifecycle.want_stop(attempt.pk, EndReason.START_REFUSED, sentence=sentence)


def end_gangs_on_silent_nodes() -> None:
    """Stops gangs that cannot begin as one, because a node of theirs is away before its task runs.

    What the other nodes prepared or began ends there; what the silent one may hold stays held until it answers.
    """
    rows = Task.objects.filter(
        attempt__together=True,
        attempt__state=AttemptState.CONFIGURING.value,
        attempt__stop_wanted_at__isnull=True,
        attempt__sent_at__isnull=False,
        state=AttemptState.CONFIGURING.value,
        node__reachable=False,
        node__unreachable_since__lt=Now() - dt.timedelta(seconds=GANG_WAITS_S),
    )
    for attempt, node in rows.values_list("attempt_id", "node__name"):
        sentence = end_sentence(EndReason.START_REFUSED, node=node, detail="it does not answer.")
        lifecycle.want_stop(attempt, EndReason.START_REFUSED, sentence=sentence)


def mark_silent_nodes() -> None:
    """Marks nodes that no worker has heard from, also when no worker lives to say so."""
    rows = Node.objects.filter(
        reachable=True, last_seen_at__lt=Now() - dt.timedelta(seconds=SILENT_AFTER_S)
    ).exclude(state=NodeState.RETIRED.value)
    for node in rows:
        nodes.record_unreachable(node.pk, f"Nobody has heard from it for {SILENT_AFTER_S} s.")


def send_outbox() -> int:
    """Sends the hints whose message was lost; gives how many went out."""
    with transaction.atomic():
        rows = (
            Outbox.objects.select_for_update(skip_locked=True)
            .filter(sent_at__isnull=True, created_at__lt=Now() - dt.timedelta(seconds=OUTBOX_AFTER_S))
            .order_by("id")[:500]
        )
        return send_hints(list(rows))


def trim() -> None:
    """Deletes rows that nobody will look at again, a bounded number at a time."""
    now = timezone.now()
    for rows in (
        Outbox.objects.filter(sent_at__lt=now - OUTBOX_KEPT),
        Cycle.objects.filter(started_at__lt=now - CYCLES_KEPT),
        Forecast.objects.filter(made_at__lt=now - FORECASTS_KEPT),
        Question.objects.filter(asked_at__lt=now - QUESTIONS_KEPT),
    ):
        ids = list(rows.order_by("pk").values_list("pk", flat=True)[:TRIMMED_AT_ONCE])
        rows.model._default_manager.filter(pk__in=ids).delete()
    BrowserSession.objects.filter(expire_date__lt=now).delete()
    drop_old_failures()
    trust.forget_old_troubles()
    node_acts.forget_old_acts()
    forget_old_keys()
    forget_old_terminals()
    remove_old_logs()
