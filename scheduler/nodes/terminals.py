"""Opens the terminals that users requested: sends one request to the node and records the answer."""

from __future__ import annotations

from django.conf import settings

from agents import verbs
from agents.engines.replies import AgentError, OutcomeUnknownError, TaskKey, read_port
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
    verb = verbs.STREAMS if for_ssh else verbs.TERMINAL
    if not engine.supports(verb):
        record_open_failure(terminal, _TOO_OLD)
        return
    attempt = terminal.task.attempt
    key = TaskKey(attempt.job.public_id, attempt.number, terminal.task.rank)
    try:
        secret = terminal_secret(terminal)
        size = {"cols": terminal.cols, "rows": terminal.rows, "idle_s": settings.TERMINAL_IDLE_S}
        port = engine.request(verb, read_port, **vars(key), secret=secret, **({} if for_ssh else size))
    except AgentError as refusal:
        record_open_failure(terminal, refusal.message)
    except DecryptionError:
        record_open_failure(terminal, _UNREADABLE)
    except OutcomeUnknownError:
        record_open_failure(terminal, _NO_ANSWER)
        raise
    else:
        record_listening(terminal, port)
