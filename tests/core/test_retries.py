"""Which attempts of a job cost it a try."""

from __future__ import annotations

import pytest

from portal.domain.jobs.end_states import FREE_RENDEZVOUS_FAILURES, counted_attempts

APART = ("NODE_FAIL", "rendezvous_unreachable")


@pytest.mark.parametrize(
    ("ended", "used"),
    [
        ([], 0),
        ([("FAILED", "exit_code"), ("PREEMPTED", "reclaimed"), ("SUSPENDED", "suspended")], 1),
        ([APART] * FREE_RENDEZVOUS_FAILURES, 0),
        ([APART] * (FREE_RENDEZVOUS_FAILURES + 2) + [("FAILED", "start_refused")], 3),
    ],
)
def test_disconnected_nodes_are_avoided_together_for_a_while(ended, used) -> None:
    assert counted_attempts(ended) == used
