"""Advice from the user's own past runs: at launch and in REST, only when at least three agree."""

from __future__ import annotations

import datetime as dt
import re

import pytest
from django.urls import reverse
from django.utils import timezone

from portal.models import Allocation, Attempt, AttemptGpuDay, Gpu, Job, Task
from tests import factories


def words(answer) -> str:
    return " ".join(re.sub("<[^>]*>", " ", answer.content.decode()).replace("&nbsp;", " ").split())


@pytest.fixture
def asked(dataset, client_of, typed) -> dict[str, str]:
    """A form for four GPUs with the environment of earlier runs."""
    return typed | {"gpus_per_task": "4", "memory_gib": "64"}


def finish_run(client, asked, *, busy_percent: float, memory_mib: int, seconds: int = 3600) -> None:
    """Launch the form, and store it as a finished run that used this much."""
    assert client.post(reverse("launch"), asked).status_code == 302
    job = Job.objects.latest("id")
    node = factories.node(factories.pool(), gpus=4)
    now = timezone.now()
    attempt = Attempt.objects.create(
        job=job, number=1, pool=node.pool, leader_epoch=1, state="COMPLETED", ended_at=now
    )
    task = Task.objects.create(attempt=attempt, rank=0, node=node, state="COMPLETED", peak_memory_mib=3000)
    for gpu in node.gpus.all():
        Allocation.objects.create(
            task=task, gpu=gpu, milli=1000, whole=True, started_at=now, ended_at=now, proof="exit"
        )
    Gpu.objects.filter(node=node).update(memory_mib=40_960)
    measured_s = seconds * job.gpus_per_task
    for day, part in ((1, 0.25), (2, 0.75)):
        AttemptGpuDay.objects.create(
            attempt=attempt, job=job, project=job.project, user=job.owner, pool=attempt.pool,
            day=dt.date(2026, 1, day), is_continued=day > 1, measured_gpu_s=part * measured_s,
            busy_gpu_s=busy_percent / 100 * part * measured_s, idle_gpu_s=0, peak_memory_mib=memory_mib / day,
        )  # fmt: skip


def test_three_small_runs_are_advised_to_use_fewer_gpus_and_less_memory(client_of, asked):
    client = client_of("member")
    for busy_percent in (27.5, 10.0, 20.0):
        assert "would do" not in words(client.post(reverse("launch-check"), asked))
        finish_run(client, asked, busy_percent=busy_percent, memory_mib=9216)
    page = client.post(reverse("launch-check"), asked)
    assert (
        "Your last 3 runs of this environment used at most 9 GiB of 40 GiB of GPU memory, 1.1 of 4 GPUs and "
        "2.9 GiB of memory: 1 GPU and 4 GiB of memory would do." in words(page)
    )
    assert 'data-set="gpus_per_task=1;memory_gib=4"' in page.content.decode()
    job = Job.objects.latest("id")
    body = {
        "name": "next", "project": job.project.public_id, "environment": job.environment.public_id,
        "command": ["true"], "gpus_per_task": 4, "memory_mib": 65_536,
    }  # fmt: skip
    preview = client.post("/api/v1/jobs/preview/", body, content_type="application/json").json()
    assert preview["right_size"]["values"] == {"gpus_per_task": 1, "memory_mib": 4096}
    assert (
        client_of("admin")
        .post("/api/v1/jobs/preview/", body, content_type="application/json")
        .json()["right_size"]
        is None
    )


@pytest.mark.parametrize(
    "last",
    [
        {"busy_percent": 90.0, "memory_mib": 9216},
        {"busy_percent": 20.0, "memory_mib": 36_000},
        {"busy_percent": 20.0, "memory_mib": 9216, "seconds": 60},
    ],
    ids=["busy", "full memory", "short"],
)
def test_runs_that_disagree_give_no_advice(client_of, asked, last):
    client = client_of("member")
    asked |= {"memory_gib": "4"}
    for _ in range(2):
        finish_run(client, asked, busy_percent=20.0, memory_mib=9216)
    finish_run(client, asked, **last)
    assert "would do" not in words(client.post(reverse("launch-check"), asked))
