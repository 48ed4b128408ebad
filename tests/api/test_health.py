"""healthz says that the process lives, readyz which of its needs answers; neither asks who looks."""

from __future__ import annotations

import pytest
from django.db import OperationalError
from django.test import Client
from redis.exceptions import ConnectionError as RedisAway

from portal.api.cluster import health
from portal.selectors.scheduling.cycles import CycleWatch

pytestmark = pytest.mark.django_db


def test_both_answer_without_sign_in(monkeypatch):
    monkeypatch.setattr(health, "CYCLE_WATCH", CycleWatch())  # as in a process that has just started
    assert Client().get("/healthz").json() == {"ok": True}
    ready = Client().get("/readyz")
    assert ready.status_code == 200
    assert ready.json()["parts"]["database"]["ok"] is True
    assert ready.json()["parts"]["redis"]["ok"] is True


@pytest.mark.parametrize(
    ("part", "failure"), [("database", OperationalError("x")), ("redis", RedisAway("x"))]
)
def test_an_unavailable_dependency_gives_503(monkeypatch, part, failure):
    def away():
        raise failure

    monkeypatch.setattr(health, f"_{part}", away)
    answer = Client().get("/readyz")
    assert answer.status_code == 503
    assert answer["Retry-After"] == "5"
    assert answer.json()["parts"][part]["ok"] is False
    assert "x" not in str(answer.json()["parts"][part].get("problem", ""))
    assert Client().get("/healthz").status_code == 200


def test_other_methods_are_refused_with_allow():
    answer = Client().post("/readyz")
    assert (answer.status_code, answer["Allow"]) == (405, "GET, HEAD")
