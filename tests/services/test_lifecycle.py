"""The one writer of state: GPUs move with attempts, are released on proof only, and cancel is clean."""

from __future__ import annotations

import threading

import pytest
from django.db import IntegrityError, connection, transaction

from portal.domain.reasons import EndReason
from portal.domain.states import ATTEMPT_TRANSITIONS, JOB_TRANSITIONS, AttemptState, JobState
from portal.errors import Conflict
from portal.models import Allocation, Attempt, Gpu, Job, JobEvent, UsageInterval
from portal.services.lifecycle import job_control
from portal.services.lifecycle.job_control import RankPlacement
from tests import factories

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def scene():
    return factories.basic_cluster()


def submit(scene, **fields) -> Job:
    return factories.job(scene["owner"], scene["project"], scene["environment"], **fields)


def place(scene, job: Job, *, milli: int = 1000, gpus: list[Gpu] | None = None) -> Attempt:
    gpus = gpus or list(scene["node"].gpus.all())
    with transaction.atomic():
        row = Job.objects.select_for_update().get(pk=job.pk)
        seats = [
            RankPlacement(
                scene["node"],
                [(gpus[rank * job.gpus_per_task + i].pk, milli) for i in range(job.gpus_per_task)],
            )
            for rank in range(job.tasks)
        ]
        return job_control.start_attempt(row, scene["pool"], seats, epoch=1)


def run(attempt: Attempt) -> list[int]:
    ids = list(attempt.task_rows.values_list("pk", flat=True))
    for task in attempt.task_rows.all():
        assert job_control.mark_task_sent(task)
        job_control.record_task_running(task.pk, container=f"fw-{task.pk}", ports={})
    return ids


def used(scene) -> list[int]:
    return list(scene["node"].gpus.values_list("used_milli", flat=True))


def test_a_job_runs_and_completes(scene):
    job = submit(scene, gpus_per_task=2)
    attempt = place(scene, job)
    assert used(scene) == [1000, 1000, 0, 0]
    (task,) = run(attempt)
    attempt.refresh_from_db()
    assert attempt.state == AttemptState.RUNNING
    job_control.record_task_ended(task, exit_code=0, reason=EndReason.COMPLETED)
    job.refresh_from_db()
    assert (job.state, job.exit_code) == (JobState.COMPLETED, 0)
    assert used(scene) == [0, 0, 0, 0]
    ledger = UsageInterval.objects.filter(job=job)
    assert len(ledger) == 2
    assert all(row.ended_at and row.started_at == row.allocation.started_at for row in ledger)
    states = list(JobEvent.objects.filter(job=job, kind="job_state").values_list("after", flat=True))
    assert states == ["RUNNING", "COMPLETED"]


def test_a_gpu_is_never_given_twice(scene):
    first, second = submit(scene), submit(scene)
    place(scene, first)
    with pytest.raises(IntegrityError):
        place(scene, second)
    second.refresh_from_db()
    assert second.state == JobState.PENDING
    assert Allocation.objects.filter(task__attempt__job=second).count() == 0


def test_shares_fill_a_gpu_and_no_more(scene):
    gpu = [scene["node"].gpus.first()]
    for _ in range(2):
        place(scene, submit(scene, milli_per_gpu=400), milli=400, gpus=gpu)
    with pytest.raises(IntegrityError):
        place(scene, submit(scene, milli_per_gpu=400), milli=400, gpus=gpu)
    with pytest.raises(IntegrityError):
        place(scene, submit(scene), gpus=gpu)
    assert used(scene)[0] == 800


def test_two_schedulers_at_once_seat_one_job(scene):
    gpu = [scene["node"].gpus.first()]
    jobs = [submit(scene) for _ in range(2)]
    barrier, outcomes = threading.Barrier(2), []

    def seat(job: Job) -> None:
        barrier.wait()
        try:
            place(scene, job, gpus=gpu)
            outcomes.append("seated")
        except IntegrityError:
            outcomes.append("refused")
        finally:
            connection.close()

    threads = [threading.Thread(target=seat, args=(job,)) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == ["refused", "seated"]


def test_cancel_before_a_start_went_out_ends_at_once(scene):
    job = submit(scene)
    attempt = place(scene, job)
    job_control.cancel_job(job.pk, EndReason.CANCELLED_BY_USER, actor="ada")
    job.refresh_from_db()
    assert job.state == JobState.CANCELLED
    assert not job_control.mark_task_sent(attempt.task_rows.get())
    assert Allocation.objects.get(task__attempt=attempt).proof == "never_started"


def test_cancel_holds_the_gpu_until_the_node_says_gone(scene):
    job = submit(scene)
    (task,) = run(place(scene, job))
    job_control.cancel_job(job.pk, EndReason.CANCELLED_BY_USER, actor="ada")
    job.refresh_from_db()
    assert job.state == JobState.RUNNING
    assert used(scene)[0] == 1000
    # the node may still answer an old start: it changes nothing
    job_control.record_task_running(task, container="late", ports={})
    job_control.record_task_ended(task, exit_code=143, reason=EndReason.EXIT_CODE)
    job.refresh_from_db()
    assert job.state == JobState.CANCELLED
    assert used(scene)[0] == 0


def test_an_ended_job_stays_what_it_was(scene):
    job = submit(scene)
    (task,) = run(place(scene, job))
    job_control.record_task_ended(task, exit_code=3, reason=EndReason.EXIT_CODE)
    job_control.cancel_job(job.pk, EndReason.CANCELLED_BY_USER, actor="ada")
    job.refresh_from_db()
    assert (job.state, job.exit_code, job.message) == (
        JobState.FAILED,
        3,
        "The command ended with exit code 3.",
    )


def test_an_end_told_twice_counts_once(scene):
    job = submit(scene)
    (task,) = run(place(scene, job))
    for _ in range(3):
        job_control.record_task_ended(task, exit_code=0, reason=EndReason.COMPLETED)
    assert used(scene)[0] == 0
    assert JobEvent.objects.filter(job=job, after="COMPLETED", kind="job_state").count() == 1


def test_a_gang_fails_as_one(scene):
    job = submit(scene, tasks=2)
    attempt = place(scene, job)
    first, second = run(attempt)
    job_control.record_task_ended(first, exit_code=1, reason=EndReason.EXIT_CODE)
    attempt.refresh_from_db()
    assert attempt.state == AttemptState.COMPLETING
    assert used(scene)[:2] == [0, 1000]
    job_control.record_task_ended(second, exit_code=137, reason=EndReason.EXIT_CODE)
    job.refresh_from_db()
    assert (job.state, job.exit_code) == (JobState.FAILED, 1)
    assert used(scene) == [0, 0, 0, 0]


def test_a_reboot_sends_the_job_back_until_its_tries_are_used(scene):
    job = submit(scene, max_attempts=2)
    for state in [JobState.PENDING, JobState.FAILED]:
        (task,) = run(place(scene, job))
        job_control.record_task_ended(task, exit_code=None, reason=EndReason.NODE_REBOOTED, proof="rebooted")
        job.refresh_from_db()
        assert job.state == state
    assert [a.state for a in job.attempts.all()] == [AttemptState.NODE_FAIL] * 2
    assert scene["node"].name in job.message


def test_giving_back_does_not_use_up_tries(scene):
    job = submit(scene, max_attempts=1)
    for _ in range(3):
        attempt = place(scene, job)
        (task,) = run(attempt)
        job_control.request_stop(attempt.pk, EndReason.RECLAIMED)
        job_control.record_task_ended(task, exit_code=143, reason=EndReason.EXIT_CODE)
        job.refresh_from_db()
        assert job.state == JobState.PENDING
    assert job.attempt_count == 3


def test_a_held_job_is_not_placed(scene):
    job = submit(scene)
    job_control.set_job_held(job.pk, True, actor="ada")
    with pytest.raises(Conflict):
        place(scene, job)


@pytest.mark.parametrize(
    ("table", "moves"),
    [
        ("portal_job", JOB_TRANSITIONS),
        ("portal_attempt", ATTEMPT_TRANSITIONS),
        ("portal_task", ATTEMPT_TRANSITIONS),
    ],
)
def test_the_database_refuses_just_what_the_tables_refuse(scene, table, moves):
    job = submit(scene)
    attempt = place(scene, job)
    ids = {"portal_job": job.pk, "portal_attempt": attempt.pk, "portal_task": attempt.task_rows.get().pk}
    for old in moves:
        for new in moves:
            if old == new:
                continue
            with connection.cursor() as cursor, transaction.atomic():
                cursor.execute(f"ALTER TABLE {table} DISABLE TRIGGER {table}_transitions")
                cursor.execute(f"UPDATE {table} SET state = %s WHERE id = %s", [old.value, ids[table]])
                cursor.execute(f"ALTER TABLE {table} ENABLE TRIGGER {table}_transitions")
            allowed = True
            try:
                with connection.cursor() as cursor, transaction.atomic():
                    cursor.execute(f"UPDATE {table} SET state = %s WHERE id = %s", [new.value, ids[table]])
            except IntegrityError:
                allowed = False
            assert allowed == (new in moves[old]), f"{table}: {old} -> {new}"
