"""Tells the engine by task name that there is work: a row in the transaction, a message after it (law 2).

The row is swept when the message is lost; the message is only a hint, so sending it twice is harmless.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Mapping, Sequence

from django.utils import timezone
from kombu.exceptions import OperationalError as BrokerAway
from redis.exceptions import RedisError

from portal.config.celery import app
from portal.failpoints import failpoint
from portal.models import OutboxMessage
from portal.on_commit import send_after_commit
from portal.valkey.client import VALKEY_BREAKER, record_valkey_error, valkey_client

log = logging.getLogger(__name__)

BROKER_TIMEOUT_S = 1.0
"""How long an answer of the broker is waited for."""


def trigger_cycle(trigger: str) -> None:
    """Asks for a scheduling cycle after the current transaction; ``cause`` is a word for the cycle's row."""
    enqueue_task("scheduler.cycle", [trigger], "cycle")


def notify_node(node: str, verb: str, subject: str = "") -> None:
    """Asks the actor of a node (public id) to look at its work; ``verb`` says at what first."""
    notify_nodes({node: (verb, subject)})


def notify_nodes(messages: Mapping[str, tuple[str, str]]) -> None:
    """The same for several nodes at once: verb and what for each."""
    rows = [
        OutboxMessage(name="scheduler.notify_node", arguments=[node, *hint], queue="nodes")
        for node, hint in messages.items()
    ]
    _enqueue(rows)


def enqueue_task(task: str, arguments: list[str], queue: str) -> None:
    """Writes an outbox row with the transaction and sends its message after commit."""
    _enqueue([OutboxMessage(name=task, arguments=arguments, queue=queue)])


def _enqueue(rows: list[OutboxMessage]) -> None:
    if rows:
        OutboxMessage.objects.bulk_create(rows)
        send_after_commit(send_outbox_rows, rows)


def send_outbox_rows(rows: Sequence[OutboxMessage]) -> int:
    """Sends outbox rows in order until one does not go (the sweep tries again); gives how many went."""
    sent = list(itertools.takewhile(_send, rows))
    if sent:
        OutboxMessage.objects.filter(pk__in=[row.pk for row in sent]).update(sent_at=timezone.now())
    return len(sent)


def _send(row: OutboxMessage) -> bool:
    """Sends one message; False when the broker is away, or was silent just now: the row stays in the outbox."""
    failpoint("hint.before_send")
    if VALKEY_BREAKER:
        return False
    try:
        app.send_task(
            row.name,
            args=row.arguments,
            queue=row.queue,
            retry=False,
            ignore_result=True,
            headers={"fairway_sent_s": time.time()},  # a cycle that began later has seen what this is about
        )
    except (BrokerAway, RedisError, OSError) as problem:
        log.warning("the hint %s was not sent: %s", row.name, problem)
        return False
    failpoint("hint.sent")
    return True


def has_queued_messages(queue: str) -> bool:
    """True when messages of a queue wait to be read; False when the broker does not say."""
    if VALKEY_BREAKER:
        return False
    try:
        return bool(valkey_client(BROKER_TIMEOUT_S).llen(queue))
    except (RedisError, OSError) as problem:
        record_valkey_error(problem)
        return False
