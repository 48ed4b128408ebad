"""Sends tasks to the scheduler by name: a row in the transaction, a message after commit (law 2).

If the message is lost, the periodic pass sends the row again. Messages are only hints, so sending one twice is
harmless.
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
from portal.on_commit import pending_items, send_after_commit
from portal.valkey.client import VALKEY_BREAKER, record_valkey_error, valkey_client

log = logging.getLogger(__name__)

BROKER_TIMEOUT_S = 1.0
"""Time limit for an answer of the broker."""
CYCLE_TASK = "scheduler.cycle"


def trigger_cycle(trigger: str) -> None:
    """Request a scheduling cycle after the current transaction; ``trigger`` is stored in the cycle's row.

    A transaction requests one for each trigger: the cycle sees all that it changed.
    """
    known = pending_items(send_outbox_rows)
    if not any(row.name == CYCLE_TASK and row.arguments == [trigger] for row in known):
        enqueue_task(CYCLE_TASK, [trigger], "cycle")


def notify_node(node: str, verb: str, subject: str = "") -> None:
    """Wake up the actor of a node (public id); ``verb`` and ``subject`` say what to check first."""
    notify_nodes({node: (verb, subject)})


def notify_nodes(messages: Mapping[str, tuple[str, str]]) -> None:
    """Wake up the actors of several nodes: verb and subject by node (public id)."""
    rows = [
        OutboxMessage(name="scheduler.notify_node", arguments=[node, *hint], queue="nodes")
        for node, hint in messages.items()
    ]
    _enqueue(rows)


def enqueue_task(task: str, arguments: list[str], queue: str) -> None:
    """Write an outbox row in the current transaction and send its message after commit."""
    _enqueue([OutboxMessage(name=task, arguments=arguments, queue=queue)])


def _enqueue(rows: list[OutboxMessage]) -> None:
    if rows:
        OutboxMessage.objects.bulk_create(rows)
        send_after_commit(send_outbox_rows, rows)


def send_outbox_rows(rows: Sequence[OutboxMessage]) -> int:
    """Send outbox rows in order until one fails; return the number sent. The periodic pass retries the rest."""
    sent = list(itertools.takewhile(_send, rows))
    if sent:
        OutboxMessage.objects.filter(pk__in=[row.pk for row in sent]).update(sent_at=timezone.now())
    return len(sent)


def _send(row: OutboxMessage) -> bool:
    """Send one message. Return False if the broker does not answer; the row stays in the outbox."""
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
            headers={"fairway_sent_s": time.time()},  # later cycles have seen the change
        )
    except (BrokerAway, RedisError, OSError) as error:
        log.warning("the message %s was not sent: %s", row.name, error)
        return False
    failpoint("hint.sent")
    return True


def has_queued_messages(queue: str) -> bool:
    """Return True if the queue has unread messages, False if it has none or the broker does not answer."""
    if VALKEY_BREAKER:
        return False
    try:
        return bool(valkey_client(BROKER_TIMEOUT_S).llen(queue))
    except (RedisError, OSError) as error:
        record_valkey_error(error)
        return False
