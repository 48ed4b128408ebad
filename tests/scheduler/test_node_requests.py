"""What is recorded, and what the actor learns, when a node does not answer a request."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from agents.engines.replies import AgentError, InvalidReplyError, OutcomeUnknownError
from agents.verbs import NOTEBOOKS
from scheduler.nodes.node_requests import Problem, UnknownOutcome, ask

REFUSAL = AgentError("forbidden", "No.")
LATE, INVALID = OutcomeUnknownError("No reply."), InvalidReplyError("Nonsense.")
EACH = (UnknownOutcome.CLOSED, UnknownOutcome.INVALID, UnknownOutcome.LATE)


def asked(
    answer: object, *, open_: bool = True, able: bool = True, **options: Any
) -> tuple[object, list[Problem]]:
    """Return the answer, or the error that was raised, and what was recorded."""
    engine = SimpleNamespace(supports=lambda verb: able and verb is NOTEBOOKS, is_open=open_)
    problems: list[Problem] = []

    def request() -> object:
        assert able, "an agent without the verb is asked"
        if isinstance(answer, Exception):
            raise answer
        return answer

    connection = SimpleNamespace(engine=engine, node=SimpleNamespace(name="n1"))
    try:
        return ask(connection, NOTEBOOKS, request, problems.append, **options), problems  # type: ignore[arg-type]
    except OutcomeUnknownError as error:
        return error, problems


def test_an_answer_is_returned_and_a_refusal_recorded() -> None:
    assert asked(b"") == (b"", [])
    assert asked(REFUSAL) == (None, [Problem("No.", "forbidden")])
    assert str(Problem("No.", "forbidden")) == str(REFUSAL) and str(Problem("No reply.")) == str(LATE)
    assert asked("", able=False, too_old="Upgrade.") == (None, [Problem("Upgrade.", "agent_too_old")])


@pytest.mark.parametrize(
    ("error", "open_", "why"),
    [
        (LATE, True, UnknownOutcome.LATE),
        (INVALID, True, UnknownOutcome.INVALID),
        (LATE, False, UnknownOutcome.CLOSED),
        (INVALID, False, UnknownOutcome.CLOSED),
    ],
)
def test_an_unknown_outcome_is_recorded_and_raised_as_the_caller_wants(
    error: OutcomeUnknownError, open_: bool, why: UnknownOutcome
) -> None:
    assert asked(error, open_=open_) == (error, [Problem(str(error))])
    assert asked(error, open_=open_, no_answer="Try again.") == (error, [Problem("Try again.")])
    for each in EACH:
        recorded = asked(error, open_=open_, recorded=each, raised=UnknownOutcome.NONE)
        assert recorded == (None, [Problem(str(error))] if each is why else [])
        raised = asked(error, open_=open_, recorded=UnknownOutcome.NONE, raised=each)
        assert raised == (error if each is why else None, [])
