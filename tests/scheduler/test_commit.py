"""Commit: whole or refused, by the numbers that stand now, with two connections that race."""

from __future__ import annotations

import threading

import pytest
from django.db import connection, transaction
from django.test.utils import CaptureQueriesContext

from portal.domain.jobs.reasons import EndReason
from portal.domain.states import JobState
from portal.models import (
    Allocation,
    Attempt,
    ClusterSettings,
    Gpu,
    Job,
    JobVerdict,
    Quota,
    UsageInterval,
    Volume,
)
from portal.services.jobs.attempt_secrets import decrypt_attempt_secret
from portal.services.lifecycle import job_control
from scheduler import leases
from scheduler.commit import plan_writer
from scheduler.commit.plan_writer import CommitRefusal, commit_evictions, commit_starts
from scheduler.core.model.plan import Eviction, EvictionReason, JobPlacement, TaskPlacement
from scheduler.core.model.snapshot import GpuShare
from scheduler.leases import LeaseLostError
from tests import factories
from tests.failpoint_crash import crashes_at

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def leader():
    held = leases.acquire(leases.LEADER, "test", 60)
    assert held is not None
    return held


@pytest.fixture
def dataset():
    return factories.basic_cluster()


def submit(dataset, **fields) -> Job:
    return factories.job(
        dataset["owner"], fields.pop("project", dataset["project"]), dataset["environment"], **fields
    )


def plan(dataset, job: Job, *gpus: int, milli: int = 1000) -> JobPlacement:
    rows = list(dataset["node"].gpus.order_by("index"))
    shares = tuple(GpuShare(rows[index].uuid, milli) for index in gpus)
    return JobPlacement(
        job.public_id,
        dataset["pool"].public_id,
        job.version,
        (TaskPlacement(0, dataset["node"].public_id, shares),),
    )


def commit_start(leader, start: JobPlacement) -> CommitRefusal | None:
    """A batch of one."""
    return next(iter(commit_starts(leader, [start])), None)


def commit_eviction(leader, eviction: Eviction) -> CommitRefusal | None:
    """A batch of one."""
    return next(iter(commit_evictions(leader, [eviction])), None)


def at_once(*actions) -> list[object]:
    """Runs each action in a thread with a connection of its own, all at the same moment."""
    results: list[object] = [None] * len(actions)
    gate = threading.Barrier(len(actions))

    def run(number: int, action) -> None:
        gate.wait()
        try:
            results[number] = action()
        except Exception as error:
            results[number] = error
        finally:
            connection.close()

    threads = [threading.Thread(target=run, args=each) for each in enumerate(actions)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_a_start_moves_everything_together(dataset, leader) -> None:
    job = submit(dataset)
    assert commit_start(leader, plan(dataset, job, 2)) is None
    job.refresh_from_db()
    attempt = job.attempts.get()
    assert (job.state, attempt.state, attempt.leader_epoch) == ("RUNNING", "CONFIGURING", leader.epoch)
    assert list(dataset["node"].gpus.values_list("used_milli", flat=True)) == [0, 0, 1000, 0]
    assert UsageInterval.objects.filter(job=job, ended_at__isnull=True, milli=1000).exists()


@pytest.mark.parametrize("change", ["version", "held", "cancelled", "running"])
def test_a_job_that_moved_on_is_not_started(dataset, leader, change) -> None:
    job = submit(dataset)
    start = plan(dataset, job, 0)
    match change:
        case "version":
            Job.objects.filter(pk=job.pk).update(version=job.version + 1)
        case "held":
            job_control.set_job_held(job.pk, True, actor="x")
        case "cancelled":
            job_control.cancel_job(job.pk, EndReason.CANCELLED_BY_USER, actor="x")
        case "running":
            assert commit_start(leader, start) is None
    refusal = commit_start(leader, start)
    assert refusal is not None and refusal.code == "job_changed"
    assert Attempt.objects.count() == (1 if change == "running" else 0)


@pytest.mark.parametrize("change", ["cordoned", "gpu_lost", "gpu_gone", "gpu_taken"])
def test_a_changed_gpu_is_not_allocated(dataset, leader, change) -> None:
    job = submit(dataset)
    gpu = dataset["node"].gpus.get(index=0)
    match change:
        case "cordoned":
            dataset["node"].state = "cordoned"
            dataset["node"].save()
        case "gpu_lost":
            Gpu.objects.filter(pk=gpu.pk).update(health="lost")
        case "gpu_gone":
            Gpu.objects.filter(pk=gpu.pk).update(present=False)
        case "gpu_taken":
            assert (
                commit_start(leader, plan(dataset, submit(dataset, milli_per_gpu=400), 0, milli=400)) is None
            )
    assert commit_start(leader, plan(dataset, job, 0)) is not None
    job.refresh_from_db()
    assert job.state == JobState.PENDING
    assert Allocation.objects.filter(task__attempt__job=job).count() == 0


def test_two_commits_for_one_gpu_allocate_it_once(dataset, leader) -> None:
    first, second = submit(dataset), submit(dataset)
    results = at_once(
        lambda: commit_start(leader, plan(dataset, first, 1)),
        lambda: commit_start(leader, plan(dataset, second, 1)),
    )
    refused = [result for result in results if result is not None]
    assert len(refused) == 1 and refused[0].code in {"gpu_taken", "database"}
    assert Allocation.objects.filter(ended_at__isnull=True).count() == 1
    assert Gpu.objects.get(node=dataset["node"], index=1).used_milli == 1000


def test_a_job_is_started_once(dataset, leader) -> None:
    job = submit(dataset)
    starts = [plan(dataset, job, index) for index in range(4)]
    results = at_once(*[lambda start=start: commit_start(leader, start) for start in starts])
    assert results.count(None) == 1
    assert Attempt.objects.count() == 1


def test_limits_of_every_ancestor_hold_under_races(dataset, leader) -> None:
    child = factories.project(parent=dataset["project"], member=dataset["owner"])
    other = factories.project(parent=dataset["project"], member=dataset["owner"])
    Quota.objects.create(project=dataset["project"], pool=dataset["pool"], limit_milli=2000)
    jobs = [submit(dataset, project=each) for each in (child, other, dataset["project"], child)]
    starts = [plan(dataset, job, index) for index, job in enumerate(jobs)]
    results = at_once(*[lambda start=start: commit_start(leader, start) for start in starts])
    refusals = [result.code for result in results if result is not None]
    assert refusals == ["project_limit", "project_limit"]
    assert sum(Gpu.objects.values_list("used_milli", flat=True)) == 2000


def test_limits_per_user_hold_under_races(dataset, leader) -> None:
    colleague = factories.user()
    child = factories.project(parent=dataset["project"], member=dataset["owner"], manager=colleague)
    other = factories.project(parent=dataset["project"], member=dataset["owner"])
    Quota.objects.create(project=dataset["project"], pool=dataset["pool"], user_limit_milli=2000)
    jobs = [submit(dataset, project=each) for each in (child, other, dataset["project"])]
    jobs.append(factories.job(colleague, child, dataset["environment"]))
    starts = [plan(dataset, job, index) for index, job in enumerate(jobs)]
    results = at_once(*[lambda start=start: commit_start(leader, start) for start in starts])
    refusals = [result for result in results if result is not None]
    assert [refusal.code for refusal in refusals] == ["user_limit"]
    assert refusals[0].job != jobs[3].public_id
    assert f"{dataset['owner'].username} holds 2 GPUs of" in refusals[0].message
    assert sum(Gpu.objects.values_list("used_milli", flat=True)) == 3000


def test_a_job_without_gpus_starts_regardless_of_the_limit_per_user(dataset, leader) -> None:
    small, large = submit(dataset, gpus_per_task=0), submit(dataset)
    Quota.objects.create(project=dataset["project"], pool=dataset["pool"], user_limit_milli=0)
    assert commit_start(leader, plan(dataset, small)) is None
    refusal = commit_start(leader, plan(dataset, large, 0))
    assert refusal is not None and refusal.code == "user_limit"


def test_a_start_respects_a_racing_quota_edit_or_precedes_it(dataset, leader) -> None:
    """Whoever locks the quota row first decides; a start never passes a limit that was committed before it."""
    for round_ in range(5):
        quota, _ = Quota.objects.update_or_create(
            project=dataset["project"], pool=dataset["pool"], defaults={"limit_milli": 4000}
        )
        job, late = submit(dataset), submit(dataset)
        held = sum(Gpu.objects.values_list("used_milli", flat=True))
        order: list[str] = []

        def edit(quota=quota, order=order) -> None:
            with transaction.atomic():
                row = Quota.objects.select_for_update().get(pk=quota.pk)
                row.limit_milli = 0
                row.save()
                order.append("edit")

        def start(job=job, order=order, index=round_ % 4) -> object:
            result = commit_start(leader, plan(dataset, job, index))
            order.append("refused" if result else "start")
            return result

        at_once(edit, start)
        job.refresh_from_db()
        if job.state == JobState.PENDING:
            assert sum(Gpu.objects.values_list("used_milli", flat=True)) == held
            job_control.cancel_job(job.pk, EndReason.CANCELLED_BY_USER, actor="x")
        else:
            job_control.request_stop(job.attempts.get().pk, EndReason.CANCELLED_BY_USER)
        # after the edit nothing starts, whatever happened in between
        refusal = commit_start(leader, plan(dataset, late, 3))
        assert refusal is not None and refusal.code == "project_limit"
        job_control.cancel_job(late.pk, EndReason.CANCELLED_BY_USER, actor="x")


def test_a_dependent_job_is_not_started_by_any_plan(dataset, leader) -> None:
    prep = submit(dataset)
    job = submit(dataset, dependencies=[prep])
    refusal = commit_start(leader, plan(dataset, job, 0))
    assert refusal is not None and refusal.code == "dependency"
    job_control.cancel_job(prep.pk, EndReason.CANCELLED_BY_USER, actor="x")
    late = submit(dataset, dependencies=[prep], ignore_dependency_failure=True)
    assert commit_start(leader, plan(dataset, late, 0)) is None


def test_a_replaced_leader_writes_nothing(dataset, leader) -> None:
    job = submit(dataset)
    leases.release([leases.LEADER], "test")
    assert leases.acquire(leases.LEADER, "new", 60)
    with pytest.raises(LeaseLostError):
        commit_start(leader, plan(dataset, job, 0))
    with pytest.raises(LeaseLostError):
        commit_eviction(leader, Eviction(job.public_id, EvictionReason.RECLAIMED, job.public_id))
    assert Attempt.objects.count() == 0


def test_cancel_racing_a_start_wins_or_loses_cleanly(dataset, leader) -> None:
    for _ in range(8):
        job = submit(dataset)
        at_once(
            lambda job=job: commit_start(leader, plan(dataset, job, 0)),
            lambda job=job: job_control.cancel_job(job.pk, EndReason.CANCELLED_BY_USER, actor="x"),
        )
        job.refresh_from_db()
        assert job.state == JobState.CANCELLED  # nothing was sent yet, so both orders end at once
        assert sum(Gpu.objects.values_list("used_milli", flat=True)) == 0


def test_an_eviction_is_requested_and_waits_for_proof(dataset, leader) -> None:
    victim, winner = submit(dataset), submit(dataset)
    commit_start(leader, plan(dataset, victim, 0))
    task = victim.attempts.get().task_rows.get()
    assert job_control.mark_task_sent(task)
    job_control.record_task_running(task.pk, container="c", ports={})
    eviction = Eviction(victim.public_id, EvictionReason.RECLAIMED, winner.public_id)
    assert commit_eviction(leader, eviction) is None
    attempt = victim.attempts.get()
    assert (attempt.state, attempt.stop_reason) == ("COMPLETING", "reclaimed")
    assert Gpu.objects.get(node=dataset["node"], index=0).used_milli == 1000
    assert commit_eviction(leader, eviction) is not None  # asked already


def test_a_workspace_gets_a_secret_and_a_home(dataset, leader) -> None:
    job = submit(dataset, kind="workspace")
    assert commit_start(leader, plan(dataset, job, 0)) is None
    attempt = job.attempts.get()
    assert attempt.secret.startswith("v1.")
    assert len(decrypt_attempt_secret(attempt)) >= 40
    assert Volume.objects.get(owner=dataset["owner"], kind="home").node == dataset["node"]


# -- many at once ----------------------------------------------------------------------------------


def written_for(job: Job) -> dict[str, object]:
    """All that a start left in the record, without the row numbers, names and times."""
    job.refresh_from_db()
    attempt = job.attempts.get()
    tasks = list(attempt.task_rows.order_by("rank"))
    held = Allocation.objects.filter(task__in=tasks).order_by("task__rank", "gpu__index")
    return {
        "job": (
            job.state,
            job.version,
            job.reason,
            job.attempt_count,
            job.exit_code,
            job.started_at is not None,
        ),
        "message": job.message,
        "attempt": (
            attempt.number,
            attempt.state,
            attempt.leader_epoch,
            attempt.pool_id,
            attempt.start_sent_at,
        ),
        "tasks": [(task.rank, task.state, task.node_id, task.container_removed) for task in tasks],
        "held": [(each.gpu.index % 2, each.milli, each.whole, each.ended_at, each.proof) for each in held],
        "ledger": sorted(
            (row.milli, row.project_id, row.user_id, row.pool_id, row.ended_at)
            for row in UsageInterval.objects.filter(job=job)
        ),
        "events": [
            (event.kind, event.before, event.after, event.reason, event.message, event.attempt == attempt)
            for event in job.events.order_by("id")
        ],
        "verdicts": JobVerdict.objects.filter(job=job).count(),
    }


def test_starts_in_a_batch_equal_single_starts(dataset, leader) -> None:
    together = [submit(dataset, gpus_per_task=1), submit(dataset, milli_per_gpu=300)]
    alone = [submit(dataset, gpus_per_task=1), submit(dataset, milli_per_gpu=300)]
    for job in (*together, *alone):
        JobVerdict.objects.create(
            job=job, code="insufficient_resources", decided_at=job.submitted_at, code_since=job.submitted_at
        )
    starts = [plan(dataset, together[0], 0), plan(dataset, together[1], 1, milli=300)]
    assert commit_starts(leader, starts) == []
    assert commit_start(leader, plan(dataset, alone[0], 2)) is None
    assert commit_start(leader, plan(dataset, alone[1], 3, milli=300)) is None
    assert [written_for(job) for job in together] == [written_for(job) for job in alone]
    assert list(dataset["node"].gpus.values_list("used_milli", flat=True)) == [1000, 300, 1000, 300]


def test_two_of_a_batch_may_share_a_gpu(dataset, leader) -> None:
    jobs = [submit(dataset, milli_per_gpu=400) for _ in range(3)]
    refused = commit_starts(leader, [plan(dataset, job, 0, milli=400) for job in jobs])
    assert [refusal.job for refusal in refused] == [jobs[2].public_id]
    assert Gpu.objects.get(node=dataset["node"], index=0).used_milli == 800


@pytest.mark.parametrize(
    ("incident", "code"),
    [
        ("held", "job_changed"),
        ("lost", "gpu_not_healthy"),
        ("taken", "gpu_taken"),
        ("limit", "project_limit"),
    ],
)
def test_an_invalid_start_is_refused_alone(dataset, leader, incident, code) -> None:
    project = factories.project(member=dataset["owner"])
    jobs = [submit(dataset), submit(dataset, project=project), submit(dataset)]
    starts = [plan(dataset, job, index) for index, job in enumerate(jobs)]
    match incident:
        case "held":
            Job.objects.filter(pk=jobs[1].pk).update(held=True)
        case "lost":
            Gpu.objects.filter(node=dataset["node"], index=1).update(health="lost")
        case "taken":
            assert commit_start(leader, plan(dataset, submit(dataset, milli_per_gpu=1), 1, milli=1)) is None
        case "limit":
            Quota.objects.create(project=project, pool=dataset["pool"], limit_milli=0)
    assert [(each.job, each.code) for each in commit_starts(leader, starts)] == [(jobs[1].public_id, code)]
    assert [Job.objects.get(pk=job.pk).state for job in jobs] == ["RUNNING", "PENDING", "RUNNING"]
    assert not Attempt.objects.filter(job=jobs[1]).exists()


def test_a_limit_counts_the_starts_of_its_own_batch_and_not_those_refused(dataset, leader) -> None:
    Quota.objects.create(project=dataset["project"], pool=dataset["pool"], limit_milli=2000)
    jobs = [submit(dataset) for _ in range(4)]
    Job.objects.filter(pk=jobs[0].pk).update(held=True)
    refused = commit_starts(leader, [plan(dataset, job, index) for index, job in enumerate(jobs)])
    assert [(each.job, each.code) for each in refused] == [
        (jobs[0].public_id, "job_changed"),
        (jobs[3].public_id, "project_limit"),
    ]


@pytest.mark.parametrize("point", ["commit.in_transaction", "commit.before_commit"])
def test_a_scheduler_killed_in_a_batch_leaves_nothing_half_done(dataset, leader, point) -> None:
    jobs = [submit(dataset) for _ in range(3)]
    starts = [plan(dataset, job, index) for index, job in enumerate(jobs)]
    assert crashes_at(point, lambda: commit_starts(leader, starts))
    assert [Job.objects.get(pk=job.pk).state for job in jobs] == ["PENDING"] * 3
    assert not Attempt.objects.exists() and not UsageInterval.objects.exists()
    assert set(Gpu.objects.values_list("used_milli", flat=True)) == {0}
    assert commit_starts(leader, starts) == []


def test_a_leader_replaced_between_two_batches_commits_only_the_first(dataset, leader, monkeypatch) -> None:
    jobs = [submit(dataset) for _ in range(3)]
    starts = [plan(dataset, job, index) for index, job in enumerate(jobs)]
    monkeypatch.setattr(plan_writer, "MAX_BATCH", 2)

    def replaced(names, holder, ttl_s) -> None:
        monkeypatch.undo()
        leases.release(names, holder)
        assert leases.acquire(leases.LEADER, "new", 60)

    monkeypatch.setattr(leases, "renew", replaced)
    with pytest.raises(LeaseLostError):
        commit_starts(leader, starts)
    assert [Job.objects.get(pk=job.pk).state for job in jobs] == ["RUNNING", "RUNNING", "PENDING"]


def test_a_batch_of_starts_costs_the_same_queries_however_large(dataset, leader) -> None:
    counts = []
    for number in (1, 3):
        starts = [
            plan(dataset, submit(dataset, milli_per_gpu=100), index, milli=100) for index in range(number)
        ]
        with CaptureQueriesContext(connection) as queries:
            assert commit_starts(leader, starts) == []
        counts.append(len(queries))
    assert counts[0] == counts[1]


def test_evictions_in_a_batch_are_requested_and_refused_separately(dataset, leader) -> None:
    victims, winner = [submit(dataset) for _ in range(3)], submit(dataset)
    for index, job in enumerate(victims):
        assert commit_start(leader, plan(dataset, job, index)) is None
    sent, unsent, idle = victims[0], victims[1], submit(dataset)
    for job in (sent, victims[2]):
        task = job.attempts.get().task_rows.get()
        assert job_control.mark_task_sent(task)
        job_control.record_task_running(task.pk, container="c", ports={})
    job_control.request_stop(victims[2].attempts.get().pk, EndReason.CANCELLED_BY_USER)
    wanted = [Eviction(job.public_id, EvictionReason.RECLAIMED, winner.public_id) for job in (*victims, idle)]
    refused = commit_evictions(leader, wanted)
    assert {each.job for each in refused} == {victims[2].public_id, idle.public_id}
    asked = sent.attempts.get()
    assert (asked.state, asked.stop_reason, asked.preempted_for) == ("COMPLETING", "reclaimed", winner)
    assert asked.events.filter(kind="attempt_state", after="COMPLETING").count() == 1
    ended = unsent.attempts.get()
    assert (ended.state, ended.stop_reason, Job.objects.get(pk=unsent.pk).state) == (
        "PREEMPTED",
        "reclaimed",
        "PENDING",
    )
    assert list(dataset["node"].gpus.values_list("used_milli", flat=True)) == [1000, 0, 1000, 0]


def test_shares_of_a_gpu_belong_to_one_project(dataset, leader) -> None:
    ours = submit(dataset, milli_per_gpu=400)
    other = factories.project(member=dataset["owner"])
    theirs = [submit(dataset, project=other, milli_per_gpu=400) for _ in range(2)]
    refused = commit_starts(
        leader, [plan(dataset, ours, 0, milli=400), plan(dataset, theirs[0], 0, milli=400)]
    )
    assert [(each.job, each.code) for each in refused] == [(theirs[0].public_id, "gpu_shared_elsewhere")]
    theirs[0].refresh_from_db()
    assert commit_start(leader, plan(dataset, theirs[0], 0, milli=400)).code == "gpu_shared_elsewhere"
    assert commit_start(leader, plan(dataset, theirs[1], 1, milli=400)) is None
    factories.cluster_settings()
    ClusterSettings.objects.update(policy={"gpu_sharing_scope": "any"})
    assert commit_start(leader, plan(dataset, theirs[0], 0, milli=400)) is None
    assert sorted(Gpu.objects.values_list("used_milli", flat=True))[-2:] == [400, 800]
