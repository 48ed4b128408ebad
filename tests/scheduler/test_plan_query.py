"""Questions about pipeline plans, as worker-ask answers them."""

from __future__ import annotations

import pytest

from portal.models import EngineQuery
from scheduler.what_if import answer_query
from tests.factories import LAYERS

pytestmark = pytest.mark.django_db(transaction=True)


def answered(kind: str, body: dict) -> dict:
    question = EngineQuery.objects.create(kind=kind, body=body)
    answer_query(question.public_id)
    question.refresh_from_db()
    return question.answer


def test_a_profile_and_its_plans_need_no_cluster() -> None:
    assert len(answered("profile", {"profile": LAYERS})["layers"]) == 6
    plan = answered("plan", {"profile": LAYERS, "levels": [[2, 1e10], [2, 1e9]], "memory_bytes": None})
    assert plan["gpus"] == 4
    ranks = [rank for stage in plan["stages"] for rank in stage["ranks"]]
    assert sorted(ranks) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("changed", "memory_bytes", "invalid", "message"),
    [
        ({"colour": 1}, None, "profile", "unknown key 'colour'"),
        ({}, 1.0, "topology", "bytes per GPU"),
    ],
)
def test_an_impossible_plan_has_a_reason(changed, memory_bytes, invalid, message) -> None:
    body = {"profile": LAYERS | changed, "levels": [[2, 1e10]], "memory_bytes": memory_bytes}
    answer = answered("plan", body)
    assert answer["invalid"] == invalid
    assert message in answer["error"]
