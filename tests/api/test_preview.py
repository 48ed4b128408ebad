"""Asking before submitting: the engine's answer when it comes in time, and no answer when it does not."""

from __future__ import annotations

import threading
from functools import partial

import pytest
import redis
from django.conf import settings
from django.db import connections

from portal.engine_client import HEARTBEAT_KEY, HEARTBEAT_TTL_S
from portal.models import EngineQuery, Gpu, Job
from portal.services.accounts.tokens import Scope
from portal.services.jobs import submission
from portal.services.jobs.submission import do_cancel_job
from scheduler import what_if
from scheduler.what_if import answer_query
from tests.api import fixture_data as worlds
from tests.api.table import JOB

ASK = "/api/v1/jobs/preview/"
pytestmark = pytest.mark.django_db(transaction=True)


def answer_the_next_question(stop: threading.Event) -> None:
    """Plays worker-ask: answers as the task ``scheduler.answer`` does, without a broker between."""
    try:
        while not stop.wait(0.02):
            question = EngineQuery.objects.filter(answer__isnull=True).first()
            if question is not None:
                answer_query(question.public_id)
                return
    finally:
        connections.close_all()


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """A busy machine may need more than the second that people are made to wait."""
    if "without" not in request.node.name:
        monkeypatch.setattr(
            submission, "query_would_start", partial(submission.query_would_start, wait_s=30.0)
        )


@pytest.fixture(autouse=True)
def no_old_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine keeps its snapshot for a second; the world of the test before is gone."""
    monkeypatch.setattr(what_if, "_cached_inputs", None)


def ask(body: dict, *, answered: bool) -> dict:
    fixture_data = worlds.make()
    for waiting in ("job", "workspace"):
        do_cancel_job(fixture_data.people["member"], worlds.job(fixture_data, waiting))
    headers = fixture_data.bearer("member", Scope.READ)
    before = Job.objects.count()
    stop = threading.Event()
    engine = threading.Thread(target=answer_the_next_question, args=[stop])
    store = redis.Redis.from_url(settings.REDIS_URL)
    if answered:
        store.set(HEARTBEAT_KEY, "1", ex=HEARTBEAT_TTL_S)
        engine.start()
    try:
        answer = fixture_data.client("anonymous").post(
            ASK, body, content_type="application/json", headers=headers
        )
    finally:
        stop.set()
        if answered:
            engine.join(10)
            store.delete(HEARTBEAT_KEY)
        store.close()
    assert answer.status_code == 200, answer.content
    assert Job.objects.count() == before
    return answer.json()


def test_a_request_that_fits_starts_now():
    reported = ask({**JOB, "gpus_per_task": 2}, answered=True)
    assert reported["starts_now"] is True
    assert reported["nodes"] == ["node-one"]
    assert reported["verdict"] is None


def test_a_request_that_does_not_fit_has_a_verdict():
    reported = ask({**JOB, "gpus_per_task": 3}, answered=True)  # two of the four are held
    assert reported["feasible"] is True
    assert reported["starts_now"] is False
    assert reported["verdict"]["message"]


def test_without_an_engine_no_start_is_predicted():
    reported = ask(JOB, answered=False)
    assert [rank["command"] for rank in reported.pop("ranks")] == [["true"]]
    nothing = {"starts_now": None, "verdict": None, "interval": None, "interval_missing": None}
    empty = {
        "nodes": [],
        "victims": [],
        "scaling": [],
        "launcher_rates": [],
        "alternatives": [],
        "cheaper": None,
        "right_size": None,
    }
    assert reported == {"feasible": True, "lost_gpu_seconds": None, **nothing, **empty}


def test_a_part_of_a_gpu_model_names_all_models_with_it() -> None:
    fixture_data = worlds.make()
    Gpu.objects.update(model="NVIDIA H200 NVL")
    answer = fixture_data.client("anonymous").post(
        "/api/v1/jobs/",
        {**JOB, "gpu_model": "h200"},
        content_type="application/json",
        headers=fixture_data.bearer("member", Scope.JOBS),
    )
    assert answer.status_code == 201, answer.content
    assert answer.json()["gpu_model"] == "NVIDIA H200 NVL"
