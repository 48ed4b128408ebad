"""Opens the terminals that users requested: sends one request to the node and records the answer."""

from __future__ import annotations

from django.conf import settings

from agents.engines.replies import AgentError, TaskKey, read_port
from agents.verbs import STREAMS, TERMINAL
from portal.models import Terminal
from portal.services.encryption import DecryptionError
from portal.services.workspaces.terminals import record_listening, record_open_failure, terminal_secret
from scheduler.nodes.node_connection import NodeConnection
from scheduler.nodes.node_requests import ask

_TOO_OLD = "The agent on this node is too old to open terminals; an administrator can upgrade it."
_NO_ANSWER = "The node did not answer. Try again in a moment."
_UNREADABLE = "The request can no longer be read. Try again."


def open_terminal(connection: NodeConnection, terminal: Terminal) -> None:
    """Open a terminal on the node. Repeated requests may open a second one; unused ones end by time-out.

    Raise OutcomeUnknownError when no answer came.
    """
    attempt, for_ssh = terminal.task.attempt, terminal.token_id is not None
    key = TaskKey(attempt.job.public_id, attempt.number, terminal.task.rank)
    size = {"cols": terminal.cols, "rows": terminal.rows, "idle_s": settings.TERMINAL_IDLE_S}
    verb, options = (STREAMS, {}) if for_ssh else (TERMINAL, size)

    def request() -> int:
        try:
            secret = terminal_secret(terminal)
        except DecryptionError as error:
            raise AgentError("unreadable", _UNREADABLE) from error
        return connection.engine.request(verb, read_port, **vars(key), secret=secret, **options)

    port = ask(
        connection,
        verb,
        request,
        lambda problem: record_open_failure(terminal, problem.message),
        too_old=_TOO_OLD,
        no_answer=_NO_ANSWER,
    )
    if port is not None:
        record_listening(terminal, port)
