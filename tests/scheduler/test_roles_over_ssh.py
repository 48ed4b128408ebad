"""A chief, two workers and an evaluator on two nodes with real SSH and podman: order of start, ports, and the end."""

from __future__ import annotations

import pytest

from portal.domain.jobs.job_spec import JobRole
from portal.models import Allocation, Job, NodePool, Task
from portal.services.jobs.logs import log_path
from tests.engine_harness import held_milli
from tests.rig.images import RigImage, rig_image
from tests.rig.node import RigNode
from tests.two_rig_nodes import in_state, submit, two_rig_nodes, wait_until

pytestmark = [pytest.mark.rig, pytest.mark.long, pytest.mark.django_db(transaction=True)]

CHIEF = """
import os, pathlib, socket, time
time.sleep(2)
server = socket.create_server(("", int(os.environ["PORT_GRPC"])))
print("listening", flush=True)
while not pathlib.Path("/tmp/end").exists():
    time.sleep(0.1)
"""
WORK = 'echo "$ROLE_NAME $ROLE_RANK of $ROLE_WORLD_SIZE is rank $RANK of $WORLD_SIZE"; while :; do sleep 0.2; done'
ROLES = (
    JobRole(name="chief", command=("python3", "-c", CHIEF), ports=("grpc",), memory_mib=128),
    JobRole(name="worker", tasks=2, command=("sh", "-c", WORK), start_order=1),
    JobRole(
        name="evaluator", command=("sh", "-c", "echo evaluating; exit 3"), gpus_per_task=0, may_fail=True,
        start_order=1,
    ),
)  # fmt: skip


@pytest.fixture(scope="module")
def image() -> RigImage:
    return rig_image("tiny")


@pytest.fixture
def dataset(make_rig, rig_cluster, image, settings, tmp_path):
    dataset = two_rig_nodes(make_rig, rig_cluster, image, [[image.store]] * 2, settings, tmp_path, gpus=2)
    NodePool.objects.update(allow_host_network=True)
    return dataset


def machine_of(dataset, task: Task) -> RigNode:
    return next(each for each in dataset["machines"] if each.name == task.node.name)


def running_job(dataset) -> tuple[Job, list[Task]]:
    """A job whose chief and workers run, and whose evaluator has failed."""
    job = submit(dataset, "true", roles=ROLES, completion_role="chief")
    wait_until(dataset, in_state(job, "RUNNING"), job)
    rows = job.attempts.get().task_rows.select_related("node").order_by("rank")
    wait_until(
        dataset, lambda: [t.state for t in rows.all()] == ["RUNNING"] * 3 + ["FAILED"], job, within_s=120
    )
    return job, list(rows.all())


def test_roles_start_in_order_and_the_end_of_the_chief_ends_the_job(dataset) -> None:
    job, (chief, *workers, evaluator) = running_job(dataset)
    assert len({task.node_id for task in (chief, *workers)}) == 2 and held_milli() == 3000
    assert chief.listening_at is not None and set(chief.role_ports) == {"grpc"}
    assert all(task.running_at > chief.listening_at for task in workers)
    assert (evaluator.exit_code, Allocation.objects.filter(task=evaluator).count()) == (3, 0)
    job.refresh_from_db()
    assert job.state == "RUNNING"

    machine_of(dataset, chief).podman("exec", chief.container, "touch", "/tmp/end")
    wait_until(dataset, in_state(job, "COMPLETED"), job, within_s=120)
    attempt = job.attempts.get()
    assert (attempt.stop_reason, job.message) == ("completed", "The role chief has completed.")
    states = [task.state for task in attempt.task_rows.order_by("rank")]
    assert states == ["COMPLETED", "CANCELLED", "CANCELLED", "FAILED"]
    wait_until(dataset, lambda: not attempt.task_rows.filter(log_complete=False).exists(), job)
    logs = [log_path(job.public_id, 1, rank, "k8s").read_text() for rank in range(4)]
    assert "listening" in logs[0] and "evaluating" in logs[3]
    assert all(f"worker {i} of 2 is rank {i + 1} of 4" in logs[i + 1] for i in range(2)), logs
    assert held_milli() == 0


def test_a_killed_worker_fails_the_job(dataset) -> None:
    job, (_, _, worker, _) = running_job(dataset)
    machine_of(dataset, worker).podman("kill", "--signal", "KILL", worker.container)
    wait_until(dataset, in_state(job, "FAILED"), job, within_s=120)
    assert job.message == "worker 1: The command ended with exit code 137 (SIGKILL)."
    assert held_milli() == 0
