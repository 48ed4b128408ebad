"""Which attempts of a job cost it a try."""

from __future__ import annotations

import pytest

from portal.words.ends import UNCHARGED, tries_used

APART = ("NODE_FAIL", "nodes_apart")


@pytest.mark.parametrize(
    ("ended", "used"),
    [
        ([], 0),
        ([("FAILED", "exit_code"), ("PREEMPTED", "reclaimed"), ("SUSPENDED", "suspended")], 1),
        ([APART] * UNCHARGED, 0),
        ([APART] * (UNCHARGED + 2) + [("FAILED", "start_refused")], 3),
    ],
)
def test_nodes_that_do_not_reach_each_other_cost_none_for_a_while(ended, used) -> None:
    assert tries_used(ended) == used
