"""The one writer of state: GPUs move with attempts, are released on proof only, and cancel is clean."""

from __future__ import annotations

import threading

import pytest
from django.db import IntegrityError, connection, transaction
from django.test.utils import CaptureQueriesContext

from portal.domain.jobs.reasons import EndReason
from portal.domain.states import ATTEMPT_TRANSITIONS, JOB_TRANSITIONS, AttemptState, JobState
from portal.errors import Conflict
from portal.models import Allocation, Attempt, AttemptWork, Gpu, Job, JobEvent, UsageInterval
from portal.services.lifecycle import job_control
from portal.services.lifecycle.job_control import RankPlacement, TaskEnd
from tests import factories
from tests.table_owner import execute_as_owner

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def dataset():
    return factories.basic_cluster()


def submit(dataset, **fields) -> Job:
    return factories.job(dataset["owner"], dataset["project"], dataset["environment"], **fields)


def place(dataset, job: Job, *, milli: int = 1000, gpus: list[Gpu] | None = None) -> Attempt:
    gpus = gpus or list(dataset["node"].gpus.all())
    with transaction.atomic():
        row = Job.objects.select_for_update().get(pk=job.pk)
        slots = [
            RankPlacement(
                dataset["node"],
                [(gpus[rank * job.gpus_per_task + i].pk, milli) for i in range(job.gpus_per_task)],
            )
            for rank in range(job.tasks)
        ]
        return job_control.start_attempt(row, dataset["pool"], slots, epoch=1)


def run(attempt: Attempt) -> list[int]:
    ids = list(attempt.task_rows.values_list("pk", flat=True))
    for task in attempt.task_rows.all():
        assert job_control.mark_task_sent(task)
        job_control.record_task_running(task.pk, container=f"fw-{task.pk}", ports={})
    return ids


def used(dataset) -> list[int]:
    return list(dataset["node"].gpus.values_list("used_milli", flat=True))


def test_a_job_runs_and_completes(dataset):
    job = submit(dataset, gpus_per_task=2)
    attempt = place(dataset, job)
    assert used(dataset) == [1000, 1000, 0, 0]
    (task,) = run(attempt)
    attempt.refresh_from_db()
    assert attempt.state == AttemptState.RUNNING
    job_control.record_task_ended(task, exit_code=0, reason=EndReason.COMPLETED)
    job.refresh_from_db()
    assert (job.state, job.exit_code) == (JobState.COMPLETED, 0)
    assert used(dataset) == [0, 0, 0, 0]
    ledger = UsageInterval.objects.filter(job=job)
    assert len(ledger) == 2
    assert all(row.ended_at and row.started_at == row.allocation.started_at for row in ledger)
    states = list(JobEvent.objects.filter(job=job, kind="job_state").values_list("after", flat=True))
    assert states == ["RUNNING", "COMPLETED"]


def test_a_gpu_is_never_given_twice(dataset):
    first, second = submit(dataset), submit(dataset)
    place(dataset, first)
    with pytest.raises(IntegrityError):
        place(dataset, second)
    second.refresh_from_db()
    assert second.state == JobState.PENDING
    assert Allocation.objects.filter(task__attempt__job=second).count() == 0


def test_shares_fill_a_gpu_and_no_more(dataset):
    gpu = [dataset["node"].gpus.first()]
    for _ in range(2):
        place(dataset, submit(dataset, milli_per_gpu=400), milli=400, gpus=gpu)
    with pytest.raises(IntegrityError):
        place(dataset, submit(dataset, milli_per_gpu=400), milli=400, gpus=gpu)
    with pytest.raises(IntegrityError):
        place(dataset, submit(dataset), gpus=gpu)
    assert used(dataset)[0] == 800


def test_two_concurrent_schedulers_start_a_job_once(dataset):
    gpu = [dataset["node"].gpus.first()]
    jobs = [submit(dataset) for _ in range(2)]
    barrier, outcomes = threading.Barrier(2), []

    def slot(job: Job) -> None:
        barrier.wait()
        try:
            place(dataset, job, gpus=gpu)
            outcomes.append("placed")
        except IntegrityError:
            outcomes.append("refused")
        finally:
            connection.close()

    threads = [threading.Thread(target=slot, args=(job,)) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == ["placed", "refused"]


def test_cancelling_before_a_start_was_sent_ends_at_once(dataset):
    job = submit(dataset)
    attempt = place(dataset, job)
    job_control.cancel_job(job.pk, EndReason.CANCELLED_BY_USER, actor="ada")
    job.refresh_from_db()
    assert job.state == JobState.CANCELLED
    assert not job_control.mark_task_sent(attempt.task_rows.get())
    assert Allocation.objects.get(task__attempt=attempt).proof == "never_started"


def test_a_cancelled_job_holds_its_gpu_until_the_node_confirms_the_end(dataset):
    job = submit(dataset)
    (task,) = run(place(dataset, job))
    job_control.cancel_job(job.pk, EndReason.CANCELLED_BY_USER, actor="ada")
    job.refresh_from_db()
    assert job.state == JobState.RUNNING
    assert used(dataset)[0] == 1000
    # the node may still answer an old start: it changes nothing
    job_control.record_task_running(task, container="late", ports={})
    job_control.record_task_ended(task, exit_code=143, reason=EndReason.EXIT_CODE)
    job.refresh_from_db()
    assert job.state == JobState.CANCELLED
    assert used(dataset)[0] == 0


def test_an_ended_job_does_not_change(dataset):
    job = submit(dataset)
    (task,) = run(place(dataset, job))
    job_control.record_task_ended(task, exit_code=3, reason=EndReason.EXIT_CODE)
    job_control.cancel_job(job.pk, EndReason.CANCELLED_BY_USER, actor="ada")
    job.refresh_from_db()
    assert (job.state, job.exit_code, job.message) == (
        JobState.FAILED,
        3,
        "The command ended with exit code 3.",
    )


def test_a_repeated_end_counts_once(dataset):
    job = submit(dataset)
    (task,) = run(place(dataset, job))
    for _ in range(3):
        job_control.record_task_ended(task, exit_code=0, reason=EndReason.COMPLETED)
    assert used(dataset)[0] == 0
    assert JobEvent.objects.filter(job=job, after="COMPLETED", kind="job_state").count() == 1


def test_ends_of_several_jobs_are_recorded_in_as_many_statements_as_one_end(dataset):
    def end(count: int) -> int:
        gpus = list(dataset["node"].gpus.all())
        jobs = [submit(dataset) for _ in range(count)]
        tasks = [
            task
            for job, gpu in zip(jobs, gpus, strict=False)
            for task in run(place(dataset, job, gpus=[gpu]))
        ]
        with CaptureQueriesContext(connection) as queries:
            job_control.record_tasks_ended([TaskEnd(task, EndReason.COMPLETED, 0) for task in tasks])
        assert {Job.objects.get(pk=job.pk).state for job in jobs} == {JobState.COMPLETED}
        assert all(job.events.filter(kind="job_state", after="COMPLETED").count() == 1 for job in jobs)
        return len(queries)

    assert end(4) == end(1)
    assert used(dataset) == [0, 0, 0, 0]


def test_ends_of_different_kinds_are_recorded_together(dataset):
    done, failing, cancelled, gang = (
        submit(dataset),
        submit(dataset),
        submit(dataset),
        submit(dataset, tasks=2),
    )
    gpus = list(dataset["node"].gpus.all())
    tasks = [
        run(place(dataset, job, gpus=gpus[number : number + 1], milli=500))
        for number, job in enumerate((done, failing, cancelled))
    ]
    chief, other = run(place(dataset, gang, gpus=gpus[2:], milli=500))
    job_control.cancel_job(cancelled.pk, EndReason.CANCELLED_BY_USER, actor="ada")
    ends = [
        TaskEnd(tasks[0][0], EndReason.COMPLETED, 0),
        TaskEnd(tasks[1][0], EndReason.EXIT_CODE, 3),
        TaskEnd(tasks[2][0], EndReason.EXIT_CODE, 143),
        TaskEnd(chief, EndReason.EXIT_CODE, 1),
        TaskEnd(other, EndReason.EXIT_CODE, 143),
    ]
    failed = job_control.record_tasks_ended([*ends, ends[0]])  # an end that is reported twice
    assert [end.task for end in failed] == [tasks[1][0], chief]
    states = [Job.objects.get(pk=job.pk) for job in (done, failing, cancelled, gang)]
    assert [(job.state, job.exit_code) for job in states] == [
        (JobState.COMPLETED, 0),
        (JobState.FAILED, 3),
        (JobState.CANCELLED, None),
        (JobState.FAILED, 1),
    ]
    assert used(dataset) == [0, 0, 0, 0] and not job_control.record_tasks_ended(ends)
    assert not UsageInterval.objects.filter(ended_at=None).exists()
    assert AttemptWork.objects.filter(attempt__job__in=states).count() == 4


def test_a_gang_fails_as_one(dataset):
    job = submit(dataset, tasks=2)
    attempt = place(dataset, job)
    first, second = run(attempt)
    job_control.record_task_ended(first, exit_code=1, reason=EndReason.EXIT_CODE)
    attempt.refresh_from_db()
    assert attempt.state == AttemptState.COMPLETING
    assert used(dataset)[:2] == [0, 1000]
    job_control.record_task_ended(second, exit_code=137, reason=EndReason.EXIT_CODE)
    job.refresh_from_db()
    assert (job.state, job.exit_code) == (JobState.FAILED, 1)
    assert used(dataset) == [0, 0, 0, 0]


def test_a_reboot_sends_the_job_back_until_its_tries_are_used(dataset):
    job = submit(dataset, max_attempts=2)
    for state in [JobState.PENDING, JobState.FAILED]:
        (task,) = run(place(dataset, job))
        job_control.record_task_ended(task, exit_code=None, reason=EndReason.NODE_REBOOTED, proof="rebooted")
        job.refresh_from_db()
        assert job.state == state
    assert [a.state for a in job.attempts.all()] == [AttemptState.NODE_FAIL] * 2
    assert dataset["node"].name in job.message


def test_giving_back_does_not_use_up_tries(dataset):
    job = submit(dataset, max_attempts=1)
    for _ in range(3):
        attempt = place(dataset, job)
        (task,) = run(attempt)
        job_control.request_stop(attempt.pk, EndReason.RECLAIMED)
        job_control.record_task_ended(task, exit_code=143, reason=EndReason.EXIT_CODE)
        job.refresh_from_db()
        assert job.state == JobState.PENDING
    assert job.attempt_count == 3


def test_a_held_job_is_not_placed(dataset):
    job = submit(dataset)
    job_control.set_job_held(job.pk, True, actor="ada")
    with pytest.raises(Conflict):
        place(dataset, job)


@pytest.mark.parametrize(
    ("table", "moves"),
    [
        ("portal_job", JOB_TRANSITIONS),
        ("portal_attempt", ATTEMPT_TRANSITIONS),
        ("portal_task", ATTEMPT_TRANSITIONS),
    ],
)
def test_the_database_refuses_exactly_the_transitions_outside_the_tables(dataset, table, moves):
    job = submit(dataset)
    attempt = place(dataset, job)
    ids = {"portal_job": job.pk, "portal_attempt": attempt.pk, "portal_task": attempt.task_rows.get().pk}
    for old in moves:
        for new in moves:
            if old == new:
                continue
            execute_as_owner(
                f"ALTER TABLE {table} DISABLE TRIGGER {table}_transitions;"
                f" UPDATE {table} SET state = %s WHERE id = %s;"
                f" ALTER TABLE {table} ENABLE TRIGGER {table}_transitions",
                old.value, ids[table],
            )  # fmt: skip
            allowed = True
            try:
                with connection.cursor() as cursor, transaction.atomic():
                    cursor.execute(f"UPDATE {table} SET state = %s WHERE id = %s", [new.value, ids[table]])
            except IntegrityError:
                allowed = False
            assert allowed == (new in moves[old]), f"{table}: {old} -> {new}"
