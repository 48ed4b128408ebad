"""Opens the terminals that people asked for on a node: the node is asked once, and what it says is written down."""

from __future__ import annotations

from django.conf import settings

from agents.engines.contract import Refused, TaskKey, Unknown
from portal.models import Terminal
from portal.services.sealing import CannotOpen
from portal.services.terminals import record_listening, record_refused, terminal_secret
from scheduler.dispatch import Door

_TOO_OLD = "The agent on this node is too old to open terminals; an administrator can upgrade it."
_NO_ANSWER = "The node did not answer. Try again in a moment."
_UNSEALED = "What was asked for cannot be read any more. Try again."


def open_terminal(door: Door, terminal: Terminal) -> None:
    """Has the node open it. One that was asked for twice is open twice there, and one ends when nobody enters it.

    Raises Unknown when no answer came.
    """
    if not door.engine.opens_terminals:
        record_refused(terminal, _TOO_OLD)
        return
    attempt = terminal.task.attempt
    try:
        port = door.engine.terminal(
            TaskKey(attempt.job.public_id, attempt.number, terminal.task.rank),
            secret=terminal_secret(terminal),
            cols=terminal.cols,
            rows=terminal.rows,
            idle_s=settings.TERMINAL_IDLE_S,
        )
    except Refused as refusal:
        record_refused(terminal, refusal.message)
    except CannotOpen:
        record_refused(terminal, _UNSEALED)
    except Unknown:
        record_refused(terminal, _NO_ANSWER)
        raise
    else:
        record_listening(terminal, port)
