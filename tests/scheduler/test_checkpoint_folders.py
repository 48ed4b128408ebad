"""Checkpoints that a program saves in a folder of its own, which the job names, on a real agent."""

from __future__ import annotations

from typing import Any

import pytest
from django.test import Client
from django.urls import reverse

from portal.domain.states import JobState
from portal.models import Checkpoint, Job
from portal.services.jobs.submission import do_resume_from_checkpoint
from tests import factories
from tests.engine_harness import EngineHarness, InProcessEngine

pytestmark = pytest.mark.django_db(transaction=True)

SAVES_IN_ITS_OWN_FOLDER = """
mkdir -p "$HOME/runs/vit/checkpoint-7" "$HOME/runs/vit/step-9"
echo '{"global_step": 7}' > "$HOME/runs/vit/checkpoint-7/trainer_state.json"
echo "resumed from ${FAIRWAY_RESUME_FROM:-nothing}"
[ "$FAIRWAY_ATTEMPT" = 1 ] && exit 3
[ "$FAIRWAY_RESUME_FROM" = "$HOME/runs/vit/checkpoint-7" ]
"""
"""As a script that was written elsewhere: it knows no variable of Fairway, but for the test."""


@pytest.fixture
def dataset(harness: EngineHarness, request: pytest.FixtureRequest) -> dict[str, Any]:
    node = harness.mark_enrolled(
        harness.create_node(name=f"k{abs(hash(request.node.name)) % 10**9}", gpus=2), gpus=2
    )
    owner = factories.user()
    return {
        "node": node,
        "owner": owner,
        "project": factories.project(member=owner),
        "environment": factories.environment(runtime="process", tool=False),
        "engine": InProcessEngine(),
    }


def submit(dataset: dict[str, Any], script: str, **fields: Any) -> Job:
    return factories.job(
        dataset["owner"], dataset["project"], dataset["environment"], command=["sh", "-c", script], memory_mib=64,
        gpus_per_task=0, **fields,
    )  # fmt: skip


def finish(dataset: dict[str, Any], *jobs: Job) -> None:
    def ended() -> bool:
        for job in jobs:
            job.refresh_from_db()
        return all(job.state not in (JobState.PENDING, JobState.RUNNING) for job in jobs)

    assert dataset["engine"].run_until(ended, 90.0)


def listed(job: Job) -> dict[str, str]:
    return {row.name: row.validity for row in job.checkpoints.all()}


def test_what_is_saved_directly_in_the_folder_that_a_job_names_counts(dataset: dict[str, Any]) -> None:
    job = submit(
        dataset, SAVES_IN_ITS_OWN_FOLDER, checkpoint_dir="runs/vit", retry_on=["command_failure"], max_attempts=2,
        retry_backoff_s=1, checkpoint_keep_last=1,
    )  # fmt: skip
    finish(dataset, job)
    assert (job.state, job.attempts.count()) == (JobState.COMPLETED, 2)
    assert listed(job) == {
        "../checkpoint-7": "valid",
        "../step-9": "unchecked",
    }  # retention deletes none of them
    other = do_resume_from_checkpoint(
        dataset["owner"], job.checkpoints.get(name="../checkpoint-7"), in_place=False
    )
    Job.objects.filter(pk=other.pk).update(
        command=["sh", "-c", 'test -e "$FAIRWAY_RESUME_FROM/trainer_state.json"']
    )
    finish(dataset, other)
    assert other.state == JobState.COMPLETED


def test_older_files_and_those_of_other_jobs_do_not_count(dataset: dict[str, Any]) -> None:
    save = 'mkdir -p "$HOME/runs/step-%d" && touch "$HOME/runs/step-%d/.complete"'
    first = submit(dataset, save % (1, 1), checkpoint_dir="runs")
    finish(dataset, first)
    assert listed(first) == {"../step-1": "valid"}
    second = submit(dataset, save % (2, 2), checkpoint_dir="runs")
    finish(dataset, second)
    assert listed(second) == {"../step-2": "valid"}
    together = [submit(dataset, f"{save % (3, 3)}; sleep 2", checkpoint_dir="runs") for _ in range(2)]
    finish(dataset, *together)
    assert [listed(job) for job in together] == [{}, {}]
    default = submit(dataset, 'mkdir -p "$HOME/checkpoints/step-4"')
    finish(dataset, default)
    assert listed(default) == {}


def test_not_checked_says_why_and_what_to_do(dataset: dict[str, Any]) -> None:
    job = submit(dataset, 'mkdir -p "$FAIRWAY_CHECKPOINT_DIR/step-3"')
    finish(dataset, job)
    row = Checkpoint.objects.get(job=job)
    assert row.validity == "unchecked" and "Write an empty file .complete" in row.problem
    browser = Client()
    browser.force_login(dataset["owner"])
    page = browser.get(reverse("job-checkpoints", args=[job.public_id])).content.decode()
    assert "Not checked" in page and "Write an empty file .complete" in page
    answer = browser.get(f"/api/v1/jobs/{job.public_id}/checkpoints/")
    assert answer.status_code == 200 and "Write an empty file .complete" in answer.content.decode()
