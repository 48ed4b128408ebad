"""Progress of a program: from the file on its node to the database and the snapshot."""

from __future__ import annotations

import datetime as dt
from typing import Any

import pytest
from django.db.models import F
from django.utils import timezone

from agents.engines.replies import PollResult
from portal.domain.scheduling.throughput import Layout
from portal.models import Attempt, AttemptProgress, Job
from portal.services.jobs import task_reports
from tests import factories
from tests.engine_harness import EngineHarness, InProcessEngine

pytestmark = pytest.mark.django_db(transaction=True)

COUNTS = 'n=0; while :; do n=$((n + 10)); echo $n > "$FAIRWAY_PROGRESS_FILE"; sleep 0.1; done'


@pytest.fixture
def dataset(harness: EngineHarness, request: pytest.FixtureRequest) -> dict[str, Any]:
    """A real agent with four pretend GPUs, and a person."""
    name = f"p{abs(hash(request.node.name)) % 10**9}"
    harness.mark_enrolled(harness.create_node(name=name, gpus=4), gpus=4)
    owner = factories.user("ada")
    return {
        "owner": owner,
        "project": factories.project("vision", member=owner),
        "environment": factories.environment(runtime="process", tool=False),
        "engine": InProcessEngine(),
    }


def submit(dataset: dict[str, Any], script: str, **fields: Any) -> Job:
    fields = {"command": ["sh", "-c", script], "memory_mib": 64, "termination_grace_s": 1, **fields}
    return factories.job(dataset["owner"], dataset["project"], dataset["environment"], **fields)


def runs(job: Job) -> bool:
    return Attempt.objects.filter(job=job, state="RUNNING").exists()


def test_progress_in_the_file_is_recorded(dataset: dict[str, Any], monkeypatch: Any) -> None:
    monkeypatch.setattr(task_reports, "MIN_UPDATE_INTERVAL", dt.timedelta(seconds=1))
    job = submit(dataset, COUNTS, gpus_per_task=2)
    reported = AttemptProgress.objects.filter(attempt__job=job)
    assert dataset["engine"].run_until(
        lambda: reported.filter(completed_units__gt=F("start_units")).exists(), 60.0
    )
    row = reported.get()
    assert row.completed_units % 10 == 0
    assert 0 <= row.start_units < row.completed_units and row.start_at < row.reported_at <= timezone.now()
    assert row.rank == 0 and row.gpus == 2 and row.layout == Layout(row.gpu_model, 1, 1, 0)
    assert row.gpu_model


def test_a_job_that_writes_invalid_progress_continues(dataset: dict[str, Any]) -> None:
    odd, plain = submit(dataset, 'echo nan > "$FAIRWAY_PROGRESS_FILE"; sleep 600'), submit(dataset, COUNTS)
    assert dataset["engine"].run_until(
        lambda: AttemptProgress.objects.filter(attempt__job=plain).exists() and runs(odd), 40.0
    )
    assert not AttemptProgress.objects.filter(attempt__job=odd).exists()


def test_an_older_agent_without_progress_is_supported(dataset: dict[str, Any], monkeypatch: Any) -> None:
    from_wire, left_out = PollResult.from_wire, []

    def as_before(answer: dict[str, Any]) -> PollResult:
        """Its rows lack the fields."""
        left_out.extend((row.pop("progress"), row.pop("progress_age_s")) for row in answer["containers"])
        return from_wire(answer)

    monkeypatch.setattr(PollResult, "from_wire", as_before)
    job = submit(dataset, COUNTS)
    assert dataset["engine"].run_until(lambda: any(done for done, _ in left_out), 40.0)
    assert runs(job) and not AttemptProgress.objects.exists()
