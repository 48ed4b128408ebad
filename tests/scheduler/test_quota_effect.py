"""The effect of quotas on a real queue, as worker-ask computes it, on pages and in REST."""

from __future__ import annotations

import json

import pytest
from django.test import Client
from django.urls import reverse

from portal.models import EngineQuery, Job, Quota
from portal.services.projects import quota_effect
from portal.services.requests.user_requests import do_request_quota, prepare_quota_request
from scheduler import what_if
from scheduler.cycle import run_cycle
from scheduler.forecast import forecast_pass
from scheduler.what_if import answer_query
from tests import factories

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def dataset(monkeypatch):
    """Four GPUs that `holder` holds and is guaranteed; a job of `waiter` waits for two."""
    factories.cluster_settings()
    monkeypatch.setattr(what_if, "_cached_inputs", None)
    monkeypatch.setattr(forecast_pass, "_cached_calibration", None)
    pool = factories.pool("main-pool")
    factories.node(pool)
    owner, other, admin = factories.user("ada"), factories.user("eve"), factories.user("root", admin=True)
    waiter, holder = factories.project("waiter", member=owner), factories.project("holder", member=other)
    Quota.objects.create(project=holder, pool=pool, guaranteed_milli=4000)
    batch = factories.environment("batch", tool=False)
    factories.job(other, holder, batch, name="runs", gpus_per_task=4, time_limit_s=3600)
    run_cycle("test", "me")
    factories.job(owner, waiter, batch, name="waits", gpus_per_task=2)

    def at_once(quotas, wait_s=8.0):
        question = EngineQuery.objects.create(kind="quota_effect", body={"quotas": quotas})
        answer_query(question.public_id)
        question.refresh_from_db()
        return question.answer

    monkeypatch.setattr(quota_effect, "query_quota_effect", at_once)
    return {"pool": pool, "owner": owner, "admin": admin, "waiter": waiter, "holder": holder}


def client(user) -> Client:
    client = Client()
    client.force_login(user)
    return client


def edits(dataset) -> dict:
    both = {"holder": 2000, "waiter": 2000}
    return {
        "quotas": [
            {"project": name, "pool": "main-pool", "guaranteed_milli": milli} for name, milli in both.items()
        ]
    }


def test_rest_simulates_several_edits_together(dataset) -> None:
    answer = client(dataset["admin"]).post("/api/v1/quotas/effect/", edits(dataset), "application/json")
    found = answer.json()
    assert answer.status_code == 200 and (found["sooner"], found["later"], found["victim_count"]) == (1, 0, 1)
    (start,) = found["starts"]
    assert start["job"]["name"] == "waits" and start["after"]["wait_s"] < start["before"]["wait_s"]
    assert start["after"]["p10_at"] <= start["after"]["p50_at"] <= start["after"]["p90_at"]
    assert found["victims"][0]["job"]["name"] == "runs" and found["victims"][0]["milli"] == 4000
    holdings = {one["project"]["name"]: (one["before"], one["after"]) for one in found["holdings"]}
    assert holdings["waiter"][1]["used_milli"] == 2000 and holdings["waiter"][1]["guaranteed_milli"] == 2000
    assert holdings["holder"][0]["used_milli"] == 4000 and holdings["holder"][1]["used_milli"] == 0
    assert Job.objects.get(name="runs").attempts.get().stop_requested_at is None  # asking moves nothing
    assert Quota.objects.get().guaranteed_milli == 4000
    wrong = {
        "quotas": [{"project": "waiter", "pool": "main-pool", "guaranteed_milli": 2000, "limit_milli": 1000}]
    }
    answer = client(dataset["admin"]).post("/api/v1/quotas/effect/", wrong, "application/json")
    assert answer.status_code == 422 and answer.json()["errors"][0]["field"] == "limit_milli"


def test_the_quota_page_shows_the_effect_before_it_is_saved(dataset) -> None:
    page = client(dataset["admin"])
    text = page.get(reverse("quotas")).content.decode()
    assert "Simulate the effect" in text
    seen = {
        f"seen-{row.public_id}": f"{version};{guaranteed};none;none;1;0"
        for row, version, guaranteed in ((dataset["waiter"], 0, 0), (dataset["holder"], 1, 4))
    }
    posted = seen | {"pool": "main-pool", f"guaranteed-{dataset['waiter'].public_id}": "2"}
    posted |= {f"guaranteed-{dataset['holder'].public_id}": "2"}
    text = " ".join(page.post(reverse("quota-effect"), posted).content.decode().split())
    assert "1 running job would be preempted" in text and "1 pending job would start earlier" in text
    assert "waits" in text and "In use: after the next scheduling cycle." in text
    posted[f"guaranteed-{dataset['waiter'].public_id}"] = "many"
    text = page.post(reverse("quota-effect"), posted).content.decode()
    assert "waiter:" in text and "is not a number of GPUs" in text
    assert (
        "Change a number first."
        in page.post(reverse("quota-effect"), seen | {"pool": "main-pool"}).content.decode()
    )
    assert Quota.objects.get().guaranteed_milli == 4000


def test_a_request_carries_its_effect_without_the_names_of_others(dataset) -> None:
    Quota.objects.update(guaranteed_milli=2000)
    asked = do_request_quota(
        prepare_quota_request(dataset["owner"], dataset["waiter"], dataset["pool"], 2000, reason="a paper")
    )
    address = f"/api/v1/requests/{asked.public_id}/"
    mine = client(dataset["owner"]).get(address).json()["effect"]
    assert {one["project"]["name"] for one in mine["holdings"]} == {"waiter"}
    assert "holder" not in json.dumps(mine) and "runs" not in json.dumps(mine)
    text = " ".join(client(dataset["owner"]).get(reverse("approvals")).content.decode().split())
    assert "When it was requested: 1 pending job would start earlier, 0 later; 1 running job would be" in text
    effect = reverse("request-effect", args=[asked.public_id])
    assert client(dataset["owner"]).post(effect).status_code == 403
    text = client(dataset["admin"]).post(effect).content.decode()
    assert "1 running job would be preempted" in " ".join(text.split()) and "runs" in text
