"""When attempts saved their work: what nodes tell is written down forward only, seldom, and without events."""

from __future__ import annotations

import datetime as dt
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from django.db import connection, transaction
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import reverse
from django.utils import timezone

from agents.engines.replies import ListedCheckpoint
from portal.domain.jobs.reasons import EndReason
from portal.errors import Conflict
from portal.models import Attempt, Checkpoint, Job, JobEvent
from portal.selectors.jobs.checkpoints import next_checkpoint_at, resume_choice
from portal.selectors.jobs.jobs import list_attempts
from portal.services.cluster.demo import SCRIPT
from portal.services.jobs import submission
from portal.services.jobs.checkpoints import (
    do_check_checkpoints,
    listing_is_due,
    record_listing,
    record_newest,
)
from portal.services.jobs.submission import do_resume_from_checkpoint
from portal.services.jobs.task_reports import MIN_UPDATE_INTERVAL, record_checkpoint, record_progress
from portal.services.lifecycle import job_control
from portal.services.lifecycle.job_control import RankPlacement
from tests import factories

pytestmark = pytest.mark.django_db(transaction=True)

SECOND = dt.timedelta(seconds=1)


@pytest.fixture
def attempt() -> Attempt:
    """One that has run for an hour."""
    dataset = factories.basic_cluster()
    job = factories.job(dataset["owner"], dataset["project"], dataset["environment"])
    gpu = dataset["node"].gpus.first()
    with transaction.atomic():
        row = Job.objects.select_for_update().get(pk=job.pk)
        made = job_control.start_attempt(
            row, dataset["pool"], [RankPlacement(dataset["node"], [(gpu.pk, 1000)])], epoch=1
        )
    task = made.task_rows.get()
    assert job_control.mark_task_sent(task)
    job_control.record_task_running(task.pk, container="c", ports={}, at=timezone.now() - 3600 * SECOND)
    return read(made)


def read(attempt: Attempt) -> Attempt:
    return Attempt.objects.select_related("job").get(pk=attempt.pk)


def test_the_age_counts_from_the_time_of_the_poll(attempt: Attempt) -> None:
    now = timezone.now()
    assert record_checkpoint(attempt, 90.0, polled_at=now)
    assert read(attempt).checkpoint_at == now - 90 * SECOND


@pytest.mark.parametrize(("ago_s", "is_s"), [(-5.0, 0.0), (0.0, 0.0), (10_000.0, 3600.0), (1e15, 3600.0)])
def test_a_checkpoint_is_not_in_the_future_or_before_the_start(
    attempt: Attempt, ago_s: float, is_s: float
) -> None:
    assert attempt.running_at
    now = attempt.running_at + 3600 * SECOND
    assert record_checkpoint(attempt, ago_s, polled_at=now)
    assert read(attempt).checkpoint_at == now - is_s * SECOND


def test_checkpoints_only_advance_and_are_stored_at_most_twice_a_minute(attempt: Attempt) -> None:
    began, written = timezone.now(), []
    for tick in range(120):  # it saves all the time, and its node is asked every second
        if record_checkpoint(read(attempt), 0.0, polled_at=began + tick * SECOND):
            written.append(tick)
    assert written == [0, 30, 60, 90]
    last = read(attempt).checkpoint_at
    assert last == began + 90 * SECOND
    assert not record_checkpoint(
        read(attempt), 600.0, polled_at=began + 120 * SECOND
    )  # its clock was set back
    assert read(attempt).checkpoint_at == last
    assert all(later - earlier >= MIN_UPDATE_INTERVAL.total_seconds() for earlier, later in pairwise(written))


def test_two_nodes_of_a_gang_do_not_undo_each_other(attempt: Attempt) -> None:
    now, stale = timezone.now(), read(attempt)
    assert record_checkpoint(attempt, 10.0, polled_at=now)
    assert not record_checkpoint(stale, 300.0, polled_at=now)  # as the other one read it before
    assert read(attempt).checkpoint_at == now - 10 * SECOND


def test_a_known_checkpoint_needs_no_query(attempt: Attempt) -> None:
    now = timezone.now()
    record_checkpoint(attempt, 60.0, polled_at=now)
    known = read(attempt)
    with CaptureQueriesContext(connection) as queries:
        assert not record_checkpoint(known, 70.0, polled_at=now + 10 * SECOND)
    assert len(queries) == 0


def test_a_checkpoint_writes_no_event_and_does_not_change_the_job(attempt: Attempt) -> None:
    events, version = JobEvent.objects.count(), attempt.job.version
    assert record_checkpoint(attempt, 1.0, polled_at=timezone.now())
    assert JobEvent.objects.count() == events
    assert read(attempt).job.version == version


def test_attempts_that_do_not_run_report_nothing(attempt: Attempt) -> None:
    now = timezone.now()
    job_control.record_task_ended(attempt.task_rows.get().pk, exit_code=0, reason=EndReason.COMPLETED)
    assert not record_checkpoint(attempt, 1.0, polled_at=now)  # as it was read before it ended
    waiting = read(attempt)
    waiting.running_at = None
    assert not record_checkpoint(waiting, 1.0, polled_at=now)
    assert read(attempt).checkpoint_at is None


@pytest.mark.parametrize("reported", [True, False])
def test_demo_training_reports_checkpoints_and_progress(tmp_path: Path, reported: bool) -> None:
    file = tmp_path / "checkpoint"
    file.touch()
    os.utime(file, (0, 0))
    progress = tmp_path / "progress"
    own = {"FAIRWAY_CHECKPOINT_FILE": str(file), "FAIRWAY_PROGRESS_FILE": str(progress)} if reported else {}
    ran = subprocess.run(
        [sys.executable, "-c", SCRIPT, "1"], env=own, capture_output=True, text=True, timeout=60, check=True
    )
    assert "saved the last checkpoint" in ran.stdout
    assert (file.stat().st_mtime > 0) is reported
    assert (progress.read_text() == "1") if reported else not progress.exists()


def listed(attempt: Attempt, ago_s: float, step: int) -> ListedCheckpoint:
    saved_s = (timezone.now() - ago_s * SECOND).timestamp()
    return ListedCheckpoint(f"step-{step}.pt", step, 1000, saved_s, "valid")


def test_the_last_checkpoint_of_a_run_is_taken_from_the_listing_without_a_report(
    attempt: Attempt,
) -> None:
    record_newest(attempt, listed(attempt, 20.0, 7))
    assert read(attempt).checkpoint_at is None, "a program that reports none is not taken to save its work"
    assert record_checkpoint(attempt, 20.0, 7, polled_at=timezone.now())
    record_newest(attempt, listed(attempt, 5.0, 8))  # too soon after the report to be reported again
    assert read(attempt).checkpoint_step == 8
    for each in (listed(attempt, 60.0, 6), listed(attempt, -60.0, 9), None):
        record_newest(attempt, each)
        assert read(attempt).checkpoint_step == 8


def saved(attempt: Attempt, *minutes_ago: float, step: int = 100) -> list[Checkpoint]:
    """Valid checkpoints of the job, the newest first."""
    return [
        Checkpoint.objects.create(
            job=attempt.job, name=f"step-{step - number}.pt", step=step - number, size_bytes=1, validity="valid",
            saved_at=timezone.now() - 60 * ago * SECOND,
        )
        for number, ago in enumerate(minutes_ago)
    ]  # fmt: skip


def test_the_next_checkpoint_is_expected_after_the_median_interval(attempt: Attempt) -> None:
    rows = saved(attempt, 5, 15, 25, 50)
    found = next_checkpoint_at(rows, attempt)
    assert found is not None and abs(found - rows[0].saved_at - 600 * SECOND) < SECOND
    assert next_checkpoint_at(rows[:1], attempt) is None and next_checkpoint_at(rows, None) is None
    Attempt.objects.filter(pk=attempt.pk).update(running_at=timezone.now() - 360 * SECOND)
    assert next_checkpoint_at(rows, read(attempt)) is None  # the others are of an earlier attempt


def test_a_checkpoint_to_resume_from_says_what_is_dropped(attempt: Attempt) -> None:
    row, older = saved(attempt, 30, 90)
    (shown,) = list_attempts(attempt.job)
    choice = resume_choice([row, older], row.public_id, attempt.job, shown)
    assert choice is not None and choice.is_live and choice.dropped_units is None
    assert choice.dropped_gpu_s == pytest.approx(1800, abs=60)
    assert record_progress(shown, 0, 120.0, 0.0, polled_at=timezone.now())
    (shown,) = list_attempts(attempt.job)
    choice = resume_choice([row, older], row.public_id, attempt.job, shown)
    assert choice is not None and choice.dropped_units == 20.0
    Checkpoint.objects.filter(pk=row.pk).update(validity="broken")
    row.refresh_from_db()
    assert resume_choice([row], row.public_id, attempt.job, shown) is None
    assert resume_choice([row], "none", attempt.job, shown) is None


def test_a_job_is_resumed_in_place_of_the_running_one(attempt: Attempt) -> None:
    row, _ = saved(attempt, 30, 90)
    owner = attempt.job.owner
    beside = do_resume_from_checkpoint(owner, row)
    assert beside.resume_from == row.public_id and read(attempt).stop_requested_at is None
    again = do_resume_from_checkpoint(owner, row, in_place=True)
    assert again.resume_from == row.public_id
    assert Job.objects.get(pk=attempt.job_id).desired_state == "cancelled"
    assert read(attempt).stop_reason == EndReason.CANCELLED_BY_USER
    with pytest.raises(Conflict, match="being stopped"):
        do_resume_from_checkpoint(owner, row, in_place=True)
    assert Job.objects.filter(resume_from=row.public_id).count() == 2


def test_a_resume_in_place_leaves_no_second_job_if_the_first_cannot_be_stopped(
    attempt: Attempt, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError

    row, _ = saved(attempt, 30, 90)
    monkeypatch.setattr(submission, "do_cancel_job", fail)
    with pytest.raises(RuntimeError):
        do_resume_from_checkpoint(attempt.job.owner, row, in_place=True)
    assert Job.objects.get().desired_state == "run"


def test_checkpoints_are_checked_again_on_request(attempt: Attempt) -> None:
    owner, job = attempt.job.owner, attempt.job
    with pytest.raises(Conflict, match="once it has reported one"):
        do_check_checkpoints(owner, job)
    record_checkpoint(attempt, 90.0, polled_at=timezone.now())
    record_listing(read(attempt), [], "", asked_at=timezone.now())
    shown = Attempt.objects.select_related("observation")
    assert not listing_is_due(shown.get(pk=attempt.pk))
    do_check_checkpoints(owner, job)
    assert listing_is_due(shown.get(pk=attempt.pk))


def test_the_page_offers_both_ways_to_resume(attempt: Attempt) -> None:
    row, _ = saved(attempt, 10, 20)
    record_checkpoint(attempt, 600.0, polled_at=timezone.now())
    client = Client()
    client.force_login(attempt.job.owner)
    address = reverse("job-checkpoints", args=[attempt.job.public_id])
    Attempt.objects.filter(pk=attempt.pk).update(created_at=timezone.now() - 3620 * SECOND)
    page = client.get(address).content.decode()
    assert "next about" in page or "expected about" in page
    assert "Check now" in page and "In place of this one" not in page and "Its start took" in page
    page = client.get(f"{address}?from={row.public_id}").content.decode()
    assert "Resume from step 100" in page and "In place of this one" in page
    client.post(reverse("checkpoint-resume", args=[row.public_id]), {"in_place": "1"})
    assert Job.objects.get(pk=attempt.job_id).desired_state == "cancelled"
    answer = client.post(reverse("job-checkpoints-check", args=[attempt.job.public_id]), follow=True)
    assert answer.status_code == 200
