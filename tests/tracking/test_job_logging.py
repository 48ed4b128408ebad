"""A job on a real agent logs by its environment alone, until its attempt ends."""

from __future__ import annotations

import sysconfig
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from django.test import Client
from mlflow import MlflowException

from portal.domain.experiments.tracking import JOB_TAG
from portal.domain.states import JobState
from portal.models import Attempt, Job
from portal.services.environments.process_environment import world_readable_python
from portal.services.jobs.tracking import TRACKING_TOKEN, job_token, tracking_variables
from portal.tracking import client
from tests import factories
from tests.engine_harness import EngineHarness, InProcessEngine, harness, shared_harness
from tests.tracking.conftest import TrackingWorld

__all__ = ["harness", "shared_harness"]
pytestmark = pytest.mark.django_db(transaction=True)

SCRIPT = """
import mlflow
with mlflow.start_run(run_name="from a job"):
    mlflow.log_param("lr", 0.1)
    for step in range(5):
        mlflow.log_metric("loss", 1 / (step + 1), step=step)
    mlflow.log_text("hello", "notes.txt")
"""


@pytest.fixture
def job_with(tracking: TrackingWorld, harness: EngineHarness) -> Callable[..., Job]:
    """Submits jobs to a real agent, whose Python has MLflow."""
    harness.mark_enrolled(harness.create_node(name=f"t{tracking.project.pk}", gpus=1), gpus=1)
    environment = factories.environment(runtime="process", tool=False)
    packages = sysconfig.get_path("purelib")  # of a Python that another account may run

    def submit(*command: str, env: dict[str, str] | None = None, **fields: Any) -> Job:
        variables = {"PYTHONPATH": packages, **(env or {})}
        return factories.job(
            tracking.member, tracking.project, environment, command=list(command), env=variables,
            memory_mib=1024, **fields,
        )  # fmt: skip

    return submit


@pytest.fixture
def job(job_with: Callable[..., Job]) -> Job:
    return job_with(str(world_readable_python()), "-c", SCRIPT)


def run_of(job: Job, harness: EngineHarness) -> dict[str, Any]:
    """Let the job complete, and return the only run that it logged."""

    def ended() -> bool:
        job.refresh_from_db()
        return job.state not in (JobState.PENDING, JobState.RUNNING)

    assert InProcessEngine().run_until(ended, 90.0)
    said = [path.read_text() for path in harness.folder.glob("*/state/tasks/*/log*")]
    assert job.state == JobState.COMPLETED, (said, job.exit_code, job.message)
    project = job.project.public_id
    experiments = client.call(project, "GET", "experiments/search", max_results=10)["experiments"]
    assert [each["name"] for each in experiments] == [job.project.name]
    found = client.call(
        project,
        "POST",
        "runs/search",
        {
            "experiment_ids": [experiments[0]["experiment_id"]],
            "filter": f"tags.`{JOB_TAG}` = '{job.public_id}'",
        },
    )
    assert len(found.get("runs", [])) == 1, said
    return found["runs"][0]


def test_a_job_logs_by_its_environment_and_its_token_ends_with_it(
    tracking: TrackingWorld, job: Job, harness: EngineHarness
) -> None:
    run = run_of(job, harness)
    assert run["info"]["status"] == "FINISHED"
    assert {each["key"]: each["value"] for each in run["data"]["metrics"]} == {"loss": 0.2}
    with pytest.raises(MlflowException, match="The job of this token has ended"):
        tracking.client(token=job_token(job.public_id, 1)).get_run(run["info"]["run_id"])


HOROVODRUN = """#!/bin/sh
echo '[{"name": "ALLREDUCE"}]' > timeline.json
shift 7  # its own arguments
exec "$@"
"""
"""In place of Horovod, which the long suite runs: writes a timeline as it does."""


@pytest.mark.parametrize("logs_itself", [True, False])
def test_the_timeline_of_horovod_is_downloaded_from_the_run_of_its_job(
    tracking: TrackingWorld, harness: EngineHarness, job_with: Callable[..., Job], logs_itself: bool
) -> None:
    command = [str(world_readable_python()), "-c", SCRIPT] if logs_itself else ["true"]
    with TemporaryDirectory() as folder:
        program = Path(folder) / "horovodrun"
        program.write_text(HOROVODRUN)
        for path in (program.parent, program):
            path.chmod(0o755)
        job = job_with(
            *command, env={"PATH": f"{folder}:/usr/bin:/bin"}, launcher="horovod",
            launcher_options={"timeline_filename": "timeline.json"},
        )  # fmt: skip
        run = run_of(job, harness)["info"]
    assert (run["run_name"], run["status"]) == ("from a job" if logs_itself else "timeline.json", "FINISHED")
    browser = Client()
    browser.force_login(tracking.viewer)
    page = f"/experiments/{tracking.project.public_id}/{run['run_id']}/"
    assert page in browser.get(f"/jobs/{job.public_id}/runs/").content.decode()
    assert "attempt-1/timeline.json" in browser.get(f"{page}?path=attempt-1").content.decode()
    answer = browser.get(f"{page}file/?path=attempt-1/timeline.json")
    assert b"".join(answer) == b'[{"name": "ALLREDUCE"}]\n'
    assert answer["Content-Disposition"] == 'attachment; filename="timeline.json"'


def test_the_token_of_a_job_is_for_its_project_and_its_owners_rights(
    tracking: TrackingWorld, job: Job
) -> None:
    pool = factories.pool()
    Attempt.objects.create(job=job, number=1, pool=pool, leader_epoch=1, state="RUNNING")
    token = job_token(job.public_id, 1)
    experiment = tracking.client(token=token).create_experiment("mine")
    with pytest.raises(MlflowException, match="a job of another project"):
        tracking.client(project=tracking.other, token=token).search_experiments()
    tracking.member.memberships.all().delete()
    with pytest.raises(MlflowException, match="There is nothing at this address"):
        tracking.client(token=token).create_run(experiment)
    with pytest.raises(MlflowException, match="not valid"):
        tracking.client(token=job_token(job.public_id, 1, key="another key")).get_experiment(experiment)


def test_a_job_with_a_server_of_its_own_gets_no_token(tracking: TrackingWorld, job: Job) -> None:
    assert TRACKING_TOKEN in tracking_variables(job, 1)
    job.env = {"MLFLOW_TRACKING_URI": "https://elsewhere.example"}
    assert tracking_variables(job, 1) == {}
