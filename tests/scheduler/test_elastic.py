"""Elastic jobs in whole cycles: they start with what is free, grow when more is, and shrink for others."""

from __future__ import annotations

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from portal.domain.jobs.reasons import EndReason
from portal.models import Allocation, Attempt, Gpu, Job, JobVerdict, Quota, Task, UsageInterval
from portal.services.jobs.submission import do_cancel_job, do_hold_job
from portal.services.lifecycle import job_control
from scheduler import leases
from scheduler.commit.plan_writer import commit_evictions, commit_starts
from scheduler.core.model.plan import Eviction, EvictionReason, JobPlacement, TaskPlacement
from scheduler.core.model.snapshot import GpuShare
from scheduler.cycle import run_cycle
from scheduler.snapshot.decision_input import SnapshotCache, take_snapshot
from tests import factories
from tests.failpoint_crash import crashes_at

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def dataset():
    """One node of four GPUs in one pool; ada and cem in the project vision, where cem may go first."""
    factories.cluster_settings()
    pool = factories.pool()
    ada, cem = factories.user("ada"), factories.user("cem")
    return {
        "pool": pool,
        "node": factories.node(pool, gpus=4),
        "environment": factories.environment(tool=False),
        "ada": ada,
        "cem": cem,
        "project": factories.project("vision", member=ada, manager=cem),
    }


def submit(dataset, who: str = "ada", **fields) -> Job:
    return factories.job(dataset[who], dataset["project"], dataset["environment"], **fields)


def cycle() -> None:
    assert run_cycle("test", "holder") is not None


def attempt_of(job: Job) -> Attempt:
    job.refresh_from_db()
    return job.attempts.order_by("number").last()


def begin(job: Job) -> list[int]:
    """Its nodes say that every task that may start now runs; gives the ranks that hold places."""
    for task in attempt_of(job).task_rows.filter(state="CONFIGURING"):
        if job_control.mark_task_sent(task):
            job_control.record_task_running(task.pk, container=f"c{task.pk}", ports={})
    return ranks(job)


def ranks(job: Job) -> list[int]:
    return list(attempt_of(job).task_rows.filter(container_removed=False).values_list("rank", flat=True))


def left(job: Job, rank: int, code: int | None = 143, reason: EndReason = EndReason.EXIT_CODE) -> None:
    """The node proves that a task is gone."""
    job_control.record_task_ended(attempt_of(job).task_rows.get(rank=rank).pk, exit_code=code, reason=reason)


def used() -> int:
    total = sum(Gpu.objects.values_list("used_milli", flat=True))
    assert total == sum(Allocation.objects.filter(ended_at__isnull=True).values_list("milli", flat=True))
    assert total == sum(UsageInterval.objects.filter(ended_at__isnull=True).values_list("milli", flat=True))
    return total


def reported(job: Job, kind: str) -> list[str]:
    return list(job.events.filter(kind=kind).values_list("message", flat=True))


def test_an_elastic_job_starts_on_free_gpus_and_grows_later(dataset) -> None:
    other = submit(dataset, gpus_per_task=3)
    cycle()
    begin(other)
    job = submit(dataset, tasks=4, min_tasks=1)
    cycle()
    assert begin(job) == [0]
    assert attempt_of(job).state == "RUNNING"
    left(other, 0, 0, EndReason.COMPLETED)
    cycle()
    assert begin(job) == [0, 1, 2, 3]
    assert (attempt_of(job).number, used()) == (1, 4000)
    assert reported(job, "grows") == [f"Scales up from 1 to 4 of 4 tasks: {dataset['node'].name}."]
    assert list(attempt_of(job).task_rows.values_list("world_size_at_start", flat=True)) == [1, 4, 4, 4]
    version = job.version
    cycle()  # a fixed point: nothing more to do
    assert ranks(job) == [0, 1, 2, 3] and Job.objects.get(pk=job.pk).version == version
    assert not JobVerdict.objects.filter(job=job).exists() and not reported(job, "verdict")


def grown(dataset, tasks: int = 4, min_tasks: int = 1, **fields) -> Job:
    """A job that runs with all its tasks."""
    job = submit(dataset, tasks=tasks, min_tasks=min_tasks, **fields)
    cycle()
    assert len(begin(job)) == tasks
    return job


def test_surplus_is_given_to_a_job_that_goes_first(dataset) -> None:
    job = grown(dataset)
    urgent = submit(dataset, "cem", name="urgent", priority=50, gpus_per_task=2)
    cycle()
    attempt = attempt_of(job)
    leaving = attempt.task_rows.filter(eviction_requested_at__isnull=False)
    assert list(leaving.values_list("rank", flat=True)) == [2, 3]
    assert attempt.stop_requested_at is None and attempt.state == "RUNNING" and used() == 4000
    assert reported(job, "shrinks") == [
        "Scales down by 2 of 4 tasks for urgent, which has a higher priority."
    ]
    cycle()  # asked once, and nothing else follows from it
    assert len(reported(job, "shrinks")) == 1
    left(job, 3)
    left(job, 2)
    assert used() == 2000
    cycle()
    urgent.refresh_from_db()
    assert urgent.state == "RUNNING" and ranks(job) == [0, 1]
    assert {task.state for task in attempt.task_rows.filter(container_removed=True)} == {"PREEMPTED"}
    # what comes in their place has numbers of its own
    left(urgent, 0, 0, EndReason.COMPLETED)
    cycle()
    assert begin(job) == [0, 1, 4, 5]


def test_only_the_surplus_is_taken_from_a_job_with_a_guaranteed_minimum(dataset) -> None:
    Quota.objects.create(project=dataset["project"], pool=dataset["pool"], guaranteed_milli=1000)
    other = factories.project("nlp", member=dataset["ada"])
    Quota.objects.create(project=other, pool=dataset["pool"], guaranteed_milli=3000)
    job = grown(dataset)
    owed = factories.job(dataset["ada"], other, dataset["environment"], gpus_per_task=3)
    cycle()
    leaving = attempt_of(job).task_rows.filter(eviction_requested_at__isnull=False)
    assert list(leaving.values_list("rank", flat=True)) == [1, 2, 3]
    assert reported(job, "shrinks") == [
        "Scales down by 3 of 4 tasks for another project, which reclaims them."
    ]
    for rank in (1, 2, 3):
        left(job, rank)
    cycle()
    owed.refresh_from_db()
    assert (owed.state, ranks(job)) == ("RUNNING", [0])


@pytest.mark.parametrize(
    ("code", "reason"), [(2, EndReason.EXIT_CODE), (None, EndReason.NODE_REBOOTED)], ids=["failed", "lost"]
)
def test_a_task_that_is_lost_is_replaced_after_a_pause(dataset, code, reason) -> None:
    job = grown(dataset, tasks=3, min_tasks=2)
    left(job, 1, code, reason)
    attempt = attempt_of(job)
    assert (job.state, attempt.state, attempt.stop_requested_at) == ("RUNNING", "RUNNING", None)
    assert reported(job, "task_lost")[0].endswith("2 of 3 tasks keep running.")
    assert attempt.failed_tasks == (1 if code else 0)
    cycle()
    assert ranks(job) == [0, 2]  # it pauses first
    assert attempt.scale_up_after is not None and attempt.scale_up_after > timezone.now()
    Attempt.objects.filter(pk=attempt.pk).update(scale_up_after=timezone.now())
    cycle()
    assert begin(job) == [0, 2, 3]


def test_below_its_minimum_the_whole_attempt_ends(dataset) -> None:
    job = grown(dataset, tasks=3, min_tasks=3 - 1)
    left(job, 0, 2)
    left(job, 1, 5)
    attempt = attempt_of(job)
    assert (attempt.state, attempt.stop_reason, attempt.exit_code) == ("COMPLETING", "exit_code", 5)
    left(job, 2)
    job.refresh_from_db()
    assert (job.state, job.exit_code, used()) == ("FAILED", 5, 0)


def test_after_too_many_failures_it_grows_no_more(dataset) -> None:
    job = grown(dataset, tasks=3, min_tasks=1, max_attempts=2)
    left(job, 2, 1)
    left(job, 1, 1)
    assert (
        "It is not scaled up again in this attempt: 2 of its tasks failed." in reported(job, "task_lost")[1]
    )
    Attempt.objects.update(scale_up_after=timezone.now())
    cycle()
    assert ranks(job) == [0] and job.state == "RUNNING"


def test_the_first_task_that_completes_ends_the_job(dataset) -> None:
    job = grown(dataset, tasks=3)
    left(job, 1, 0, EndReason.COMPLETED)
    cycle()
    assert ranks(job) == [0, 2]  # it does not grow again
    left(job, 0, 0, EndReason.COMPLETED)
    left(job, 2, 0, EndReason.COMPLETED)
    job.refresh_from_db()
    assert (job.state, attempt_of(job).state, used()) == ("COMPLETED", "COMPLETED", 0)


def test_a_held_job_does_not_grow(dataset) -> None:
    other = submit(dataset, gpus_per_task=3)
    cycle()
    begin(other)
    job = submit(dataset, tasks=2, min_tasks=1)
    cycle()
    begin(job)
    do_hold_job(dataset["ada"], job, True)
    left(other, 0, 0, EndReason.COMPLETED)
    cycle()
    assert ranks(job) == [0]
    do_hold_job(dataset["ada"], job, False)
    cycle()
    assert ranks(job) == [0, 1]


def test_a_limit_applies_to_growth(dataset) -> None:
    Quota.objects.create(project=dataset["project"], pool=dataset["pool"], limit_milli=2000)
    job = submit(dataset, tasks=4, min_tasks=1)
    cycle()
    assert begin(job) == [0, 1]
    cycle()
    assert ranks(job) == [0, 1]


# -- commits -----------------------------------------------------------------------------------------


@pytest.fixture
def leader(dataset):
    held = leases.acquire(leases.LEADER, "test", 60)
    assert held is not None
    return held


@pytest.fixture
def small(dataset) -> Job:
    """A job of up to three tasks that runs with one, beside three free GPUs."""
    other = submit(dataset, gpus_per_task=3)
    cycle()
    begin(other)
    job = submit(dataset, tasks=3, min_tasks=1)
    cycle()
    begin(job)
    left(other, 0, 0, EndReason.COMPLETED)
    leases.release([leases.LEADER], "holder")
    job.refresh_from_db()
    return job


def growth(dataset, job: Job, *ranks: int) -> JobPlacement:
    free = dataset["node"].gpus.filter(used_milli=0).order_by("index")
    return JobPlacement(
        job.public_id,
        dataset["pool"].public_id,
        job.version,
        tuple(
            TaskPlacement(rank, dataset["node"].public_id, (GpuShare(gpu.uuid, 1000),))
            for rank, gpu in zip(ranks, free, strict=False)
        ),
    )


@pytest.mark.parametrize(
    "change", ["cancelled", "stopping", "version", "finished", "twice", "too_many", "full"]
)
def test_growth_is_refused_when_the_job_has_changed(dataset, small, leader, change) -> None:
    start = growth(dataset, small, 1, 2)
    expected, version = [0], small.version
    match change:
        case "cancelled":
            do_cancel_job(dataset["ada"], small)
        case "stopping":  # the version stands
            job_control.request_stop(attempt_of(small).pk, EndReason.TIME_LIMIT)
        case "version":
            Job.objects.filter(pk=small.pk).update(version=version + 1)
        case "finished":
            task = attempt_of(small).task_rows.get()
            Task.objects.filter(pk=task.pk).update(state="COMPLETED")
        case "twice":
            assert commit_starts(leader, [start]) == []
            expected = [0, 1, 2]
        case "too_many":
            Job.objects.filter(pk=small.pk).update(tasks=2)
        case "full":
            Quota.objects.create(project=dataset["project"], pool=dataset["pool"], limit_milli=2000)
    before = used()
    (refusal,) = commit_starts(leader, [start])
    assert refusal.code == ("project_limit" if change == "full" else "job_changed")
    assert ranks(small) == expected and used() == before


def test_a_growth_and_a_first_start_share_a_transaction(dataset, small, leader) -> None:
    other = submit(dataset)
    grows = growth(dataset, small, 1)
    free = dataset["node"].gpus.filter(used_milli=0).order_by("index")[1]
    place = TaskPlacement(0, dataset["node"].public_id, (GpuShare(free.uuid, 1000),))
    begins = JobPlacement(other.public_id, dataset["pool"].public_id, other.version, (place,))
    assert commit_starts(leader, [begins, grows]) == []
    assert (ranks(small), ranks(other), used()) == ([0, 1], [0], 3000)


@pytest.mark.parametrize("point", ["commit.in_transaction", "commit.before_commit", "commit.done"])
def test_a_growth_is_whole_or_not_at_all_wherever_the_scheduler_dies(dataset, small, leader, point) -> None:
    start = growth(dataset, small, 1, 2)
    assert crashes_at(point, lambda: commit_starts(leader, [start]))
    assert (ranks(small), used()) == (([0, 1, 2], 3000) if point == "commit.done" else ([0], 1000))
    again = commit_starts(leader, [start])
    assert [each.code for each in again] == (["job_changed"] if point == "commit.done" else [])
    assert (ranks(small), used()) == ([0, 1, 2], 3000)


def shrink(job: Job, *ranks: int) -> Eviction:
    return Eviction(job.public_id, EvictionReason.PREEMPTED, job.public_id, ranks)


def test_a_repeated_eviction_acts_once_and_keeps_the_minimum(dataset, small, leader) -> None:
    assert commit_starts(leader, [growth(dataset, small, 1, 2)]) == []
    begin(small)
    assert commit_evictions(leader, [shrink(small, 2)]) == []
    (again,) = commit_evictions(leader, [shrink(small, 2)])
    assert again.code == "job_changed"
    (too_many,) = commit_evictions(leader, [shrink(small, 0, 1)])
    assert too_many.code == "job_changed"
    leaving = attempt_of(small).task_rows.filter(eviction_requested_at__isnull=False)
    assert list(leaving.values_list("rank", flat=True)) == [2]
    assert not job_control.should_start(leaving.get(), attempt_of(small))


def test_a_task_whose_start_was_not_sent_is_released_at_once(dataset, leader) -> None:
    leases.release([leases.LEADER], "test")
    job = submit(dataset, tasks=2, min_tasks=1)
    cycle()
    leases.release([leases.LEADER], "holder")
    leader = leases.acquire(leases.LEADER, "test", 60)
    assert commit_evictions(leader, [shrink(job, 1)]) == []
    assert (ranks(job), used()) == ([0], 1000)
    task = attempt_of(job).task_rows.get(rank=1)
    assert not job_control.mark_task_sent(task) and task.allocations.get().proof == "never_started"


# -- the snapshot ----------------------------------------------------------------------------------


def test_the_verdict_of_waiting_tasks_is_shown_beside_running_ones(dataset, small) -> None:
    row_cache = SnapshotCache()
    inputs = take_snapshot(factories.cluster_settings(), row_cache)
    (waits,), (runs,) = inputs.snapshot.pending, inputs.snapshot.running
    assert (waits.job, waits.ranks, waits.tasks, waits.min_tasks) == (small.public_id, (1, 2), 2, 1)
    assert (runs.min_tasks, [task.rank for task in runs.tasks]) == (1, [0])
    assert waits.version == small.version and inputs.pending_row_ids == {}
    again = take_snapshot(factories.cluster_settings(), row_cache)
    assert again.snapshot.pending[0] is waits  # nothing was written since


def test_the_number_of_queries_does_not_depend_on_how_many_grow(dataset) -> None:
    def count() -> int:
        with CaptureQueriesContext(connection) as queries:
            inputs = take_snapshot(factories.cluster_settings())
        grow.append(len(inputs.snapshot.pending))
        return len(queries)

    grow: list[int] = []
    grown(dataset, tasks=4)
    nobody = count()
    plenty = [submit(dataset, tasks=9, min_tasks=1) for _ in range(3)]
    factories.node(dataset["pool"], gpus=1)
    cycle()
    begin(plenty[0])
    do_cancel_job(dataset["ada"], plenty[1])
    do_cancel_job(dataset["ada"], plenty[2])
    one = count()
    submit(dataset, tasks=9, min_tasks=1, name="also")
    factories.node(dataset["pool"], gpus=1)
    cycle()
    assert (count(), grow) == (one, [0, 1, 2])
    assert one <= nobody + 8  # two read what grows, six the rights of owners
