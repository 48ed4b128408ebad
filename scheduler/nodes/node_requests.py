"""Asks a node for what the portal waits for, and records why it did not answer."""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable
from typing import NamedTuple, TypeVar

from agents.engines.replies import AgentError, InvalidReplyError, OutcomeUnknownError
from agents.verbs import Verb
from scheduler.nodes.node_connection import NodeConnection

log = logging.getLogger(__name__)
T = TypeVar("T")
TOO_OLD = "The agent on this node is too old. Upgrade it."


class UnknownOutcome(enum.Flag):
    """Why it is unknown whether a node executed a request."""

    NONE = 0
    CLOSED = enum.auto()
    """The connection ended."""
    INVALID = enum.auto()
    """The reply violates the protocol."""
    LATE = enum.auto()
    """No reply came in time, and the connection is open."""
    ANY = CLOSED | INVALID | LATE


class Problem(NamedTuple):
    """Why there is no answer. ``code``: of the refusal; blank: the outcome is unknown."""

    message: str
    code: str = ""

    def __str__(self) -> str:
        return f"{self.code}: {self.message}" if self.code else self.message


def ask(
    connection: NodeConnection,
    verb: Verb,
    request: Callable[[], T],
    record_problem: Callable[[Problem], None],
    *,
    too_old: str = TOO_OLD,
    no_answer: str = "",
    recorded: UnknownOutcome = UnknownOutcome.ANY,
    raised: UnknownOutcome = UnknownOutcome.ANY,
) -> T | None:
    """Return the answer of a node; otherwise record why there is none, and return None.

    - An agent without ``verb`` is not asked; ``too_old`` is recorded.
    - A refusal, also an AgentError that ``request`` raises before it sends anything, is recorded.
    - An unknown outcome is recorded if it is one of ``recorded``, as ``no_answer`` or else with its reason, and
      raised again if it is one of ``raised``: the actor then opens another connection.
    """
    if not connection.engine.supports(verb):
        record_problem(Problem(too_old, "agent_too_old"))
        return None
    try:
        return request()
    except AgentError as error:
        log.info("%s refused %s: %s", connection.node.name, verb.name, error)
        record_problem(Problem(error.message, error.code))
    except OutcomeUnknownError as error:
        log.info("%s did not answer %s: %s", connection.node.name, verb.name, error)
        why = _reason(connection, error)
        if why in recorded:
            record_problem(Problem(no_answer or str(error)))
        if why in raised:
            raise
    return None


def _reason(connection: NodeConnection, error: OutcomeUnknownError) -> UnknownOutcome:
    if not connection.engine.is_open:
        return UnknownOutcome.CLOSED
    return UnknownOutcome.INVALID if isinstance(error, InvalidReplyError) else UnknownOutcome.LATE
