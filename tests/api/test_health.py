"""healthz says that the process lives, readyz which of its needs answers; neither asks who looks."""

from __future__ import annotations

import datetime as dt

import pytest
from django.db import OperationalError
from django.test import Client
from django.utils import timezone
from redis.exceptions import ConnectionError as RedisAway

from portal.api.monitoring import health
from portal.models import Cycle, Lease

pytestmark = pytest.mark.django_db


def test_both_answer_without_sign_in():
    assert Client().get("/healthz").json() == {"ok": True}
    ready = Client().get("/readyz")
    assert ready.status_code == 200
    assert ready.json()["parts"]["database"]["ok"] is True
    assert ready.json()["parts"]["redis"]["ok"] is True


def cycle_finished(seconds_ago: float) -> None:
    Cycle.objects.create(
        started_at=timezone.now() - dt.timedelta(seconds=seconds_ago),
        epoch=1,
        trigger="period",
        snapshot_ms=1,
        decide_ms=1,
        commit_ms=1,
        pending=0,
        started_jobs=0,
        refused_commits=0,
        steps=0,
    )


def test_scheduler_is_ok_while_a_cycle_runs():
    assert Client().get("/readyz").json()["parts"]["scheduler"] == {"ok": False}
    Lease.objects.create(name="leader", holder="x", expires_at=timezone.now() + dt.timedelta(seconds=9))
    assert Client().get("/readyz").json()["ok"] is True


def test_scheduler_is_ok_between_cycles_when_the_lease_is_released():
    Lease.objects.create(name="leader", holder="x", expires_at=timezone.now() - dt.timedelta(days=9))
    cycle_finished(seconds_ago=4)
    assert Client().get("/readyz").json() | {"parts": None} == {"ok": True, "ready": True, "parts": None}


def test_scheduler_is_not_ok_after_several_missed_cycles():
    cycle_finished(seconds_ago=120)
    answer = Client().get("/readyz")
    assert (answer.status_code, answer.json()["ready"], answer.json()["ok"]) == (200, True, False)


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
