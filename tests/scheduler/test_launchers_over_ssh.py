"""Launchers on two nodes with real SSH and podman: ranks that log in to each other, and TF_CONFIG in use."""

from __future__ import annotations

import pytest

from portal.domain.jobs.reasons import EndReason
from portal.models import Job, NodePool
from portal.services.jobs.logs import log_path
from tests.rig.images import RigImage, rig_image
from tests.two_rig_nodes import describe, submit, two_rig_nodes, wait_until

pytestmark = [pytest.mark.rig, pytest.mark.django_db(transaction=True)]

VISIT = """
umask
stat -c '%a' "$SSH_KEY"
for host in $(echo "$HOSTS" | tr , ' '); do
  ssh "$host" 'echo "rank $RANK of $WORLD_SIZE has $CUDA_VISIBLE_DEVICES in $PWD, $GREETING"'
done
cut -d' ' -f2 "$HOSTFILE"
"""
MEET = """
import json, os, socket, time

config = json.loads(os.environ["TF_CONFIG"])
cluster, me = config["cluster"], config["task"]
own = cluster[me["type"]][me["index"]].rsplit(":", 1)
peers = {f"{role} {index}": where for role, names in cluster.items() for index, where in enumerate(names)}
server = socket.create_server(("", int(own[1])))
met = []
for name, where in sorted(peers.items()):
    host, port = where.rsplit(":", 1)
    for _ in range(100):
        try:
            socket.create_connection((host, int(port)), 2).close()
        except OSError:
            time.sleep(0.1)
        else:
            met.append(name)
            break
for _ in peers:
    server.accept()
print("I am", me["type"], me["index"], "and met", ", ".join(met), flush=True)
"""
"""Binds the port of its own task in TF_CONFIG, and connects to each task of the cluster."""


@pytest.fixture(scope="module")
def ssh_image() -> RigImage:
    return rig_image("tiny", programs=("sshd", "ssh", "scp"))


@pytest.fixture
def dataset(make_rig, rig_cluster, ssh_image, settings, tmp_path):
    stores = [[ssh_image.store]] * 2
    dataset = two_rig_nodes(make_rig, rig_cluster, ssh_image, stores, settings, tmp_path, gpus=2)
    NodePool.objects.update(allow_host_network=True)
    return dataset


def finish(dataset, job: Job, state: str = "COMPLETED", within_s: float = 90) -> list[str]:
    """Run the job to its end and return the log of each rank."""
    wait_until(dataset, lambda: job.refresh_from_db() or job.ended_at is not None, job, within_s=within_s)
    rows = job.attempts.last().task_rows
    wait_until(dataset, lambda: not rows.filter(log_complete=False).exists(), job)
    paths = [log_path(job.public_id, 1, task.rank, "k8s") for task in rows.order_by("rank")]
    logs = [path.read_text() if path.exists() else "" for path in paths]
    assert job.state == state, "\n".join([describe(job), *logs])
    return logs


@pytest.mark.parametrize("gpus", [2, pytest.param(1, marks=pytest.mark.long)], ids=["two nodes", "one node"])
def test_ranks_log_in_to_each_other_with_the_keys_of_their_attempt(dataset, gpus: int) -> None:
    job = submit(
        dataset, "sh", "-c", VISIT, tasks=2, gpus_per_task=gpus, launcher="custom", env={"GREETING": "it's me"},
        rank_overrides={"1": {"GREETING": "another"}},
    )  # fmt: skip
    first, second = finish(dataset, job)
    nodes = job.attempts.get().task_rows.values("node").distinct().count()
    assert nodes == (2 if gpus == 2 else 1), describe(job)
    assert " 600\n" in first, (first, second)
    for rank, greeting in ((0, "it's me"), (1, "another")):
        assert f"rank {rank} of 2 has GPU-" in first and greeting in first, (first, second)
    assert first.count(f"slots={gpus}\n") == 2
    assert "fairway:" not in first + second


@pytest.mark.long
def test_an_image_without_sshd_is_reported(dataset, tiny_image) -> None:
    dataset["environment"].image = tiny_image.name
    dataset["environment"].archive = str(tiny_image.archive)
    dataset["environment"].save()
    job = submit(dataset, "true", tasks=2, gpus_per_task=2, launcher="mpi")
    logs = finish(dataset, job, "FAILED")
    job.refresh_from_db()
    assert (job.reason, job.exit_code) == (EndReason.EXIT_CODE.value, 127), describe(job)
    assert any("The image has no sshd, which the launcher needs." in log for log in logs), logs


@pytest.mark.parametrize("gpus", [1, pytest.param(0, marks=pytest.mark.long)], ids=["two nodes", "one node"])
def test_tf_config_has_ports_at_which_the_tasks_are_reachable(dataset, gpus: int) -> None:
    job = submit(
        dataset, "python3", "-c", MEET, tasks=4, gpus_per_task=gpus, launcher="tensorflow",
        launcher_options={"strategy": "parameter_server"},
    )  # fmt: skip
    logs = finish(dataset, job)
    for rank, me in enumerate(("chief 0", "ps 0", "worker 0", "worker 1")):
        assert f"I am {me} and met chief 0, ps 0, worker 0, worker 1" in logs[rank], logs


def test_tasks_add_numbers_in_their_image_before_the_command(dataset) -> None:
    NodePool.objects.update(policy={"gang_all_reduce_limit_s": 30})
    job = submit(dataset, "echo", "the command", tasks=2, gpus_per_task=2)
    first, second = finish(dataset, job)
    assert "fairway: all-reduce of 2 tasks by sockets in " in first
    assert "the command" in first and "the command" in second
