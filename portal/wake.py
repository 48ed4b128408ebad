"""Tells the engine by task name that there is work: a row in the transaction, a message after it (law 2).

The row is swept when the message is lost; the message is only a hint, so sending it twice is harmless.
"""

from __future__ import annotations

import logging
import time

from django.db import transaction
from django.utils import timezone
from kombu.exceptions import OperationalError as BrokerAway
from redis.exceptions import RedisError

from portal.config.celery import app
from portal.killpoints import killpoint
from portal.models import Outbox
from portal.valkey import PAUSE

log = logging.getLogger(__name__)


def wake(cause: str) -> None:
    """Asks for a scheduling cycle after the current transaction; ``cause`` is a word for the cycle's row."""
    leave_hint("scheduler.cycle", [cause], "cycle")


def hint_node(node: str, verb: str, what: str = "") -> None:
    """Asks the actor of a node (public id) to look at its work; ``verb`` says at what first."""
    leave_hint("scheduler.node_hint", [node, verb, what], "nodes")


def leave_hint(task: str, arguments: list[str], queue: str) -> None:
    """Writes an outbox row with the transaction and sends its message after commit."""
    row = Outbox.objects.create(name=task, arguments=arguments, queue=queue)
    transaction.on_commit(lambda: send_hint(row))


def send_hint(row: Outbox) -> bool:
    """Sends one outbox row; False when the broker is away, or was silent just now (the sweep tries again)."""
    killpoint("hint.before_send")
    if PAUSE:
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
        log.warning("the hint %s stays in the outbox: %s", row.name, problem)
        return False
    killpoint("hint.sent")
    Outbox.objects.filter(pk=row.pk).update(sent_at=timezone.now())
    return True
