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

from portal.after_commit import send_after_commit
from portal.config.celery import app
from portal.killpoints import killpoint
from portal.models import Outbox
from portal.valkey import PAUSE, note_trouble, valkey

log = logging.getLogger(__name__)

ASKED_WITHIN_S = 1.0
"""How long an answer of the broker is waited for."""


def wake(cause: str) -> None:
    """Asks for a scheduling cycle after the current transaction; ``cause`` is a word for the cycle's row."""
    leave_hint("scheduler.cycle", [cause], "cycle")


def hint_node(node: str, verb: str, what: str = "") -> None:
    """Asks the actor of a node (public id) to look at its work; ``verb`` says at what first."""
    hint_nodes({node: (verb, what)})


def hint_nodes(hints: Mapping[str, tuple[str, str]]) -> None:
    """The same for several nodes at once: verb and what for each."""
    rows = [
        Outbox(name="scheduler.node_hint", arguments=[node, *hint], queue="nodes")
        for node, hint in hints.items()
    ]
    _leave(rows)


def leave_hint(task: str, arguments: list[str], queue: str) -> None:
    """Writes an outbox row with the transaction and sends its message after commit."""
    _leave([Outbox(name=task, arguments=arguments, queue=queue)])


def _leave(rows: list[Outbox]) -> None:
    if rows:
        Outbox.objects.bulk_create(rows)
        send_after_commit(send_hints, rows)


def send_hints(rows: Sequence[Outbox]) -> int:
    """Sends outbox rows in order until one does not go (the sweep tries again); gives how many went."""
    sent = list(itertools.takewhile(_send, rows))
    if sent:
        Outbox.objects.filter(pk__in=[row.pk for row in sent]).update(sent_at=timezone.now())
    return len(sent)


def _send(row: Outbox) -> bool:
    """Sends one message; False when the broker is away, or was silent just now: the row stays in the outbox."""
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
        log.warning("the hint %s was not sent: %s", row.name, problem)
        return False
    killpoint("hint.sent")
    return True


def hints_wait(queue: str) -> bool:
    """True when messages of a queue wait to be read; False when the broker does not say."""
    if PAUSE:
        return False
    try:
        return bool(valkey(ASKED_WITHIN_S).llen(queue))
    except (RedisError, OSError) as problem:
        note_trouble(problem)
        return False
