"""Opens the terminals that users requested: sends one request to the node and records the answer."""

from __future__ import annotations

from django.conf import settings

from agents.engines.replies import AgentError, OutcomeUnknownError, TaskKey
from portal.models import Terminal
from portal.services.encryption import DecryptionError
from portal.services.workspaces.terminals import record_listening, record_open_failure, terminal_secret
from scheduler.nodes.node_connection import NodeConnection

_TOO_OLD = "The agent on this node is too old to open terminals; an administrator can upgrade it."
_NO_ANSWER = "The node did not answer. Try again in a moment."
_UNREADABLE = "The request can no longer be read. Try again."


def open_terminal(connection: NodeConnection, terminal: Terminal) -> None:
    """Open a terminal on the node. Repeated requests may open a second one; unused ones end by time-out.

    Raise OutcomeUnknownError when no answer came.
    """
    engine, for_ssh = connection.engine, terminal.token_id is not None
    if not (engine.supports_streams if for_ssh else engine.supports_terminals):
        record_open_failure(terminal, _TOO_OLD)
        return
    attempt = terminal.task.attempt
    key = TaskKey(attempt.job.public_id, attempt.number, terminal.task.rank)
    try:
        secret = terminal_secret(terminal)
        if for_ssh:
            port = engine.open_streams(key, secret=secret)
        else:
            port = engine.open_terminal(
                key,
                secret=secret,
                cols=terminal.cols,
                rows=terminal.rows,
                idle_s=settings.TERMINAL_IDLE_S,
            )
    except AgentError as refusal:
        record_open_failure(terminal, refusal.message)
    except DecryptionError:
        record_open_failure(terminal, _UNREADABLE)
    except OutcomeUnknownError:
        record_open_failure(terminal, _NO_ANSWER)
        raise
    else:
        record_listening(terminal, port)
