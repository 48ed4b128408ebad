"""A job on a real agent logs by its environment alone, until its attempt ends."""

from __future__ import annotations

import sysconfig

import pytest
from mlflow import MlflowException

from portal.domain.states import JobState
from portal.domain.tracking import JOB_TAG
from portal.models import Attempt, Job
from portal.services.images.process_environment import _world_readable_python
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
def job(tracking: TrackingWorld, harness: EngineHarness) -> Job:
    harness.mark_enrolled(harness.create_node(name=f"t{tracking.project.pk}", gpus=1), gpus=1)
    environment = factories.environment(runtime="process", tool=False)
    packages = sysconfig.get_path("purelib")  # of a Python that another account may run
    return factories.job(
        tracking.member,
        tracking.project,
        environment,
        command=[str(_world_readable_python()), "-c", SCRIPT],
        env={"PYTHONPATH": packages},
        memory_mib=1024,
    )


def test_a_job_logs_by_its_environment_and_its_token_ends_with_it(
    tracking: TrackingWorld, job: Job, harness: EngineHarness
) -> None:
    def ended() -> bool:
        job.refresh_from_db()
        return job.state not in (JobState.PENDING, JobState.RUNNING)

    assert InProcessEngine().run_until(ended, 90.0)
    said = [path.read_text() for path in harness.folder.glob("*/state/tasks/*/log*")]
    assert job.state == JobState.COMPLETED, (said, job.exit_code, job.message)
    project = tracking.project.public_id
    experiments = client.call(project, "GET", "experiments/search", max_results=10)["experiments"]
    assert [each["name"] for each in experiments] == [tracking.project.name]
    found = client.call(
        project,
        "POST",
        "runs/search",
        {
            "experiment_ids": [experiments[0]["experiment_id"]],
            "filter": f"tags.`{JOB_TAG}` = '{job.public_id}'",
        },
    )
    (run,) = found["runs"]
    assert run["info"]["status"] == "FINISHED"
    assert {each["key"]: each["value"] for each in run["data"]["metrics"]} == {"loss": 0.2}
    with pytest.raises(MlflowException, match="The job of this token has ended"):
        tracking.client(token=job_token(job.public_id, 1)).get_run(run["info"]["run_id"])


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
