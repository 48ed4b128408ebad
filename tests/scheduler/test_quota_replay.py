"""Replays of recorded jobs with other quotas, from real rows, on the page, for a request, and in REST."""

from __future__ import annotations

import datetime as dt
import re

import pytest
from django.test import Client
from django.utils import timezone

from portal.domain.jobs.reasons import EndReason
from portal.errors import Conflict, Forbidden
from portal.models import Attempt, AttemptWork, Job, OutboxMessage, Quota, QuotaReplay
from portal.services.lifecycle import job_control
from portal.services.projects.projects import QuotaValues
from portal.services.projects.quota_effect import QuotaEdit
from portal.services.projects.quota_replays import do_replay_quotas
from portal.services.requests.user_requests import do_request_quota, prepare_quota_request
from scheduler import quota_replay
from scheduler.quota_replay import run_next_replay
from tests import factories
from tests.services.test_lifecycle import place, run
from tests.table_owner import update_as_owner

pytestmark = pytest.mark.django_db(transaction=True)

HOUR = dt.timedelta(hours=1)


@pytest.fixture
def dataset():
    """A node with four GPUs. A job of `holder`, which they are guaranteed, held them for 10 hours of yesterday; a
    job of `waiter` was submitted an hour later and ran when it had ended."""
    factories.cluster_settings()
    pool = factories.pool("main-pool")
    node = factories.node(pool)
    owner, other, admin = factories.user("ada"), factories.user("eve"), factories.user("root", admin=True)
    waiter, holder = factories.project("waiter", member=owner), factories.project("holder", member=other)
    Quota.objects.create(project=holder, pool=pool, guaranteed_milli=4000)
    batch = factories.environment("batch", tool=False)
    start = timezone.now() - dt.timedelta(days=1)
    for user, project, submitted, began, ended in (
        (other, holder, start, start, start + 10 * HOUR),
        (owner, waiter, start + HOUR, start + 10 * HOUR, start + 11 * HOUR),
    ):
        job = factories.job(user, project, batch, gpus_per_task=4)
        (task,) = run(place({"node": node, "pool": pool}, job))
        job_control.record_task_ended(task, exit_code=0, reason=EndReason.COMPLETED)
        Job.objects.filter(pk=job.pk).update(submitted_at=submitted)
        Attempt.objects.filter(job=job).update(created_at=began, ended_at=ended)
    return {"pool": pool, "owner": owner, "admin": admin, "waiter": waiter, "holder": holder}


def swapped(dataset) -> list[QuotaEdit]:
    return [
        QuotaEdit(dataset[name], dataset["pool"], QuotaValues(guaranteed_milli=milli))
        for name, milli in (("holder", 0), ("waiter", 4000))
    ]


def client(user) -> Client:
    client = Client()
    client.force_login(user)
    return client


def test_the_replay_shows_who_waits_less_and_who_is_preempted(dataset):
    row = do_replay_quotas(dataset["admin"], swapped(dataset))
    assert OutboxMessage.objects.filter(name="scheduler.replay_quotas", queue="replay").exists()
    assert do_replay_quotas(dataset["admin"], list(reversed(swapped(dataset)))).pk == row.pk  # cached
    assert run_next_replay() and not run_next_replay()
    found = client(dataset["admin"]).get(f"/api/v1/quotas/replays/{row.public_id}/").json()
    assert (found["state"], found["error"], found["result"]["jobs"], found["progress_percent"]) == (
        "finished",
        "",
        2,
        100,
    )
    projects = {one["project"]["name"]: (one["before"], one["after"]) for one in found["result"]["projects"]}
    before, after = projects["waiter"]
    assert before["wait_p50_s"] == pytest.approx(9 * 3600, abs=2)
    assert after["wait_p50_s"] < 600
    assert (before["gpu_hours"], before["served_percent"]) == (pytest.approx(4, abs=0.01), 100)
    before, after = projects["holder"]
    assert (before["wait_p50_s"], before["preemptions"], after["preemptions"]) == (0, 0, 1)
    assert before["gpu_hours"] == pytest.approx(40, abs=0.01)
    text = client(dataset["admin"]).get(f"/quotas/replays/{row.public_id}/").content.decode()
    assert re.search("9\xa0h|8\xa0h 59\xa0min", text) and "Jain" in text and "present nodes" in text
    assert Quota.objects.get().guaranteed_milli == 4000


def test_a_replay_that_takes_too_long_says_so_and_is_begun_again_when_asked(dataset, monkeypatch):
    monkeypatch.setattr(quota_replay, "TIME_LIMIT_S", -1)
    row = do_replay_quotas(dataset["admin"], swapped(dataset))
    run_next_replay()
    row.refresh_from_db()
    assert row.result is None and row.error.startswith("It was ended after ")
    assert "no result" in client(dataset["admin"]).get(f"/quotas/replays/{row.public_id}/").content.decode()
    assert do_replay_quotas(dataset["admin"], swapped(dataset)).pk != row.pk


def test_a_worker_that_died_loses_its_claim_and_gives_up_after_three(dataset):
    row = do_replay_quotas(dataset["admin"], swapped(dataset))
    QuotaReplay.objects.update(claimed_until=timezone.now() + HOUR, attempt_count=1)
    assert not run_next_replay()
    QuotaReplay.objects.update(claimed_until=timezone.now() - HOUR, attempt_count=3)
    assert run_next_replay()
    row.refresh_from_db()
    assert row.error == "It was begun 3 times without an end."


def test_who_answers_a_request_replays_it_and_sees_the_efficiency_of_who_asks(dataset):
    owner, admin, pool = dataset["owner"], dataset["admin"], dataset["pool"]
    asked = do_request_quota(
        prepare_quota_request(
            owner, dataset["waiter"], pool, 4000, starts_at=None, ends_at=None, reason="paper"
        )
    )
    path = f"/api/v1/requests/{asked.public_id}/"
    assert client(owner).post(f"{path}replay/", {}, "application/json").status_code == 403
    begun = client(admin).post(f"{path}replay/", {}, "application/json")
    assert (begun.status_code, begun.json()["state"]) == (202, "pending")
    run_next_replay()
    page = client(admin).post(f"/approvals/{asked.public_id}/replay/").content.decode()
    assert "waiter" in page and "Preemptions" in page
    with pytest.raises(Forbidden):
        do_replay_quotas(owner, swapped(dataset))
    update_as_owner(
        AttemptWork.objects.filter(user=owner),
        ended_at=timezone.now() - HOUR,
        useful_gpu_s=3 * 3600,
        startup_gpu_s=0,
        lost_gpu_s=3600,
    )
    held = client(admin).get(path).json()["efficiency"]["user"]
    assert held == {"held_gpu_hours": 4.0, "useful_percent": 75.0}
    page = client(admin).get("/approvals/").content.decode()
    assert "75 %" in page and "of 4.0 GPU-hours" in page
    assert "75 %" not in client(owner).get("/approvals/").content.decode()


def test_at_most_three_replays_of_a_user_are_open(dataset):
    for milli in (1000, 2000, 3000):
        edit = QuotaEdit(dataset["waiter"], dataset["pool"], QuotaValues(guaranteed_milli=milli))
        do_replay_quotas(dataset["admin"], [edit])
    with pytest.raises(Conflict, match="not finished"):
        do_replay_quotas(dataset["admin"], swapped(dataset))


def test_the_quota_page_replays_changed_cells(dataset):
    page = client(dataset["admin"])
    assert "Replay the last 30 days" in page.get("/quotas/").content.decode()
    answer = page.post("/quotas/replay/", {"pool": "main-pool"}).content.decode()
    assert "Change a number first." in answer
