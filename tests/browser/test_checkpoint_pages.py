"""The checkpoints, ranks and GPU time of a job in a browser: readable for everybody, and a pin is a click."""

from __future__ import annotations

import datetime as dt

import pytest
from django.utils import timezone

from portal.models import AttemptWork, Checkpoint, Job, RankProgress
from tests.browser.test_accessibility import look_at
from tests.web.dataset import Dataset

pytestmark = [pytest.mark.browser, pytest.mark.django_db(transaction=True)]


@pytest.fixture
def job(dataset: Dataset) -> Job:
    """A job of several ranks, the last of which is slow, with checkpoints of every kind and work that was lost."""
    job = Job.objects.get(pk=dataset.jobs["vit-h-pretrain"].pk)
    now = timezone.now()
    for number, validity in enumerate(("valid", "broken", "valid", "unchecked", "valid")):
        Checkpoint.objects.create(
            job=job, name=f"epoch=3-step={150_000 - 2500 * number}.ckpt", step=150_000 - 2500 * number,
            size_bytes=9_400_000_000, saved_at=now - dt.timedelta(minutes=15 + 16 * number), validity=validity,
            problem="It is cut off." if validity == "broken" else "",
        )  # fmt: skip
    Job.objects.filter(pk=job.pk).update(checkpoint_keep_last=3, checkpoint_keep_every=50_000)
    attempt = job.attempts.latest("number")
    for rank in range(job.tasks):
        busy_s = 0.44 if rank == job.tasks - 1 else 0.36
        reports = [[now.timestamp() - 30 * (60 - n), 80.0 * n, 80.0 * n * busy_s] for n in range(61)]
        RankProgress.objects.create(attempt=attempt, rank=rank, reports=reports)
    for number, cause in enumerate(("node", "preemption", "")):
        other = list(Job.objects.exclude(attempts=None).exclude(pk=job.pk).order_by("pk"))[number]
        AttemptWork.objects.create(
            attempt=other.attempts.first(), project=other.project, user=job.owner,
            pool=other.attempts.first().pool, ended_at=now, cause=cause, startup_gpu_s=700, useful_gpu_s=90_000,
            lost_gpu_s=14_400 if cause else 0,
        )  # fmt: skip
    return job


@pytest.mark.parametrize(("dark", "width"), [(False, 1280), (True, 1280), (False, 390)])
def test_the_pages_pass_axe(open_as, job: Job, dark: bool, width: int) -> None:
    page = open_as("m-okafor", dark=dark, width=width)
    addresses = [f"/jobs/{job.public_id}/checkpoints/", f"/jobs/{job.public_id}/ranks/", "/usage/"]
    addresses += [f"{addresses[1]}?by=gpu"]
    assert look_at(page, addresses) == ""
    page.goto(addresses[1])
    assert page.get_by_role("heading", name="Rank 1 on h200-2 is 22 % slower.").is_visible()
    for address in addresses:
        page.goto(address)
        panel = page.locator("section.fw-panel").first
        inside = "(panel) => [...panel.querySelectorAll('button')].every((each) => "
        inside += "each.getBoundingClientRect().right <= panel.getBoundingClientRect().right)"
        assert panel.evaluate(inside), address


def test_a_checkpoint_is_pinned_with_a_click(open_as, job: Job) -> None:
    page = open_as("m-okafor")
    page.goto(f"/jobs/{job.public_id}/checkpoints/")
    page.get_by_role("button", name="Pin epoch=3-step=145000.ckpt").click()
    page.get_by_role("button", name="Unpin epoch=3-step=145000.ckpt").wait_for()
    assert page.get_by_text("pinned by m-okafor").count() == 1
    assert page.get_by_role("link", name="Resume from here epoch=3-step=147500.ckpt").count() == 0
    page.get_by_role("link", name="Resume from here epoch=3-step=145000.ckpt").click()
    page.get_by_role("radio", name="In place of this one").check()
    page.get_by_role("heading", name="Resume from step 145,000").wait_for()
