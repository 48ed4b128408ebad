"""Questions answered on a real record: who would leave for a request, and how much of their work would be lost."""

from __future__ import annotations

import datetime as dt
import json
import re

import pytest
from django.test import Client
from django.utils import timezone
from django.utils.dateparse import parse_datetime

from portal.models import Attempt, EngineQuery, Job, JobVerdict, Membership, Quota
from portal.selectors.scheduling.preemption_preview import preemption_candidates, total_lost_gpu_seconds
from portal.services.jobs.submission import JobRequest, do_submit_job, preview_query_body
from portal.web.jobs.launch import preview
from scheduler import what_if
from scheduler.cycle import run_cycle
from scheduler.forecast import forecast_pass
from scheduler.forecast.forecast_pass import run_forecast_pass
from scheduler.what_if import answer_query
from tests import factories

pytestmark = pytest.mark.django_db(transaction=True)


BODY = {
    "name": "wanted",
    "project": "owed",
    "environment": "batch",
    "command": ["true"],
    "gpus_per_task": 2,
}
FORM = {
    "kind": "training",
    "name": "wanted",
    "command": "true",
    "gpus_per_task": "4",
    "tasks": "1",
    "cores": "1",
    "memory_gib": "2",
    "preemptible": "on",
}


def ids(dataset) -> dict[str, str]:
    return {"project": dataset["owed"].public_id, "environment": dataset["batch"].public_id}


@pytest.fixture
def dataset(monkeypatch):
    """Four GPUs, promised to the project `owed`; the project `lent` has borrowed three of them."""
    factories.cluster_settings()
    monkeypatch.setattr(what_if, "_cached_inputs", None)
    monkeypatch.setattr(forecast_pass, "_cached_calibration", None)
    pool = factories.pool("main-pool")
    factories.node(pool)
    owner, other = factories.user("ada"), factories.user("eve")
    owed, allowed_folder = factories.project("owed", member=owner), factories.project("lent", member=other)
    Quota.objects.create(project=owed, pool=pool, guaranteed_milli=4000)
    batch = factories.environment("batch", tool=False)
    for name, gpus in (("long-run", 2), ("short-run", 1)):
        factories.job(other, allowed_folder, batch, name=name, gpus_per_task=gpus, time_limit_s=86_400)
    run_cycle("test", "me")
    now = timezone.now()
    for name, hours in (("long-run", 3), ("short-run", 1)):
        Attempt.objects.filter(job__name=name).update(created_at=now - dt.timedelta(hours=hours))
    return {"pool": pool, "owner": owner, "owed": owed, "lent": allowed_folder, "batch": batch}


def request(dataset, **fields) -> JobRequest:
    return JobRequest(
        name="wanted", project=dataset["owed"], environment=dataset["batch"], command=["true"], **fields
    )


def answered(body) -> dict:
    """As worker-ask does it."""
    question = EngineQuery.objects.create(kind="would_start", body=body)
    answer_query(question.public_id)
    question.refresh_from_db()
    return question.answer


def ask(dataset, **fields) -> dict:
    return answered(preview_query_body(dataset["owner"], request(dataset, **fields)))


def test_a_free_gpu_preempts_nobody(dataset) -> None:
    answer = ask(dataset)
    assert answer["starts_now"] and answer["victims"] == [] and answer["interval"] is None


def test_a_preview_names_victims_and_lost_work(dataset) -> None:
    answer = ask(dataset, gpus_per_task=2)
    (victim,) = answer["victims"]
    assert victim["job"] == Job.objects.get(name="short-run").public_id
    assert (victim["reason"], victim["milli"], victim["saved"]) == ("reclaimed", 1000, False)
    assert victim["saved_s"] is None
    assert victim["lost_gpu_seconds"] == pytest.approx(3600, abs=60)
    assert not answer["starts_now"] and answer["verdict"]["code"] == "waiting_for_eviction"
    both = ask(dataset, gpus_per_task=4)["victims"]
    assert sum(one["lost_gpu_seconds"] for one in both) == pytest.approx(3600 + 2 * 3 * 3600, abs=120)
    assert Attempt.objects.filter(stop_requested_at__isnull=False).count() == 0  # asking moves nothing


def test_jobs_with_checkpoints_are_named_first_with_their_time(dataset, engine) -> None:
    saved_at = timezone.now() - dt.timedelta(minutes=6)
    Attempt.objects.filter(job__name="long-run").update(checkpoint_at=saved_at)
    (victim,) = ask(dataset, gpus_per_task=3)["victims"]
    assert victim["job"] == Job.objects.get(name="long-run").public_id and victim["saved"]
    assert victim["saved_s"] == saved_at.timestamp()
    assert victim["lost_gpu_seconds"] == pytest.approx(2 * 360, abs=60)
    Membership.objects.create(user=dataset["owner"], project=dataset["lent"], role="viewer")
    client = Client()
    client.force_login(dataset["owner"])
    reported = client.post(
        "/api/v1/jobs/preview/", json.dumps(BODY | {"gpus_per_task": 4}), "application/json"
    ).json()
    whens = {one["job"]["name"]: one["checkpoint_at"] for one in reported["victims"]}
    assert whens == {"long-run": saved_at.isoformat().replace("+00:00", "Z"), "short-run": None}
    page = " ".join(client.post("/launch/check/", FORM | ids(dataset)).content.decode().split())
    assert re.search(r", last checkpoint <time [^>]*>6 min( \d+ s)? ago</time>", page)
    assert page.count(", no checkpoint reported") == 1


def test_victims_have_names_only_for_users_who_may_see_them(dataset) -> None:
    victims = ask(dataset, gpus_per_task=4)["victims"]
    hidden = preemption_candidates(dataset["owner"], victims)
    assert [one.job for one in hidden] == [None, None] and total_lost_gpu_seconds(hidden) > 20_000
    Membership.objects.create(user=dataset["owner"], project=dataset["lent"], role="viewer")
    assert {one.job.name for one in preemption_candidates(dataset["owner"], victims)} == {
        "long-run",
        "short-run",
    }


@pytest.fixture
def engine(monkeypatch):
    """The engine answers at once, in this process, with what its worker would answer."""

    def at_once(body, wait_s=1.0):
        return answered(body)

    monkeypatch.setattr("portal.services.jobs.submission.query_would_start", at_once)
    monkeypatch.setattr(preview, "query_would_start", at_once)


def test_rest_returns_victims_and_lost_work(dataset, engine) -> None:
    client = Client()
    client.force_login(dataset["owner"])
    reported = client.post("/api/v1/jobs/preview/", json.dumps(BODY), content_type="application/json").json()
    (victim,) = reported["victims"]
    assert victim["job"] is None and victim["milli"] == 1000
    assert reported["lost_gpu_seconds"] == victim["lost_gpu_seconds"] > 3000
    assert reported["starts_now"] is False and reported["interval_missing"] is None
    times = [parse_datetime(reported["interval"][name]) for name in ("p10_at", "p50_at", "p90_at")]
    assert times == sorted(times) and times[0] - timezone.now() < dt.timedelta(minutes=10)


def test_interval_is_that_of_a_waiting_job(dataset, engine) -> None:
    """A request has the interval that the forecast pass gives the same job once it is submitted."""
    Job.objects.filter(state="RUNNING").update(preemptible=False)
    answer = ask(dataset, gpus_per_task=4)
    assert not answer["starts_now"] and answer["victims"] == []
    client = Client()
    client.force_login(dataset["owner"])
    page = " ".join(client.post("/launch/check/", FORM | ids(dataset)).content.decode().split())
    assert "Expected to start at <time" in page and "in 8 of 10 cases" in page
    job = do_submit_job(dataset["owner"], request(dataset, gpus_per_task=4))
    run_cycle("test", "me")
    assert run_forecast_pass() == 1
    stored = JobVerdict.objects.get(job=job)
    now_s = timezone.now().timestamp()
    for name in ("p10", "p50", "p90"):
        submitted_s = getattr(stored, f"{name}_at").timestamp() - now_s
        assert answer["interval"][f"{name}_s"] - now_s == pytest.approx(submitted_s, rel=0.02, abs=5)


def test_request_without_forecast_gets_the_reason(dataset, engine) -> None:
    Job.objects.filter(state="RUNNING").update(preemptible=False)
    Quota.objects.filter(project=dataset["owed"]).update(guaranteed_milli=0, limit_milli=1000)
    answer = ask(dataset, gpus_per_task=2)
    assert answer["interval"] is None and "No start is known" in answer["interval_missing"]
    waiting = JobRequest(
        name="wanted", project=dataset["lent"], environment=dataset["batch"], command=["true"],
        dependencies=(Job.objects.get(name="long-run"),),
    )  # fmt: skip
    assert "dependencies" in (
        answered(preview_query_body(dataset["owner"], waiting))["interval_missing"] or ""
    )


def test_the_launch_page_shows_the_victims(dataset, engine) -> None:
    client = Client()
    client.force_login(dataset["owner"])
    Membership.objects.create(user=dataset["owner"], project=dataset["lent"], role="viewer")
    check = preview.preview_launch(dataset["owner"], request(dataset, gpus_per_task=4), [], query_engine=True)
    assert (check.title, check.hidden_victims, len(check.victims)) == ("Would preempt other jobs", 0, 2)
    assert check.lost_gpu_seconds == pytest.approx(7 * 3600, abs=200)
    page = " ".join(client.post("/launch/check/", FORM | ids(dataset)).content.decode().split())
    assert "2 jobs would be preempted" in page and "long-run" in page and "GPU-h of work" in page
