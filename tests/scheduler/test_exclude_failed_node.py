"""A retry avoids the node on which a task failed, if the job asked for that and other nodes are left."""

from __future__ import annotations

from typing import Any

import pytest

from agents.engines.replies import Container, TaskKey
from portal.models import Gpu, Job
from scheduler.nodes.dispatch import record_task_ends
from tests import factories
from tests.services.test_lifecycle import place, run

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.mark.parametrize(
    ("asked", "others", "code", "avoided"),
    [(True, True, 1, True), (False, True, 1, False), (True, False, 1, False), (True, True, 0, False)],
)
def test_a_retry_avoids_the_node_of_the_failure(asked: bool, others: bool, code: int, avoided: bool) -> None:
    factories.cluster_settings()
    dataset: dict[str, Any] = factories.basic_cluster()
    if others:
        factories.node(dataset["pool"])
    job = factories.job(
        dataset["owner"], dataset["project"], dataset["environment"],
        retry_on=["command_failure"], exclude_failed_node=asked,
    )  # fmt: skip
    (task,) = run(place(dataset, job))
    key = TaskKey(job.public_id, 1, 0)
    record_task_ends(None, {task: Container(key, "c", "", "exited", exit_code=code)})
    job = Job.objects.get(pk=job.pk)
    assert job.state == ("PENDING" if code else "COMPLETED")
    assert list(job.avoid_nodes.all()) == ([dataset["node"]] if avoided else [])


def test_the_end_of_an_invalid_task_delays_no_other() -> None:
    factories.cluster_settings()
    dataset: dict[str, Any] = factories.basic_cluster()
    gpus = list(dataset["node"].gpus.all())
    jobs = [factories.job(dataset["owner"], dataset["project"], dataset["environment"]) for _ in range(2)]
    tasks = [run(place(dataset, job, gpus=[gpu]))[0] for job, gpu in zip(jobs, gpus, strict=False)]
    Gpu.objects.filter(pk=gpus[0].pk).update(used_milli=0)  # releasing it violates a constraint
    keys = [TaskKey(job.public_id, 1, 0) for job in jobs]
    record_task_ends(
        None,
        {task: Container(key, "c", "", "exited", exit_code=0) for task, key in zip(tasks, keys, strict=True)},
    )
    assert [Job.objects.get(pk=job.pk).state for job in jobs] == ["RUNNING", "COMPLETED"]
