"""GPU time is booked once when an attempt ends, with the cause of what was lost, and summed for page and REST."""

from __future__ import annotations

import datetime as dt
from typing import Any

import pytest
from django.test import Client
from django.urls import reverse
from django.utils import timezone

from portal.domain.jobs.reasons import EndReason
from portal.models import Allocation, Attempt, AttemptWork, Checkpoint, Job
from portal.services.lifecycle import job_control
from tests import factories
from tests.services.test_lifecycle import place, run

pytestmark = pytest.mark.django_db(transaction=True)

MINUTE = dt.timedelta(minutes=1)


@pytest.fixture
def dataset() -> dict[str, Any]:
    factories.cluster_settings()
    return factories.basic_cluster()


def ran(dataset: dict[str, Any], *, saved: float | None = None, listed: str = "", **fields: Any) -> Attempt:
    """An attempt on two GPUs: 2 min of start-up, 60 min of work; a checkpoint reported ``saved`` min ago.

    ``listed``: checkpoints that its node found, as minutes ago; ! is broken.
    """
    fields = {"gpus_per_task": 2} | fields
    job = factories.job(dataset["owner"], dataset["project"], dataset["environment"], **fields)
    attempt = place(dataset, job)
    run(attempt)
    now = timezone.now()
    Allocation.objects.filter(task__attempt=attempt).update(started_at=now - 62 * MINUTE)
    saved_at = None if saved is None else now - saved * MINUTE
    Attempt.objects.filter(pk=attempt.pk).update(running_at=now - 60 * MINUTE, checkpoint_at=saved_at)
    for word in listed.split():
        Checkpoint.objects.create(
            job=job, name=word, size_bytes=1, validity="broken" if "!" in word else "valid",
            saved_at=now - float(word.rstrip("!")) * MINUTE,
        )  # fmt: skip
    return attempt


def end(attempt: Attempt, reason: EndReason = EndReason.EXIT_CODE, code: int = 1) -> AttemptWork | None:
    for task in attempt.task_rows.all():
        job_control.record_task_ended(task.pk, exit_code=code, reason=reason)
    return AttemptWork.objects.filter(attempt=attempt).first()


def minutes(row: AttemptWork | None) -> tuple[float, float, float]:
    assert row is not None
    return tuple(round(each / 60) for each in (row.startup_gpu_s, row.useful_gpu_s, row.lost_gpu_s))  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("saved", "listed", "split"),
    [
        (None, "", (4, 0, 120)),
        (15, "", (4, 90, 30)),
        (None, "10", (4, 100, 20)),
        (15, "10", (4, 100, 20)),  # what the node found counts
        (5, "10 5!", (4, 100, 20)),  # reported, and cut off
        (5, "5!", (4, 0, 120)),
        (None, "90", (4, 0, 120)),  # saved by an earlier attempt
    ],
)
def test_work_since_the_last_valid_checkpoint_is_lost(
    dataset: dict[str, Any], saved: float | None, listed: str, split: tuple[float, float, float]
) -> None:
    row = end(ran(dataset, saved=saved, listed=listed))
    assert row is not None and (minutes(row), row.cause) == (split, "failure")


def test_completed_work_is_not_lost(dataset: dict[str, Any]) -> None:
    row = end(ran(dataset), EndReason.COMPLETED, 0)
    assert row is not None and (minutes(row), row.cause) == ((4, 120, 0), "")


@pytest.mark.parametrize(
    ("reason", "cause"),
    [
        (EndReason.PREEMPTED, "preemption"),
        (EndReason.CANCELLED_BY_USER, "stop"),
        (EndReason.STALLED, "stall"),
    ],
)
def test_the_cause_is_why_it_was_stopped(dataset: dict[str, Any], reason: EndReason, cause: str) -> None:
    attempt = ran(dataset, saved=15)
    job_control.request_stop(attempt.pk, reason)
    row = end(attempt, code=143)
    assert row is not None and (minutes(row), row.cause) == ((4, 90, 30), cause)


def test_a_lost_node_and_shares_of_a_gpu(dataset: dict[str, Any]) -> None:
    attempt = ran(dataset)
    Allocation.objects.filter(task__attempt=attempt).update(milli=500, whole=False)
    row = end(attempt, EndReason.NODE_REBOOTED, 0)
    assert row is not None and (minutes(row), row.cause) == ((2, 0, 60), "node")


def test_jobs_without_gpus_are_not_recorded_and_workspaces_lose_nothing(dataset: dict[str, Any]) -> None:
    assert end(ran(dataset, gpus_per_task=0)) is None
    lab = factories.job(dataset["owner"], dataset["project"], dataset["environment"], kind="workspace")
    attempt = place(dataset, lab)
    run(attempt)
    job_control.request_stop(attempt.pk, EndReason.CANCELLED_BY_USER)
    row = end(attempt, code=143)
    assert row is not None and (row.lost_gpu_s, row.cause) == (0.0, "")


def test_page_and_rest_sum_by_project_and_period_over_visible_jobs(
    dataset: dict[str, Any],
) -> None:
    end(ran(dataset, saved=15))
    other = ran(dataset)
    job_control.request_stop(other.pk, EndReason.PREEMPTED)
    end(other, code=143)
    client = Client()
    client.force_login(dataset["owner"])
    (item,) = client.get("/api/v1/usage/work/").json()["items"]
    assert item["name"] == dataset["project"].name and item["attempts"] == 2
    assert item["useful_gpu_hours"] == pytest.approx(1.5, abs=0.01)
    assert item["lost_gpu_hours"] == pytest.approx(2.5, abs=0.01)
    assert item["lost_by_cause"] == {
        "failure": pytest.approx(0.5, abs=0.01), "preemption": pytest.approx(2.0, abs=0.01),
    }  # fmt: skip
    page = client.get(reverse("usage")).content.decode()
    assert "2.5\u00a0GPU-h" in page and dataset["project"].name in page
    for by in ("user", "pool", "day"):
        assert client.get(f"/api/v1/usage/work/?by={by}").json()["items"][0]["attempts"] == 2
        assert client.get(f"{reverse('usage')}?by={by}&period=7d").status_code == 200
    before = "2020-01-01T00:00:00Z"
    assert client.get(f"/api/v1/usage/work/?start=2019-12-01T00:00:00Z&end={before}").json()["items"] == []
    stranger = factories.user("eve")
    client.force_login(stranger)
    assert client.get("/api/v1/usage/work/").json()["items"] == []
    assert "No GPU time in this period" in client.get(reverse("usage")).content.decode()
    assert Job.objects.count() == 2
