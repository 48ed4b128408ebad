"""Alternatives of a request with their own start, as the scheduler forecasts them."""

from __future__ import annotations

import datetime as dt
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from django.conf import settings
from django.db import connections, transaction
from django.test import Client
from django.urls import reverse
from django.utils import timezone
from redis import Redis

from portal.domain.states import JobState
from portal.engine_client import HEARTBEAT_KEY, HEARTBEAT_TTL_S
from portal.models import Attempt, AttemptProgress, EngineQuery, Job, Node, NodePool
from portal.selectors.jobs.progress import job_scaling_fingerprint
from portal.services.jobs import start_alternatives
from portal.services.jobs.start_alternatives import StartAlternative, list_start_alternatives
from portal.services.jobs.submission import JobRequest
from portal.services.lifecycle import job_control
from portal.services.lifecycle.job_control import RankPlacement
from scheduler import what_if
from scheduler.cycle import run_cycle
from tests import factories

pytestmark = pytest.mark.django_db(transaction=True)
HOUR_S = 3600


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine may need longer than a user waits; other tests leave a snapshot."""
    monkeypatch.setattr(start_alternatives, "QUERY_TIMEOUT_S", 30.0)
    monkeypatch.setattr(start_alternatives, "TIME_BUDGET_S", 60.0)
    monkeypatch.setattr(what_if, "_cached_inputs", None)


@contextmanager
def scheduler_answers() -> Iterator[None]:
    """Answer queries in a thread, as the task of worker-ask does."""
    stop = threading.Event()

    def answer() -> None:
        try:
            while not stop.wait(0.005):
                for query in EngineQuery.objects.filter(answer__isnull=True):
                    what_if.answer_query(query.public_id)
        finally:
            connections.close_all()

    engine = threading.Thread(target=answer)
    with Redis.from_url(settings.REDIS_URL) as store:
        store.set(HEARTBEAT_KEY, "1", ex=HEARTBEAT_TTL_S * 10)
        engine.start()
        try:
            yield
        finally:
            stop.set()
            engine.join(30)
            store.delete(HEARTBEAT_KEY)


@pytest.fixture
def cluster() -> dict[str, Any]:
    pool, owner = factories.pool(), factories.user()
    return {
        "owner": owner,
        "nodes": [factories.node(pool, gpus=8, cpu_milli=64_000, memory_mib=1 << 18) for _ in range(2)],
        "project": factories.project(member=owner),
        "environment": factories.environment(),
        "pool": pool,
    }


def run(cluster: dict[str, Any], node: Node, gpus: slice, ends_in_s: float, **fields: Any) -> Job:
    """A running job that reaches its time limit in ``ends_in_s``."""
    held = list(node.gpus.order_by("index").values_list("pk", flat=True))[gpus]
    job = factories.job(
        cluster["owner"], cluster["project"], cluster["environment"],
        gpus_per_task=len(held), time_limit_s=round(ends_in_s) + 60, **fields,
    )  # fmt: skip
    with transaction.atomic():
        locked = Job.objects.select_for_update().get(pk=job.pk)
        job_control.start_attempt(
            locked, cluster["pool"], [RankPlacement(node, [(gpu, 1000) for gpu in held])], epoch=1
        )
    Attempt.objects.filter(job=job).update(
        state="RUNNING", running_at=timezone.now() - dt.timedelta(seconds=60)
    )
    return job


def alternatives_of(cluster: dict[str, Any], **fields: Any) -> dict[str, StartAlternative]:
    request = JobRequest(
        name="asked",
        project=cluster["project"],
        environment=cluster["environment"],
        command=["true"],
        **fields,
    )
    with scheduler_answers():
        return {each.kind: each for each in list_start_alternatives(cluster["owner"], request)}


def in_s(at: dt.datetime) -> float:
    return at.timestamp() - time.time()


def test_fewer_gpus_start_when_a_part_gets_free(cluster) -> None:
    first, second = cluster["nodes"]
    run(cluster, first, slice(0, 4), 1200)
    run(cluster, first, slice(4, 8), 10 * HOUR_S)
    run(cluster, second, slice(0, 8), 10 * HOUR_S)
    found = alternatives_of(cluster, gpus_per_task=8, tasks=1, time_limit_s=HOUR_S)
    fewer = found["fewer_gpus"]
    assert fewer.fields == {"gpus_per_task": 4} and fewer.change == "with 4 GPUs instead of 8"
    assert fewer.interval is not None
    assert 600 < in_s(fewer.interval.p50_at) < 3600
    assert fewer.interval.p10_at <= fewer.interval.p50_at <= fewer.interval.p90_at


def test_a_request_that_starts_now_needs_no_alternative(cluster) -> None:
    assert alternatives_of(cluster, gpus_per_task=8) == {}


def test_a_shorter_limit_starts_now_by_backfill(cluster) -> None:
    first, _ = cluster["nodes"]
    run(cluster, first, slice(0, 8), 6 * HOUR_S)
    gang = factories.job(
        cluster["owner"], cluster["project"], cluster["environment"], gpus_per_task=8, tasks=2
    )
    Job.objects.filter(pk=gang.pk).update(
        submitted_at=timezone.now() - dt.timedelta(hours=3),
        pending_since=timezone.now() - dt.timedelta(hours=3),
    )
    found = alternatives_of(cluster, gpus_per_task=8, time_limit_s=24 * HOUR_S)
    shorter = found["shorter_limit"]
    assert shorter.starts_now and shorter.fields == {"time_limit_s": 5 * HOUR_S}
    assert shorter.change == "with a time limit of 5 h, which ends before the larger job starts"


def test_two_nodes_with_the_measured_slowdown(cluster) -> None:
    first, second = cluster["nodes"]
    for node in (first, second):
        run(cluster, node, slice(0, 4), 10 * HOUR_S)
    done = Job.objects.create(
        project=cluster["project"], owner=cluster["owner"], environment=cluster["environment"],
        command=["true"], state="COMPLETED",
    )  # fmt: skip
    now = timezone.now()
    for number, (nodes, per_s) in enumerate(((1, 100.0), (2, 80.0)), 1):
        attempt = Attempt.objects.create(
            job=done, number=number, pool=cluster["pool"], leader_epoch=1, state="COMPLETED", ended_at=now
        )
        AttemptProgress.objects.create(
            attempt=attempt, rank=0, start_units=0, start_at=now - dt.timedelta(seconds=100),
            completed_units=100 * per_s, reported_at=now, scaling_fingerprint=job_scaling_fingerprint(done),
            workload_fingerprint="x", gpus=8, gpu_model="NVIDIA H200", nodes=nodes, islands=1, levels=0,
            launcher="torchrun",
        )  # fmt: skip
    NodePool.objects.update(allow_host_network=True)
    found = alternatives_of(cluster, gpus_per_task=8, launcher="torchrun", cpu_milli=4000, memory_mib=8192)
    split = found["more_nodes"]
    assert split.starts_now and split.speed_percent == 80
    assert split.fields == {"tasks": 2, "gpus_per_task": 4, "cpu_milli": 2000, "memory_mib": 4096}


def test_without_a_scheduler_there_are_no_alternatives(cluster) -> None:
    request = JobRequest(
        name="asked", project=cluster["project"], environment=cluster["environment"], gpus_per_task=8
    )
    assert list_start_alternatives(cluster["owner"], request) == []


def endless(cluster: dict[str, Any], node: Node, gpus: slice) -> None:
    """A running job without a time limit, of which nothing is known."""
    job = run(cluster, node, gpus, HOUR_S)
    Job.objects.filter(pk=job.pk).update(time_limit_s=None)


@pytest.fixture
def waiting(cluster: dict[str, Any]) -> Job:
    """A job that asks for 8 GPUs and 56 of 64 CPUs: one GPU is free in its pool, four in another one."""
    first, second = cluster["nodes"]
    other = factories.pool("other")
    elsewhere = factories.node(other, gpus=8, cpu_milli=64_000, memory_mib=1 << 18)
    endless(cluster, first, slice(0, 7))
    endless(cluster, second, slice(0, 8))
    held = {**cluster, "pool": other}
    endless(held, elsewhere, slice(0, 4))
    return factories.job(
        cluster["owner"], cluster["project"], cluster["environment"], pool=cluster["pool"],
        gpus_per_task=8, cpu_milli=56_000, memory_mib=1 << 17,
    )  # fmt: skip


def test_a_waiting_job_is_offered_what_starts_it_and_takes_it_with_one_click(
    cluster: dict[str, Any], waiting: Job, client: Client
) -> None:
    client.force_login(cluster["owner"])
    with scheduler_answers():
        body = client.get(f"/api/v1/jobs/{waiting.public_id}/alternatives/").json()
        page = client.get(reverse("job-alternatives", args=[waiting.public_id])).content.decode()
    offered = {each["change"]: each for each in body["alternatives"]}
    assert body["reason"] == "" and all(each["starts_now"] for each in offered.values())
    there = next(each for each in offered.values() if each["values"].get("pool"))
    assert there["values"]["gpus_per_task"] == 4 and there["values"]["cpu_milli"] == 28_000
    here = next(
        each for each in offered.values() if each["kind"] == "fewer_gpus" and "pool" not in each["values"]
    )
    assert here["values"]["gpus_per_task"] == 1
    assert "in the pool other" in page and "It would start now." in page
    posted = {"version": waiting.version, "values": json.dumps(there["values"])}
    assert client.post(reverse("job-apply-suggestion", args=[waiting.public_id]), posted).status_code == 302
    waiting.refresh_from_db()
    assert (waiting.gpus_per_task, waiting.cpu_milli, waiting.pool.name) == (4, 28_000, "other")
    run_cycle("test", "me")
    waiting.refresh_from_db()
    assert waiting.state == JobState.RUNNING.value


def test_without_any_change_that_helps_the_page_says_why(cluster: dict[str, Any], client: Client) -> None:
    for node in cluster["nodes"]:
        endless(cluster, node, slice(0, 8))
    job = factories.job(cluster["owner"], cluster["project"], cluster["environment"], gpus_per_task=2)
    client.force_login(cluster["owner"])
    with scheduler_answers():
        body = client.get(f"/api/v1/jobs/{job.public_id}/alternatives/").json()
        page = client.get(reverse("job-alternatives", args=[job.public_id])).content.decode()
    assert body["alternatives"] == []
    assert "16 of the 16 GPUs that jobs hold there are held by jobs without a time limit" in body["reason"]
    assert "without a time limit and without a predicted end" in page and "Apply" not in page


@pytest.mark.parametrize(
    "values", ['{"priority": 99}', '{"gpus_per_task": "4"}', '{"gpus_per_task": true}', '{"pool": "none"}', "[]", "x"]
)  # fmt: skip
def test_only_changes_of_the_kind_that_is_suggested_are_made(
    cluster: dict[str, Any], client: Client, values: str
) -> None:
    job = factories.job(cluster["owner"], cluster["project"], cluster["environment"], gpus_per_task=2)
    client.force_login(cluster["owner"])
    posted, priority = {"version": job.version, "values": values}, job.priority
    assert client.post(reverse("job-apply-suggestion", args=[job.public_id]), posted).status_code in (
        302,
        400,
        422,
    )
    job.refresh_from_db()
    assert (job.version, job.gpus_per_task, job.priority) == (posted["version"], 2, priority)
