"""Verdicts in the record: a new code at once, mere numbers a bounded part a cycle, the oldest first."""

from __future__ import annotations

from typing import Any

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from portal.domain.jobs.reasons import VerdictCode
from portal.models import ClusterSettings, Job, JobEvent, JobVerdict
from scheduler import leases
from scheduler.commit import verdict_store
from scheduler.commit.verdict_store import VerdictStore
from scheduler.core.model.plan import Verdict
from scheduler.core.model.snapshot import JobId
from scheduler.snapshot.decision_input import take_snapshot
from tests import factories

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def waiting() -> list[Job]:
    settings = factories.cluster_settings()
    assert isinstance(settings, ClusterSettings)
    dataset: dict[str, Any] = factories.basic_cluster()
    return [factories.job(dataset["owner"], dataset["project"], dataset["environment"]) for _ in range(5)]


def written(
    jobs: list[Job],
    free: int,
    code: VerdictCode = VerdictCode.INSUFFICIENT_RESOURCES,
    known: VerdictStore | None = None,
) -> int:
    """Writes one verdict for each job, as a cycle of its own would; ``known`` from the cycle before, or anew."""
    leader = leases.acquire(leases.LEADER, "test", leases.LEADER_TTL_S)
    assert leader is not None
    numbers: dict[str, int | float | str | None] = {"free_gpus": free, "needed_gpus": 4.0}
    verdicts = tuple(Verdict(JobId(job.public_id), code, f"{free} are free.", numbers) for job in jobs)
    inputs = take_snapshot(ClusterSettings.objects.get())
    return (known or VerdictStore()).write(leader, inputs.pending_row_ids, verdicts)


def free_told(jobs: list[Job]) -> list[int]:
    return [JobVerdict.objects.get(job=job).details["free_gpus"] for job in jobs]


def test_new_verdicts_are_written_at_once_and_equal_ones_not(
    waiting: list[Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verdict_store, "MAX_REFRESHED", 2)
    assert written(waiting, free=1) == 5
    assert written(waiting, free=1) == 0
    assert written(waiting, free=1, code=VerdictCode.OVER_FAIR_SHARE) == 5
    assert JobEvent.objects.filter(kind="verdict").count() == 10


def test_changed_parameters_are_written_in_turns(waiting: list[Job], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verdict_store, "MAX_REFRESHED", 2)
    written(waiting, free=1)
    since = JobVerdict.objects.get(job=waiting[0]).code_since
    assert written(waiting, free=2) == 2
    assert free_told(waiting) == [2, 2, 1, 1, 1]
    assert written(waiting, free=3) == 2
    assert free_told(waiting) == [2, 2, 3, 3, 1]
    assert written(waiting, free=4) == 2
    assert free_told(waiting) == [4, 2, 3, 3, 4]
    assert JobVerdict.objects.get(job=waiting[0]).code_since == since
    assert JobEvent.objects.filter(kind="verdict").count() == 5


def test_a_process_caches_verdicts_and_sees_what_others_wrote(waiting: list[Job]) -> None:
    known = VerdictStore()
    assert written(waiting, free=1, known=known) == 5
    with CaptureQueriesContext(connection) as queries:
        assert known.read() == VerdictStore().read()
    assert sum("message" in query["sql"] for query in queries) == 1  # only who knows nothing reads them
    JobVerdict.objects.filter(job=waiting[0]).update(
        message="Something else.", p50_at=waiting[0].submitted_at
    )
    JobVerdict.objects.filter(job=waiting[1]).delete()
    assert known.read() == VerdictStore().read()
    assert written(waiting, free=1, known=known) == 2
    assert JobVerdict.objects.get(job=waiting[0]).message == "1 are free."
    assert JobVerdict.objects.get(job=waiting[0]).p50_at is not None  # whoever wrote that wrote it for longer


def test_verdicts_of_jobs_that_left_meanwhile_are_dropped(waiting: list[Job]) -> None:
    leader = leases.acquire(leases.LEADER, "test", leases.LEADER_TTL_S)
    assert leader is not None
    inputs = take_snapshot(ClusterSettings.objects.get())
    Job.objects.filter(pk=waiting[0].pk).update(state="CANCELLED")
    verdicts = tuple(
        Verdict(JobId(job.public_id), VerdictCode.INSUFFICIENT_RESOURCES, "None is free.") for job in waiting
    )
    VerdictStore().write(leader, inputs.pending_row_ids, verdicts)
    assert set(JobVerdict.objects.values_list("job", flat=True)) == {job.pk for job in waiting[1:]}
