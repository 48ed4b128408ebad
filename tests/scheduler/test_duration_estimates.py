"""Duration estimates in snapshots: learned incrementally, equal in every process, and rarely changed."""

from __future__ import annotations

import datetime as dt
import gzip
import random

import pytest
from django.utils import timezone

from portal.models import Attempt, FailedCycle, Job, Template
from portal.services.jobs.submission import JobRequest, do_cancel_job, preview_query_body
from scheduler import what_if
from scheduler.core.forecast.durations import DurationHistory, DurationKey
from scheduler.core.model.policy import Policy
from scheduler.core.model.serialization import snapshot_from_json
from scheduler.core.model.snapshot import PendingRow, RunningRow, Snapshot
from scheduler.cycle import run_cycle
from scheduler.forecast.duration_estimates import DurationEstimator
from scheduler.snapshot.decision_input import take_snapshot
from tests import factories

pytestmark = pytest.mark.django_db(transaction=True)

TEN_MINUTES_S = 678.8
"""Ten minutes, up to the next step."""
HOUR_S = 3840.0


@pytest.fixture
def proven(monkeypatch: pytest.MonkeyPatch) -> None:
    """Predictions count as better than none."""
    always = property(lambda self: True, lambda self, value: None)
    monkeypatch.setattr(DurationHistory, "is_informative", always, raising=False)


@pytest.fixture
def dataset():
    factories.cluster_settings()
    return factories.basic_cluster()


def submit(dataset, **fields) -> Job:
    return factories.job(dataset["owner"], dataset["project"], dataset["environment"], **fields)


def ended(dataset, minutes: float, count: int = 6, *, ago_s: float = 0.0, **fields) -> None:
    """Jobs that ran so long and ended."""
    at = timezone.now() - dt.timedelta(seconds=ago_s)
    for _ in range(count):
        job = submit(dataset, **fields)
        do_cancel_job(dataset["owner"], job)
        Job.objects.filter(pk=job.pk).update(started_at=at - dt.timedelta(minutes=minutes), ended_at=at)


def snapshot_of(expectations: DurationEstimator, policy: Policy | None = None) -> Snapshot:
    inputs = take_snapshot(factories.cluster_settings())
    return expectations.fill(inputs.snapshot, policy or inputs.policy)


def waiting_row(snapshot: Snapshot, job: Job) -> PendingRow:
    return next(row for row in snapshot.pending if row.job == job.public_id)


def running_row(snapshot: Snapshot, job: Job) -> RunningRow:
    return next(row for row in snapshot.running if row.job == job.public_id)


def test_rows_have_the_durations_of_similar_jobs(dataset, proven) -> None:
    ended(dataset, 10)
    ended(dataset, 60, gpus_per_task=2)
    runs = submit(dataset)
    run_cycle("test", "me")
    waits, limited = submit(dataset, gpus_per_task=2), submit(dataset, gpus_per_task=2, time_limit_s=900)
    unknown = submit(dataset, gpus_per_task=4)
    snapshot = snapshot_of(DurationEstimator())
    row = running_row(snapshot, runs)
    assert row.predicted_end_s == pytest.approx(row.started_s + TEN_MINUTES_S, abs=0.1)
    assert waiting_row(snapshot, waits).predicted_duration_s == pytest.approx(HOUR_S, abs=0.1)
    assert waiting_row(snapshot, limited).predicted_duration_s == 900.0
    assert waiting_row(snapshot, unknown).predicted_duration_s is None


def test_jobs_of_a_template_use_its_own_history(dataset, proven) -> None:
    template = Template.objects.create(name="train", title="Train", kind="training")
    ended(dataset, 10, 7)
    ended(dataset, 60, template=template)
    made, plain = submit(dataset, template=template), submit(dataset)
    expectations = DurationEstimator()
    snapshot = snapshot_of(expectations)
    assert waiting_row(snapshot, made).predicted_duration_s == pytest.approx(HOUR_S, abs=0.1)
    assert waiting_row(snapshot, plain).predicted_duration_s == pytest.approx(TEN_MINUTES_S, abs=0.1)
    assert expectations.template_of == {made.public_id: template.public_id, plain.public_id: None}


def test_incremental_learning_equals_learning_anew(dataset, proven, django_assert_num_queries) -> None:
    expectations = DurationEstimator()
    kind = DurationKey(dataset["project"].public_id, dataset["owner"].public_id, None, 1000)
    for minutes in (10, 60, 60, 5):
        ended(dataset, minutes)
        snapshot_of(expectations)
        anew = DurationEstimator()
        snapshot_of(anew)
        assert expectations.durations.expected_s(kind) == anew.durations.expected_s(kind)
        assert expectations.durations.learned_count == anew.durations.learned_count
    snapshot = take_snapshot(factories.cluster_settings()).snapshot
    with django_assert_num_queries(1):
        expectations.fill(snapshot, Policy())
    assert expectations.durations.learned_count == 24  # nobody counts twice


def test_jobs_recorded_late_count_too(dataset, proven) -> None:
    expectations = DurationEstimator()
    ended(dataset, 10)
    snapshot_of(expectations)
    ended(dataset, 10, 1, ago_s=60)  # its transaction was longer than those of who ended after it
    snapshot_of(expectations)
    assert expectations.durations.learned_count == 7


def test_a_row_with_equal_estimates_is_the_same_object(dataset, proven) -> None:
    ended(dataset, 10)
    runs = submit(dataset)
    run_cycle("test", "me")
    waits = submit(dataset, gpus_per_task=4)
    expectations = DurationEstimator()
    first = snapshot_of(expectations)
    ended(dataset, 9, 1)
    second = snapshot_of(expectations)
    assert running_row(second, runs) is running_row(first, runs)
    assert waiting_row(second, waits) is waiting_row(first, waits)
    Job.objects.filter(pk=waits.pk).update(priority=7)
    third = snapshot_of(expectations)
    assert waiting_row(third, waits).priority == 7
    assert running_row(third, runs) is running_row(first, runs)


def test_an_exceeded_estimate_is_renewed(dataset, proven) -> None:
    ended(dataset, 10)
    runs = submit(dataset)
    run_cycle("test", "me")
    Attempt.objects.update(created_at=timezone.now() - dt.timedelta(minutes=12))
    row = running_row(snapshot_of(DurationEstimator()), runs)
    assert row.predicted_end_s == pytest.approx(row.started_s + 2 * TEN_MINUTES_S, abs=0.1)


def test_predictions_can_be_switched_off(dataset, proven) -> None:
    ended(dataset, 10)
    waits = submit(dataset)
    settings = factories.cluster_settings()
    settings.policy = {"use_predictions": "no"}
    settings.save()
    expectations = DurationEstimator()
    assert waiting_row(snapshot_of(expectations), waits).predicted_duration_s is None
    assert waiting_row(snapshot_of(expectations, Policy()), waits).predicted_duration_s is not None


def test_a_cycle_uses_the_estimates(dataset, proven) -> None:
    """Within a project the job that is expected to end soon goes first, though it came later."""
    ended(dataset, 600, gpus_per_task=4)
    ended(dataset, 10, gpus_per_task=3)
    long, short = submit(dataset, gpus_per_task=4), submit(dataset, gpus_per_task=3)
    outcome = run_cycle("test", "me")
    assert outcome is not None and outcome.started == 1
    states = dict(Job.objects.filter(pk__in=(long.pk, short.pk)).values_list("pk", "state"))
    assert states == {long.pk: "PENDING", short.pk: "RUNNING"}


def test_a_preview_agrees_with_the_cycle(dataset, proven, monkeypatch) -> None:
    ended(dataset, 600, gpus_per_task=4)
    ended(dataset, 10, gpus_per_task=3)
    submit(dataset, gpus_per_task=4)
    monkeypatch.setattr(what_if, "_cached_inputs", None)
    monkeypatch.setattr(what_if, "_duration_estimator", DurationEstimator())
    request = JobRequest(
        name="asked",
        project=dataset["project"],
        environment=dataset["environment"],
        command=["true"],
        gpus_per_task=3,
    )
    reported = what_if._answer("would_start", preview_query_body(dataset["owner"], request))
    assert reported["starts_now"]  # ahead of the one that came before it


def test_a_saved_cycle_contains_the_input_of_the_decision(dataset, proven) -> None:
    def faulty(snapshot, policy):
        raise KeyError("gone")

    ended(dataset, 10)
    waits = submit(dataset)
    assert run_cycle("test", "me", decide=faulty) is not None
    saved = snapshot_from_json(gzip.decompress(FailedCycle.objects.get().content).decode())
    assert waiting_row(saved, waits).predicted_duration_s == pytest.approx(TEN_MINUTES_S, abs=0.1)


def test_predictions_are_used_while_they_are_better_than_none(dataset) -> None:
    draw, estimator = random.Random(1), DurationEstimator()
    waits = submit(dataset, gpus_per_task=2)
    project, owner = dataset["project"].public_id, dataset["owner"].public_id
    for factor in (1.0, 9.0):
        for number in range(400):
            kind = DurationKey(project, owner, None, 1000 + 1000 * (number % 2))
            estimator.durations.learn(kind, draw.lognormvariate(8.0, 1.0) * (factor if number % 2 else 1.0))
        expected_s = waiting_row(snapshot_of(estimator), waits).predicted_duration_s
        assert (expected_s is not None) == (factor > 1.0)
