"""One function per figure: pages that show the same figure show the same text."""

from __future__ import annotations

import datetime as dt
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from django.conf import settings
from django.urls import reverse
from django.utils import timezone

from portal.models import Allocation, Attempt, Checkpoint, Gpu, Job, Node, NodeMetricsMinute, Task
from portal.selectors.nodes.metric_series import read_job_series, recent_gpu_use
from portal.selectors.reports.report import ReportRow
from portal.web.display.formatting import gpu_hours
from portal.web.display.navigation import NAVIGATION


class _Shown(HTMLParser):
    """The text of a page that a reader sees, without titles, fields and choices of fields."""

    def __init__(self) -> None:
        super().__init__()
        self.text = ""
        self._hidden = 0

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self._hidden += tag in ("script", "style", "template")

    def handle_endtag(self, tag: str) -> None:
        self._hidden -= tag in ("script", "style", "template")

    def handle_data(self, data: str) -> None:
        self.text += "" if self._hidden else f"{data} "


def shown(page: str) -> str:
    parser = _Shown()
    parser.feed(page)
    return re.sub(r"\s+", " ", parser.text.replace("\xa0", " "))


@pytest.mark.parametrize(
    ("hours", "text"),
    [
        (0, "0"), (1e-6, "<0.001"), (0.001, "0.001"), (0.05, "0.05"), (0.1049, "0.1"), (0.994, "0.99"),
        (0.999, "1.0"), (1.64, "1.6"), (99.94, "99.9"), (99.96, "100"), (12345.6, "12,346"),
    ],
)  # fmt: skip
def test_gpu_time_has_one_unit(hours: float, text: str) -> None:
    assert gpu_hours(hours).replace("\xa0", " ") == f"{text} GPU-h"


def test_every_template_rounds_gpu_time_by_the_same_rule() -> None:
    written = {
        (path.name, found[0])
        for path in Path(settings.BASE_DIR, "templates").rglob("*.html")
        for found in re.finditer(r"(?:gpu_hours|gpu_seconds|gpu_s)\|(\w+)", path.read_text())
        if found[1] not in ("gpu_hours", "gpu_hours_amount", "gpu_time")
    }
    assert written == set()


def test_part_of_a_few_minutes_is_not_given_in_percent() -> None:
    small = ReportRow("a", "a", useful_gpu_hours=0.04, lost_gpu_hours=0.01, measured_gpu_hours=0.05)
    large = ReportRow("a", "a", useful_gpu_hours=3, lost_gpu_hours=1, measured_gpu_hours=4, idle_gpu_hours=1)
    assert (small.lost_percent, small.idle_percent) == (None, None)
    assert (large.lost_percent, large.idle_percent) == (25, 25)


def ended_attempt(job: Job, number: int, queued_s: int, ran_s: int) -> Attempt:
    """An attempt that was placed, started after a pull, and ran for a time."""
    began = timezone.now() - dt.timedelta(hours=3 - number)
    running = began + dt.timedelta(seconds=queued_s)
    return Attempt.objects.create(
        job=job, number=number, state="FAILED", pool_id=job.attempts.first().pool_id, leader_epoch=1,
        created_at=began, queued_at=began, running_at=running, ended_at=running + dt.timedelta(seconds=ran_s),
    )  # fmt: skip


def test_the_run_time_of_a_job_is_that_of_its_programs_on_every_page(dataset, client_of) -> None:
    job = dataset.jobs["dino-abl-b128"]
    last = job.attempts.get()
    last.running_at, last.ended_at = last.created_at, last.created_at + dt.timedelta(seconds=90)
    last.number = 2
    last.save(update_fields=["running_at", "ended_at", "number"])
    ended_attempt(job, 1, queued_s=500, ran_s=31)
    Job.objects.filter(pk=job.pk).update(attempt_count=2)
    client = client_of("member")
    listed = shown(client.get(f"{reverse('jobs')}?q={job.name}&show=all").content.decode())
    assert "2 min 1 s" in listed
    assert "ran 2 min 1 s, ended" in shown(client.get(reverse("job", args=[job.public_id])).content.decode())
    attempts = shown(client.get(reverse("job-checkpoints", args=[job.public_id])).content.decode())
    assert "31 s" in attempts and "1 min 30 s" in attempts


def test_the_last_checkpoint_is_the_same_on_every_page(dataset, client_of) -> None:
    job = dataset.jobs["vit-h-pretrain"]
    last = job.attempts.order_by("-number").first()
    now = timezone.now()
    Attempt.objects.filter(pk=last.pk).update(
        checkpoint_at=now - dt.timedelta(minutes=45),
        checkpoint_step=45,
        running_at=now - dt.timedelta(hours=2),
    )
    Checkpoint.objects.filter(job=job).delete()
    for step, minutes, validity in ((30, 60, "valid"), (60, 5, "broken")):
        Checkpoint.objects.create(
            job=job, name=f"step-{step}", step=step, size_bytes=1, validity=validity,
            saved_at=now - dt.timedelta(minutes=minutes),
        )  # fmt: skip
    client = client_of("member")
    overview = shown(client.get(reverse("job", args=[job.public_id])).content.decode())
    lost = re.search(r"step 30 ?, ([\d.,]+ GPU-h) lost if it stopped now", overview)
    assert lost, overview
    page = shown(client.get(reverse("job-checkpoints", args=[job.public_id])).content.decode())
    assert f"If it stopped now {lost[1]} lost" in page and "step 45" not in overview + page


def test_the_chart_of_an_ended_job_has_no_minutes_after_its_gpus_were_free(dataset) -> None:
    job = dataset.jobs["dino-abl-b128"]
    attempt = job.attempts.get()
    task = Task.objects.get(attempt=attempt, rank=0)
    minute = timezone.now().replace(second=0, microsecond=0) - dt.timedelta(minutes=20)
    attempt.created_at = attempt.running_at = minute + dt.timedelta(seconds=20)
    attempt.ended_at = minute + dt.timedelta(minutes=9, seconds=30)
    attempt.save(update_fields=["created_at", "running_at", "ended_at"])
    held = Allocation.objects.filter(task=task)
    held.update(started_at=attempt.created_at, ended_at=attempt.ended_at, proof="gone")
    gpu = held.first().gpu
    NodeMetricsMinute.objects.filter(node=task.node).delete()
    for passed in range(15):
        held_s = {0: 40, 9: 30}.get(passed, 60 if passed < 9 else 0)
        NodeMetricsMinute.objects.create(
            node=task.node, minute=minute + dt.timedelta(minutes=passed), gpu_uuids=[gpu.uuid], samples=60,
            utilisation_percent=[held_s / 60 * 90], memory_used_mib=[1], power_watts=[1], temperature_c=[1],
            energy_joules=[1], tasks=[],
        )  # fmt: skip
    job.attempt_count = attempt.number
    series = read_job_series(job.owner, job, minute - dt.timedelta(minutes=5))
    assert series.gpus[0].utilisation_percent == [90.0] * 8

    # a GPU that an elastic job releases earlier is another's from then on
    held.filter(gpu=gpu).update(started_at=attempt.created_at + dt.timedelta(minutes=2))
    released = held.exclude(gpu=gpu)
    released.update(ended_at=attempt.created_at + dt.timedelta(minutes=3))
    other = released.first().gpu
    NodeMetricsMinute.objects.filter(node=task.node).update(
        gpu_uuids=[gpu.uuid, other.uuid], utilisation_percent=[90, 50], energy_joules=[1, 1],
        memory_used_mib=[1, 1], power_watts=[1, 1], temperature_c=[1, 1],
    )  # fmt: skip
    series = read_job_series(job.owner, job, minute - dt.timedelta(minutes=5))
    found = {each.uuid: each.utilisation_percent for each in series.gpus}
    assert found[gpu.uuid] == [None] * 2 + [90.0] * 6
    assert found[other.uuid] == [50.0] * 2 + [None] * 6
    assert series.energy_joules == 8


def test_the_recent_use_of_a_job_is_not_that_of_the_holder_before(dataset) -> None:
    attempt = dataset.jobs["vit-h-pretrain"].attempts.get()
    held = Allocation.objects.filter(task__attempt=attempt, ended_at=None)
    minute = timezone.now().replace(second=0, microsecond=0)
    held.update(started_at=minute - dt.timedelta(minutes=6, seconds=30))
    gpu = held.first().gpu
    NodeMetricsMinute.objects.all().delete()
    for passed, percent in ((8, 90), (7, 45), (6, 10), (5, 10)):
        NodeMetricsMinute.objects.create(
            node=gpu.node, minute=minute - dt.timedelta(minutes=passed), gpu_uuids=[gpu.uuid], samples=60,
            utilisation_percent=[percent], memory_used_mib=[1], power_watts=[1], temperature_c=[1],
            energy_joules=[1], tasks=[],
        )  # fmt: skip
    assert [percent for _, percent in recent_gpu_use([attempt])[attempt.pk].points] == [10, 10]


def test_every_page_has_one_name_for_a_gpu_model(dataset, client_of) -> None:
    models = set(Gpu.objects.values_list("model", flat=True))
    assert "NVIDIA A100-SXM4-80GB" in models
    client = client_of("admin")  # the request of a job is shown as REST names it
    addresses = [reverse(item.view) for group in NAVIGATION.values() for item in group]
    addresses += [reverse("node", args=[node.public_id]) for node in Node.objects.all()[:2]]
    addresses += [
        reverse(page, args=[job.public_id])
        for page in ("job", "job-metrics", "job-checkpoints", "job-ranks", "job-change")
        for job in dataset.jobs.values()
    ]
    long_names, opened = set(), 0
    for address in addresses:
        answer = client.get(address)
        if answer.status_code == 200:
            opened += 1
            text = shown(answer.content.decode())
            long_names |= {(address, model) for model in models if model in text}
    assert opened > 40 and long_names == set()
