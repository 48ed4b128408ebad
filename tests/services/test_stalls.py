"""Jobs that write nothing, report nothing and leave their GPUs idle are stalled: a notice, or the end."""

from __future__ import annotations

import datetime as dt
from typing import Any

import pytest
from django.utils import timezone

from portal.domain.jobs.reasons import EndReason
from portal.models import (
    Attempt,
    AttemptObservation,
    AttemptProgress,
    Job,
    JobEvent,
    Node,
    NodeMetricsMinute,
    NodePool,
)
from portal.services.jobs import task_reports
from portal.services.jobs.stalls import detect_stalls
from portal.services.lifecycle import job_control
from tests import factories
from tests.services.test_lifecycle import place, run

pytestmark = pytest.mark.django_db(transaction=True)

MINUTE = dt.timedelta(minutes=1)


@pytest.fixture
def dataset() -> dict[str, Any]:
    factories.cluster_settings()
    return factories.basic_cluster()


def quiet_job(dataset: dict[str, Any], *, minutes: int = 20, **fields: Any) -> Job:
    """A job on one GPU that wrote its last output ``minutes`` ago and does not use its GPU."""
    fields = {"stall_timeout_s": 600} | fields
    job = factories.job(dataset["owner"], dataset["project"], dataset["environment"], **fields)
    attempt = place(dataset, job)
    run(attempt)
    now = timezone.now()
    Attempt.objects.filter(pk=attempt.pk).update(running_at=now - (minutes + 5) * MINUTE)
    attempt.refresh_from_db()
    task_reports.record_output(attempt, minutes * 60.0, polled_at=now)
    measure(dataset, [0.0] * minutes)
    return job


def measure(dataset: dict[str, Any], percents: list[float | None]) -> None:
    """The use of the node's first GPU in the last minutes, newest last."""
    NodeMetricsMinute.objects.all().delete()
    uuid = dataset["node"].gpus.get(index=0).uuid
    now = timezone.now().replace(second=0, microsecond=0)
    NodeMetricsMinute.objects.bulk_create(
        NodeMetricsMinute(
            node=dataset["node"], minute=now - (len(percents) - place) * MINUTE, gpu_uuids=[uuid], samples=60,
            utilisation_percent=[percent], memory_used_mib=[0.0], power_watts=[0.0], temperature_c=[30.0],
            energy_joules=[0.0],
        )
        for place, percent in enumerate(percents)
    )  # fmt: skip


def twice() -> None:
    """Two passes, a minute apart."""
    detect_stalls()
    AttemptObservation.objects.filter(stall_suspected_at__isnull=False).update(
        stall_suspected_at=timezone.now() - 2 * MINUTE
    )
    detect_stalls()


def notices(job: Job) -> list[str]:
    return list(JobEvent.objects.filter(job=job, kind="stalled").values_list("message", flat=True))


def test_a_stalled_job_is_reported_once_and_continues(dataset: dict[str, Any]) -> None:
    job = quiet_job(dataset)
    detect_stalls()
    assert notices(job) == []  # a single look is not enough
    twice()
    twice()
    assert notices(job) == ["It wrote nothing, reported no progress and did not use its GPUs for 10 min."]
    attempt = job.attempts.get()
    assert attempt.stop_requested_at is None and attempt.observation.stalled_at is not None
    task_reports.record_output(
        Attempt.objects.select_related("observation").get(), 0.0, polled_at=timezone.now()
    )
    detect_stalls()
    assert AttemptObservation.objects.get().stalled_at is None
    assert JobEvent.objects.filter(job=job, kind="continues").count() == 1


def test_a_stalled_job_ends_and_is_retried_only_if_requested(
    dataset: dict[str, Any],
) -> None:
    job = quiet_job(dataset, on_stall="end", retry_on=["stall"])
    twice()
    attempt = job.attempts.get()
    assert (attempt.state, attempt.stop_reason) == ("COMPLETING", EndReason.STALLED)
    job_control.record_task_ended(attempt.task_rows.get().pk, exit_code=143, reason=EndReason.EXIT_CODE)
    job.refresh_from_db()
    attempt.refresh_from_db()
    assert (job.state, attempt.state, attempt.work.cause) == ("PENDING", "FAILED", "stall")


@pytest.mark.parametrize(
    ("percents", "stalled"),
    [
        ([0.0] * 20, True),
        ([90.0] * 3 + [0.0] * 17, True),  # before its last output
        ([0.0] * 10 + [50.0] + [0.0] * 9, False),
        ([0.0] * 19 + [None], False),
        ([], False),  # nothing is known of its GPU
    ],
)
def test_used_and_unknown_gpus_are_not_a_stall(
    dataset: dict[str, Any], percents: list[float | None], stalled: bool
) -> None:
    job = quiet_job(dataset, minutes=15)
    measure(dataset, percents)
    twice()
    assert bool(notices(job)) is stalled


def test_progress_counts_as_activity(dataset: dict[str, Any]) -> None:
    job = quiet_job(dataset)
    now = timezone.now()
    AttemptProgress.objects.create(
        attempt=job.attempts.get(), rank=0, start_units=0, start_at=now - 9 * MINUTE, completed_units=5,
        reported_at=now - MINUTE, workload_fingerprint="x", gpus=1, gpu_model="", nodes=1, islands=1, levels=0,
    )  # fmt: skip
    twice()
    assert notices(job) == []


def test_an_unreachable_node_is_not_a_stall(dataset: dict[str, Any]) -> None:
    job = quiet_job(dataset)
    Node.objects.update(reachable=False)
    twice()
    assert notices(job) == []


def test_the_policy_of_the_pool_applies_where_the_job_sets_nothing(dataset: dict[str, Any]) -> None:
    job = quiet_job(dataset, stall_timeout_s=None)
    twice()
    assert notices(job) == []
    NodePool.objects.filter(pk=dataset["pool"].pk).update(policy={"stall_timeout_s": 900.0})
    twice()
    assert notices(job) == ["It wrote nothing, reported no progress and did not use its GPUs for 15 min."]
