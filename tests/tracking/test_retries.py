"""A later attempt of a job continues its run instead of beginning a second one."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from portal.domain.states import JobState
from portal.models import Attempt, Job
from portal.services.environments.process_environment import world_readable_python
from portal.services.jobs.tracking import job_token
from portal.tracking import client as tracking_client
from tests import factories
from tests.engine_harness import EngineHarness, InProcessEngine, harness, shared_harness
from tests.tracking.conftest import TrackingWorld
from tests.tracking.test_job_logging import job_with

__all__ = ["harness", "job_with", "shared_harness"]
pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def attempt_of(tracking: TrackingWorld) -> Callable[..., Any]:
    """MLflow's client of an attempt of a job, whose earlier attempts have ended."""
    pool = factories.pool()
    factories.node(pool)

    def begin(job: Job, number: int) -> Any:
        Attempt.objects.filter(job=job).update(state="FAILED")
        Attempt.objects.create(job=job, number=number, pool=pool, leader_epoch=1, state="RUNNING")
        return tracking.client(token=job_token(job.public_id, number))

    return begin


def submit(tracking: TrackingWorld, **fields: Any) -> Job:
    return factories.job(tracking.member, tracking.project, factories.environment(), **fields)


def test_the_second_attempt_continues_curves_parameters_and_status(
    tracking: TrackingWorld, attempt_of: Callable[..., Any]
) -> None:
    job = submit(tracking)
    first = attempt_of(job, 1)
    experiment = first.create_experiment("vit")
    run = first.create_run(experiment, tags={"stage": "one"}).info
    for step in range(3):
        first.log_metric(run.run_id, "loss", 1 / (step + 1), step=step)
    first.log_param(run.run_id, "lr", 0.1)
    first.log_param(run.run_id, "resumed_from", 0)
    first.set_terminated(run.run_id, "FAILED")
    second = attempt_of(job, 2)
    continued = second.create_run(experiment, tags={"stage": "two"})
    assert continued.info.run_id == run.run_id
    assert (continued.info.status, continued.info.end_time) == ("RUNNING", None)
    assert continued.info.start_time == run.start_time
    second.log_param(run.run_id, "lr", 0.1)
    second.log_param(run.run_id, "resumed_from", 3)  # another value than in the first attempt
    second.log_metric(run.run_id, "loss", 0.2, step=3)
    stored = second.get_run(run.run_id)
    assert stored.data.params == {"lr": "0.1", "resumed_from": "3"}
    assert stored.data.tags["stage"] == "two" and stored.data.tags["fairway.attempt"] == "2"
    assert [point.step for point in second.get_metric_history(run.run_id, "loss")] == [0, 1, 2, 3]
    assert len(second.search_runs([experiment])) == 1


def test_a_renamed_run_and_nested_ones_are_continued_and_a_finished_one_is_not(
    tracking: TrackingWorld, attempt_of: Callable[..., Any]
) -> None:
    job = submit(tracking)
    first = attempt_of(job, 1)
    experiment = first.create_experiment("search")
    parent = first.create_run(experiment).info.run_id
    first.update_run(parent, name="a better name")
    done, failed = (
        first.create_run(experiment, run_name=name, tags={"mlflow.parentRunId": parent}).info.run_id
        for name in ("lr-1", "lr-2")
    )
    first.set_terminated(done)
    second = attempt_of(job, 2)
    assert second.create_run(experiment).info.run_id == parent
    assert second.get_run(parent).info.run_name == "a better name"
    of_parent = {"mlflow.parentRunId": parent}
    assert second.create_run(experiment, run_name="lr-2", tags=of_parent).info.run_id == failed
    assert second.create_run(experiment, run_name="lr-1", tags=of_parent).info.run_id != done
    assert second.create_run(experiment, run_name="lr-3", tags=of_parent).info.run_id not in (done, failed)
    assert second.create_run(experiment).info.run_id != parent  # it is continued once


def test_ranks_that_begin_at_once_continue_a_run_each(
    tracking: TrackingWorld, attempt_of: Callable[..., Any]
) -> None:
    job = submit(tracking)
    first = attempt_of(job, 1)
    experiment = first.create_experiment("ranks")
    runs = {first.create_run(experiment).info.run_id for _ in range(4)}
    second = attempt_of(job, 2)
    with ThreadPoolExecutor(4) as threads:
        continued = set(threads.map(lambda _: second.create_run(experiment).info.run_id, range(4)))
    assert continued == runs


def test_workspaces_other_jobs_and_other_people_begin_new_runs(
    tracking: TrackingWorld, attempt_of: Callable[..., Any]
) -> None:
    job, other = submit(tracking), submit(tracking)
    workspace = submit(tracking, kind="workspace")
    experiment = attempt_of(job, 1).create_experiment("several")
    for each in (job, other, workspace):
        first = attempt_of(each, 1) if each is not job else tracking.client(token=job_token(job.public_id, 1))
        first.create_run(experiment, run_name="same")
    runs = {each.info.run_id for each in tracking.client().search_runs([experiment])}
    assert len(runs) == 3
    by_hand = tracking.client().create_run(experiment, run_name="same").info.run_id
    again = attempt_of(workspace, 2).create_run(experiment, run_name="same").info.run_id
    assert not {by_hand, again} & runs
    assert attempt_of(job, 2).create_run(experiment, run_name="same").info.run_id in runs


RETRIED = """
import os, mlflow
attempt = int(os.environ["FAIRWAY_ATTEMPT"])
mlflow.start_run()
mlflow.log_param("attempt", attempt)
mlflow.log_metric("loss", 1 / attempt, step=attempt)
if attempt == 1:
    raise SystemExit(3)
mlflow.log_text("done", "done.txt")
"""


def test_a_job_that_is_retried_on_a_node_has_one_run(
    tracking: TrackingWorld, harness: EngineHarness, job_with: Callable[..., Job]
) -> None:
    job = job_with(
        str(world_readable_python()), "-c", RETRIED, max_attempts=2, retry_backoff_s=1,
        retry_on=["command_failure"],
    )  # fmt: skip

    def ended() -> bool:
        job.refresh_from_db()
        return job.state not in (JobState.PENDING, JobState.RUNNING)

    assert InProcessEngine().run_until(ended, 120.0)
    assert (job.state, job.attempts.count()) == (JobState.COMPLETED, 2)
    project = tracking.project.public_id
    experiments = tracking_client.call(project, "GET", "experiments/search", max_results=10)["experiments"]
    order = {"experiment_ids": [each["experiment_id"] for each in experiments]}
    (run,) = tracking_client.call(project, "POST", "runs/search", order)["runs"]
    assert run["info"]["status"] == "FINISHED"
    assert {each["key"]: each["value"] for each in run["data"]["params"]} == {"attempt": "2"}
    history = tracking_client.call(
        project, "GET", "metrics/get-history", run_id=run["info"]["run_id"], metric_key="loss"
    )
    assert [point["step"] for point in history["metrics"]] == [1, 2]
