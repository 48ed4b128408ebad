"""healthz says that the process lives, readyz which of its needs answers; neither asks who looks."""

from __future__ import annotations

import datetime as dt

import pytest
from django.db import OperationalError
from django.test import Client
from django.utils import timezone
from redis.exceptions import ConnectionError as RedisAway

from portal.api import health
from portal.models import Lease

pytestmark = pytest.mark.django_db


def test_both_answer_without_sign_in():
    assert Client().get("/healthz").json() == {"ok": True}
    ready = Client().get("/readyz")
    assert ready.status_code == 200
    assert ready.json()["parts"]["database"]["ok"] is True
    assert ready.json()["parts"]["redis"]["ok"] is True


def test_the_scheduler_is_told_by_its_lease():
    assert Client().get("/readyz").json()["parts"]["scheduler"] == {"ok": False}
    lease = Lease.objects.create(
        name="leader", holder="x", expires_at=timezone.now() + dt.timedelta(seconds=9)
    )
    assert Client().get("/readyz").json()["ok"] is True
    lease.expires_at = timezone.now() - dt.timedelta(seconds=1)
    lease.save()
    answer = Client().get("/readyz")
    assert (answer.status_code, answer.json()["ready"], answer.json()["ok"]) == (200, True, False)


@pytest.mark.parametrize(
    ("part", "failure"), [("database", OperationalError("x")), ("redis", RedisAway("x"))]
)
def test_what_is_away_makes_503(monkeypatch, part, failure):
    def away():
        raise failure

    monkeypatch.setattr(health, f"_{part}", away)
    answer = Client().get("/readyz")
    assert answer.status_code == 503
    assert answer["Retry-After"] == "5"
    assert answer.json()["parts"][part]["ok"] is False
    assert "x" not in str(answer.json()["parts"][part].get("problem", ""))
    assert Client().get("/healthz").status_code == 200


def test_only_looking_is_allowed():
    assert Client().post("/readyz").status_code == 405
