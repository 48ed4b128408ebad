"""A training loop that is killed again and again: each attempt starts from the newest complete checkpoint."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from portal.domain.jobs.reasons import EndReason
from portal.domain.states import AttemptState
from portal.models import Attempt, AttemptWork, Checkpoint, Job, JobEvent
from portal.services.jobs.checkpoints import do_pin_checkpoint
from portal.services.jobs.submission import do_cancel_job, do_resume_from_checkpoint
from portal.services.lifecycle import job_control
from portal.services.lifecycle.job_control import RankPlacement, start_attempt
from scheduler.nodes.checkpoints import is_lowest_rank
from tests import factories
from tests.engine_harness import EngineHarness, InProcessEngine, wait_for

pytestmark = pytest.mark.django_db(transaction=True)

EVERY = 10
"""Steps between two checkpoints."""
TRAIN = """
import os, sys, time, zipfile
folder, steps, pause_s = os.environ["FAIRWAY_CHECKPOINT_DIR"], int(sys.argv[1]), float(sys.argv[2])
os.makedirs(folder, exist_ok=True)
journal = open(os.path.expanduser("~/journal-" + os.environ["FAIRWAY_JOB"]), "a", buffering=1)
step, path = 0, os.environ.get("FAIRWAY_RESUME_FROM")
if path:
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        step = int(archive.read("step"))
print("start", step, file=journal)
while step < steps:
    time.sleep(pause_s)
    step += 1
    print("step", step, file=journal)
    if step % %d == 0:
        with zipfile.ZipFile(f"{folder}/step-{step}.pt", "w") as archive:  # in place, so that a kill cuts it off
            archive.writestr("step", str(step))
            for part in range(10):
                archive.writestr(f"data/{part}", os.urandom(20_000))
                time.sleep(pause_s / 4)
        print("saved", step, file=journal)
        with open(os.environ["FAIRWAY_CHECKPOINT_FILE"], "w") as report:
            report.write(str(step))
""".replace("%d", str(EVERY))


class Training:
    """A node of this machine, and a user who trains on it."""

    def __init__(self, harness: EngineHarness, name: str) -> None:
        self.harness, self.engine = harness, InProcessEngine()
        self.node = harness.mark_enrolled(harness.create_node(name=name, gpus=2), gpus=2)
        self.owner = factories.user("ada")
        self.project = factories.project("vision", member=self.owner)
        self.environment = factories.environment(runtime="process", tool=False)

    def submit(self, steps: int = 1_000_000, pause_s: float = 0.005, **fields: Any) -> Job:
        fields = {"memory_mib": 128, "termination_grace_s": 1, "max_attempts": 20} | fields
        fields.setdefault("retry_on", ["node_failure", "command_failure"])
        command = ["python3", "-c", TRAIN, str(steps), str(pause_s)]
        return factories.job(self.owner, self.project, self.environment, command=command, **fields)

    def until(self, done: Any, within_s: float = 40.0) -> None:
        assert self.engine.run_until(done, within_s), self.engine.last

    def journal(self, job: Job) -> list[tuple[str, int]]:
        path = self.harness.folder / self.node.name / "homes" / "ada" / f"journal-{job.public_id}"
        lines = path.read_text().splitlines() if path.exists() else []
        return [(word, int(number)) for word, _, number in (line.partition(" ") for line in lines) if number]

    def saves(self, job: Job) -> int:
        return [word for word, _ in self.journal(job)].count("saved")

    def folder(self, job: Job) -> Path:
        return self.harness.folder / self.node.name / "homes" / "ada" / "checkpoints" / job.public_id

    def starts(self, job: Job) -> list[int]:
        return [step for word, step in self.journal(job) if word == "start"]

    def started(self, job: Job, attempts: int) -> None:
        self.until(
            lambda: (
                len(self.starts(job)) == attempts
                and Attempt.objects.filter(
                    job=job, number=attempts, state=AttemptState.RUNNING.value
                ).exists()
            )
        )

    def kill(self, job: Job) -> None:
        """Kill the task at once, as the kernel does."""
        names = self.harness.folder.glob(f"{self.node.name}/state/tasks/fw-*-{job.public_id}-*-0/pid.json")
        for path in names:
            with contextlib.suppress(OSError, ValueError, KeyError):
                os.killpg(json.loads(path.read_text())["pid"], signal.SIGKILL)


@pytest.fixture
def training(
    harness: EngineHarness, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Training:
    monkeypatch.setattr("scheduler.snapshot.pending.backoff_s", lambda *given: 0.0)
    return Training(harness, f"r{abs(hash(request.node.name)) % 10**8}")


def campaign(training: Training, job: Job, kills: int, seed: int) -> None:
    """Kill the job at random moments; each attempt starts from the last complete checkpoint, or a later one."""
    moments = random.Random(seed)
    training.started(job, 1)
    for number in range(1, kills + 1):
        begun = len(training.journal(job))
        wait_for("a few steps", lambda begun=begun: len(training.journal(job)) > begun + 3)
        time.sleep(moments.uniform(0.0, 0.4))
        training.kill(job)
        training.started(job, number + 1)
        journal = training.journal(job)
        last_start = max(place for place, (word, _) in enumerate(journal) if word == "start")
        before, resumed = journal[:last_start], journal[last_start][1]
        saved = max((step for word, step in before if word == "saved"), default=0)
        reached = before[-1][1]
        assert saved <= resumed <= reached, (number, before[-5:], resumed)
        assert resumed % EVERY == 0 and reached - resumed <= 2 * EVERY
        attempt = Attempt.objects.get(job=job, number=number + 1)
        assert (attempt.resume_step or 0) == resumed
    assert training.starts(job)[0] == 0 and training.starts(job)[-1] > 0


def test_a_job_that_is_killed_loses_at_most_the_steps_since_its_last_checkpoint(training: Training) -> None:
    job = training.submit()
    campaign(training, job, kills=5, seed=1)
    rows = AttemptWork.objects.filter(attempt__job=job).order_by("attempt__number")
    assert [row.cause for row in rows] == ["failure"] * 5
    for row in rows:
        held = row.attempt.ended_at - row.attempt.created_at
        total = row.startup_gpu_s + row.useful_gpu_s + row.lost_gpu_s
        assert total == pytest.approx(held.total_seconds(), abs=0.5)
    do_cancel_job(training.owner, job)
    training.until(lambda: Job.objects.get(pk=job.pk).state == "CANCELLED")
    assert AttemptWork.objects.get(attempt__job=job, attempt__number=6).cause == "stop"


@pytest.mark.long
@pytest.mark.parametrize("seed", [11, 12, 13])
def test_fifty_kills_lose_at_most_the_steps_since_the_last_checkpoint(training: Training, seed: int) -> None:
    campaign(training, training.submit(), kills=18, seed=seed)


def test_a_checkpoint_cut_off_is_listed_as_broken_and_never_chosen(training: Training) -> None:
    job = training.submit(retry_on=["command_failure"], pause_s=0.05)
    training.started(job, 1)
    wait_for("two checkpoints", lambda: ("saved", 20) in training.journal(job))
    training.kill(job)
    newest = training.folder(job) / "step-20.pt"
    with newest.open("r+b") as stream:
        stream.truncate(newest.stat().st_size // 2)
    training.started(job, 2)
    assert training.starts(job)[1] == 10
    messages = JobEvent.objects.filter(job=job, kind="resume").values_list("message", flat=True)
    assert list(messages) == ["It starts from the checkpoint step-10.pt, step 10."]
    row = Checkpoint.objects.get(job=job, step=20)
    assert (row.validity, row.problem) == ("broken", "step-20.pt is cut off.")


def test_a_preempted_job_and_one_that_is_resumed_start_from_the_newest(training: Training) -> None:
    job = training.submit()
    training.started(job, 1)
    for attempt, reason in ((1, EndReason.PREEMPTED), (2, EndReason.RECLAIMED)):
        count = 2 * attempt
        wait_for("checkpoints", lambda count=count: training.saves(job) >= count)
        job_control.request_stop(Attempt.objects.get(job=job, number=attempt).pk, reason)
        training.started(job, attempt + 1)
        assert training.starts(job)[-1] > 0
    assert {row.cause for row in AttemptWork.objects.filter(attempt__job=job)} == {"preemption"}
    row = AttemptWork.objects.filter(attempt__job=job).earliest("id")
    assert row.useful_gpu_s > 0 and row.lost_gpu_s < row.useful_gpu_s + row.startup_gpu_s + 2


def test_retention_keeps_the_newest_the_multiples_and_the_pinned(training: Training) -> None:
    job = training.submit(steps=100, checkpoint_keep_last=2, checkpoint_keep_every=40, pause_s=0.002)
    training.started(job, 1)
    training.until(lambda: Checkpoint.objects.filter(job=job, validity="valid").exists())
    first = Checkpoint.objects.filter(job=job, validity="valid", removal_requested_at=None).latest("saved_at")
    do_pin_checkpoint(training.owner, first, True)
    training.until(lambda: Job.objects.get(pk=job.pk).state == "COMPLETED")
    kept = {40, 80, 90, 100, first.step}
    assert {row.step for row in Checkpoint.objects.filter(job=job)} == kept
    on_disk = {int(path.stem.partition("-")[2]) for path in training.folder(job).glob("step-*.pt")}
    assert on_disk == kept


def test_a_new_job_starts_from_the_checkpoint_that_was_chosen(training: Training) -> None:
    job = training.submit(steps=35, checkpoint_keep_last=3)
    training.until(lambda: Job.objects.get(pk=job.pk).state == "COMPLETED")
    row = AttemptWork.objects.get(attempt__job=job)
    assert (row.cause, row.lost_gpu_s) == ("", 0.0) and row.useful_gpu_s > 0
    chosen = Checkpoint.objects.get(job=job, step=20)
    again = do_resume_from_checkpoint(training.owner, chosen)
    chosen.refresh_from_db()
    assert chosen.pinned_by == "ada" and again.resume_from == chosen.public_id
    training.until(lambda: Job.objects.get(pk=again.pk).state == "COMPLETED")
    assert training.starts(again) == [20]
    attempt = again.attempts.get()
    assert (attempt.resume_step, attempt.resume_path) == (20, f"checkpoints/{job.public_id}/step-20.pt")
    assert {row.step for row in Checkpoint.objects.filter(job=again)} == {30}


def test_a_job_whose_chosen_checkpoint_is_gone_fails_with_a_clear_reason(training: Training) -> None:
    job = training.submit(steps=15)
    training.until(lambda: Job.objects.get(pk=job.pk).state == "COMPLETED")
    again = do_resume_from_checkpoint(training.owner, Checkpoint.objects.get(job=job))
    Job.objects.filter(pk=again.pk).update(retry_on=[])
    (training.folder(job) / "step-10.pt").unlink()
    training.until(lambda: Job.objects.get(pk=again.pk).state == "FAILED")
    again.refresh_from_db()
    assert again.reason == "start_refused" and "is no longer there, or is not complete" in again.message
    assert training.starts(again) == []


@pytest.mark.parametrize(("min_tasks", "lists"), [(None, False), (1, True)], ids=["gang", "elastic"])
def test_after_the_end_of_rank_0_another_rank_lists_checkpoints_of_elastic_jobs_only(
    min_tasks: int | None, lists: bool
) -> None:
    """The home of another node would be without them, and the list of a gang would become empty."""
    pool, owner = factories.pool(), factories.user()
    placements = [RankPlacement(factories.node(pool), ()) for _ in range(2)]
    project = factories.project(member=owner)
    job = factories.job(owner, project, factories.environment(tool=False), tasks=2, min_tasks=min_tasks)
    attempt = start_attempt(job, pool, placements, epoch=1)
    first, second = attempt.task_rows.select_related("attempt__job").order_by("rank")
    assert is_lowest_rank(first) and not is_lowest_rank(second)
    attempt.task_rows.filter(pk=first.pk).update(container_removed=True)
    assert is_lowest_rank(second) is lists


def test_folders_are_listed_when_the_end_is_reported_before_the_start_is_recorded(
    harness: EngineHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Training(harness, "early")
    monkeypatch.setattr(job_control, "record_task_running", lambda *_, **__: None)
    job = training.submit(steps=EVERY, pause_s=0.0)
    training.until(Attempt.objects.filter(job=job, ended_at__isnull=False).exists)
    task = Attempt.objects.get(job=job).task_rows.get()
    assert task.running_at is None
    assert list(Checkpoint.objects.filter(job=job).values_list("name", flat=True)) == [f"step-{EVERY}.pt"]
