"""Signals that people send to running jobs: asked for here, sent by the actors of the nodes, each once at most."""

from __future__ import annotations

import datetime as dt

from django.db import transaction
from django.db.models import Q
from django.db.models.functions import Now
from django.utils import timezone

from portal.access import Verb, require
from portal.errors import Conflict, Invalid
from portal.events import announce_all
from portal.models import Attempt, Job, SentSignal, Task, User
from portal.services.audit import record_act
from portal.services.moves import attempt_event, news_of_attempt
from portal.services.node_acts import ORDERS
from portal.wake import hint_nodes
from portal.words.sent_signals import SEND_WITHIN_S, SIGNALS
from portal.words.states import AttemptState


def do_send_signal(actor: User, job: Job, name: str) -> list[SentSignal]:
    """Sends a signal to every rank of a job that runs, by its present attempt only.

    Raises Invalid for one that people may not send, Conflict when the job does not run or is stopping.
    """
    require(actor, Verb.CONTROL, job)
    if name not in SIGNALS:
        raise Invalid(fields={"signal": f"Must be one of {', '.join(SIGNALS)}."})
    with transaction.atomic():
        attempts = job.attempts.select_for_update(no_key=True).select_related("job")
        attempt = attempts.filter(state=AttemptState.RUNNING.value, stop_wanted_at__isnull=True).first()
        if attempt is None:
            raise Conflict("It does not run, so there is nothing to send a signal to.", code="not_running")
        running = Task.objects.filter(attempt=attempt, state=AttemptState.RUNNING.value, gone=False)
        nodes = dict(running.order_by("node_id").values_list("node_id", "node__public_id").distinct())
        rows = [SentSignal(attempt=attempt, node_id=node, signal=name, actor=actor) for node in nodes]
        SentSignal.objects.bulk_create(rows)
        record_act(actor, "job.signal", job, after={"signal": name, "attempt": attempt.number})
        sentence = f"{actor.username} sent {name} to {'it' if running.count() == 1 else 'all its ranks'}."
        _tell(attempt, sentence, actor.username)
        hint_nodes(dict.fromkeys(nodes.values(), (ORDERS, "")))
    return rows


# -- the engine ------------------------------------------------------------------------------------


def nodes_with_signals() -> list[str]:
    """Public ids of the nodes to which a signal is to be sent, whatever became of its hint."""
    return list(SentSignal.objects.filter(_due()).values_list("node__public_id", flat=True).distinct())


def take_signals(node_id: int) -> list[SentSignal]:
    """The signals to send on a node now. Each is given once: one whose sending broke off is not sent again."""
    with transaction.atomic():
        rows = SentSignal.objects.select_for_update(no_key=True, of=("self",)).filter(_due(), node_id=node_id)
        found = list(rows.select_related("attempt__job", "node").order_by("id"))
        SentSignal.objects.filter(pk__in=[row.pk for row in found]).update(sent_at=timezone.now())
    return found


def record_signal(row: SentSignal, refusal: str = "") -> None:
    """The node sent it on, or says why it did not."""
    with transaction.atomic():
        SentSignal.objects.filter(pk=row.pk).update(answered_at=timezone.now())
        if refusal:
            sentence = f"{row.signal} did not reach its ranks on {row.node.name}: {refusal}"
            _tell(row.attempt, sentence)


def _due() -> Q:
    """Of attempts that still run: a signal is for what runs now, never for the next try."""
    return Q(
        sent_at__isnull=True,
        asked_at__gt=Now() - dt.timedelta(seconds=SEND_WITHIN_S),
        attempt__state=AttemptState.RUNNING.value,
        attempt__stop_wanted_at__isnull=True,
    )


def _tell(attempt: Attempt, sentence: str, actor: str = "") -> None:
    attempt_event(attempt, "signal", "", "", "", sentence, actor).save()
    announce_all([news_of_attempt(attempt, "signal", sentence)])
