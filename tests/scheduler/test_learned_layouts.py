"""GPU layouts in snapshots: learned from attempts of the same project, and used by the cycle."""

from __future__ import annotations

import datetime as dt
import gzip
from typing import Any

import pytest
from django.utils import timezone

from portal.domain.scheduling.throughput import Layout, LayoutSpeed
from portal.models import Attempt, AttemptProgress, FailedCycle, Gpu, Job, Task
from portal.selectors.jobs.progress import job_workload_fingerprint
from portal.services.jobs.submission import do_cancel_job
from scheduler.core.model.policy import Policy
from scheduler.core.model.serialization import snapshot_from_json
from scheduler.core.model.snapshot import PendingRow, Snapshot
from scheduler.cycle import run_cycle
from scheduler.forecast import duration_estimates as module
from scheduler.forecast.duration_estimates import DurationEstimator
from scheduler.snapshot.decision_input import take_snapshot
from tests import factories

pytestmark = pytest.mark.django_db(transaction=True)

FAST, SLOW = Layout("H200", 1, 1, 0), Layout("Test 80", 1, 1, 0)
KNOWN = (LayoutSpeed(FAST, 100), LayoutSpeed(SLOW, 50))


@pytest.fixture
def dataset() -> dict[str, Any]:
    """A node of one model, and by name after it one of another."""
    factories.cluster_settings()
    dataset = factories.basic_cluster()
    other = factories.node(dataset["pool"], name="z-last", cpu_milli=16_000)
    Gpu.objects.filter(node=other).update(model="H200")
    return dataset


def submit(dataset: dict[str, Any], **fields: Any) -> Job:
    return factories.job(dataset["owner"], dataset["project"], dataset["environment"], **fields)


def ran(dataset: dict[str, Any], per_s: float, lies: Layout, count: int = 3, **fields: Any) -> None:
    """Jobs that told this rate, on this layout, and ended."""
    now = timezone.now()
    for _ in range(count):
        job = submit(dataset, **fields)
        work, gpus = job_workload_fingerprint(job), job.tasks * job.gpus_per_task
        do_cancel_job(dataset["owner"], job)
        began = now - dt.timedelta(seconds=100)
        Job.objects.filter(pk=job.pk).update(started_at=began, ended_at=now)
        attempt = Attempt.objects.create(
            job=job,
            number=1,
            state="COMPLETED",
            pool=dataset["pool"],
            leader_epoch=1,
            running_at=began,
            ended_at=now,
        )
        AttemptProgress.objects.create(
            attempt=attempt, rank=0, start_units=0, start_at=began, completed_units=100 * per_s, reported_at=now,
            workload_fingerprint=work, gpus=gpus,
            **lies._asdict(),
        )  # fmt: skip


def snapshot_of(expectations: DurationEstimator, policy: Policy | None = None) -> Snapshot:
    inputs = take_snapshot(factories.cluster_settings())
    return expectations.fill(inputs.snapshot, policy or inputs.policy)


def row_of(snapshot: Snapshot, job: Job) -> PendingRow:
    return next(row for row in snapshot.pending if row.job == job.public_id)


def test_rows_have_the_layouts_on_which_similar_jobs_ran_faster(dataset) -> None:
    ran(dataset, 5.0, SLOW, command=["train", "--seed", "1"])
    ran(dataset, 10.0, FAST, command=["train", "--seed", "2"])
    alike, other = submit(dataset, command=["train", "--seed", "77"]), submit(dataset, command=["eval"])
    larger, none = (
        submit(dataset, command=["train", "--seed", "77"], gpus_per_task=2),
        submit(dataset, gpus_per_task=0),
    )
    snapshot = snapshot_of(DurationEstimator())
    assert row_of(snapshot, alike).layout_speeds == KNOWN
    assert [row_of(snapshot, job).layout_speeds for job in (other, larger, none)] == [(), (), ()]


@pytest.mark.parametrize(("command", "node"), [(["true"], "z-last"), (["other"], "node")])
def test_the_cycle_chooses_the_faster_of_equal_nodes(dataset, command: list[str], node: str) -> None:
    """Of work of which nothing is known the name decides, as ever."""
    ran(dataset, 5.0, SLOW)
    ran(dataset, 10.0, FAST)
    job = submit(dataset, command=command)
    run_cycle("test", "me")
    assert Task.objects.get(attempt__job=job).node.name.startswith(node)


def test_other_projects_do_not_count(dataset) -> None:
    theirs = dataset | {"project": factories.project(member=dataset["owner"])}
    ran(theirs, 5.0, SLOW)
    ran(theirs, 10.0, FAST)
    ours, own = submit(dataset), submit(theirs)
    snapshot = snapshot_of(DurationEstimator())
    assert (row_of(snapshot, ours).layout_speeds, row_of(snapshot, own).layout_speeds) == ((), KNOWN)


def test_incremental_learning_equals_learning_anew(dataset, django_assert_num_queries) -> None:
    expectations, waits = DurationEstimator(), submit(dataset)
    for per_s, lies in ((5.0, SLOW), (10.0, FAST), (30.0, SLOW), (40.0, SLOW)):
        ran(dataset, per_s, lies)
        reported = row_of(snapshot_of(expectations), waits)
        assert reported.layout_speeds == row_of(snapshot_of(DurationEstimator()), waits).layout_speeds
    assert [speed.layout for speed in reported.layout_speeds] == [SLOW, FAST]  # habits changed
    snapshot = take_snapshot(factories.cluster_settings()).snapshot
    with django_assert_num_queries(1):
        expectations.fill(snapshot, Policy())


def test_old_jobs_are_forgotten_in_every_process(dataset, monkeypatch) -> None:
    monkeypatch.setattr(module, "SAMPLE_SIZE", 6)
    expectations, waits = DurationEstimator(), submit(dataset)
    ran(dataset, 5.0, SLOW)
    ran(dataset, 10.0, FAST)
    assert row_of(snapshot_of(expectations), waits).layout_speeds == KNOWN
    ran(dataset, 7.0, FAST, 1, command=["other"])
    assert row_of(snapshot_of(expectations), waits).layout_speeds == ()
    assert row_of(snapshot_of(DurationEstimator()), waits).layout_speeds == ()


def test_a_row_with_equal_layouts_is_the_same_object(dataset) -> None:
    ran(dataset, 5.0, SLOW)
    ran(dataset, 10.0, FAST)
    expectations, waits = DurationEstimator(), submit(dataset)
    first = snapshot_of(expectations)
    ran(dataset, 10.1, FAST, 1)
    second = snapshot_of(expectations)
    assert row_of(second, waits) is row_of(first, waits)
    Job.objects.filter(pk=waits.pk).update(priority=7)
    third = row_of(snapshot_of(expectations), waits)
    assert (third.priority, third.layout_speeds) == (7, KNOWN)


def test_predictions_can_be_switched_off(dataset) -> None:
    ran(dataset, 5.0, SLOW)
    ran(dataset, 10.0, FAST)
    waits, expectations = submit(dataset), DurationEstimator()
    assert row_of(snapshot_of(expectations, Policy(use_predictions="no")), waits).layout_speeds == ()
    assert row_of(snapshot_of(expectations), waits).layout_speeds == KNOWN


def test_attempts_too_short_for_a_rate_or_stalled_do_not_count(dataset) -> None:
    ran(dataset, 5.0, SLOW)
    ran(dataset, 10.0, FAST)
    ran(dataset, 0.0, FAST, 9)
    waits = submit(dataset)
    assert row_of(snapshot_of(DurationEstimator()), waits).layout_speeds == KNOWN
    AttemptProgress.objects.filter(gpu_model="H200").update(
        start_at=timezone.now() - dt.timedelta(seconds=59)
    )
    AttemptProgress.objects.filter(gpu_model="H200").update(reported_at=timezone.now())
    assert row_of(snapshot_of(DurationEstimator()), waits).layout_speeds == ()


def test_a_saved_cycle_contains_the_input_of_the_decision(dataset) -> None:
    def faulty(snapshot: Snapshot, policy: Policy) -> Any:
        raise KeyError("gone")

    ran(dataset, 5.0, SLOW)
    ran(dataset, 10.0, FAST)
    waits = submit(dataset)
    assert run_cycle("test", "me", decide=faulty) is not None
    saved = snapshot_from_json(gzip.decompress(FailedCycle.objects.get().content).decode())
    assert row_of(saved, waits).layout_speeds == KNOWN
