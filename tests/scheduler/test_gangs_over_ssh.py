"""A gang over two nodes with real SSH and podman: PyTorch by torchrun, gloo between them, a rank killed."""

from __future__ import annotations

import pytest

from portal.models import Allocation, Job, NodePool, Rendezvous
from portal.services.jobs.logs import log_path
from portal.services.jobs.submission import do_cancel_job
from tests.engine_harness import held_milli, wait_for
from tests.rig.images import RigImage, rig_image
from tests.rig.node import RigNode
from tests.two_rig_nodes import in_state, submit, two_rig_nodes, wait_until

pytestmark = [pytest.mark.rig, pytest.mark.long, pytest.mark.django_db(transaction=True)]

TRAIN = """
import os, sys, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
attempt = int(os.environ["FAIRWAY_ATTEMPT"])
for step in range(4000 if attempt == 1 else 40):
    total = torch.tensor([float(rank + 1)])
    dist.all_reduce(total)
    if step == 20:
        print("rank", rank, "of", size, "on", os.environ["LOCAL_RANK"], "sum", total.item(), flush=True)
    time.sleep(0.05)
dist.destroy_process_group()
print("done", rank, flush=True)
"""
"""All-reduce in a loop: the first attempt works until it is killed, the second one ends."""


@pytest.fixture(scope="module")
def torch_image() -> RigImage:
    return rig_image("tiny", also="torch==2.13.0")


@pytest.fixture
def dataset(make_rig, rig_cluster, torch_image, settings, tmp_path):
    dataset = two_rig_nodes(
        make_rig, rig_cluster, torch_image, [[torch_image.store]] * 2, settings, tmp_path, gpus=2
    )
    NodePool.objects.update(allow_host_network=True)
    return dataset


def log_of(job: Job, attempt: int, rank: int) -> str:
    path = log_path(job.public_id, attempt, rank, "k8s")
    return path.read_text() if path.exists() else ""


def reported(dataset, job: Job, attempt: int, rank: int) -> str:
    """What a rank has written so far, as its node has it."""
    task = job.attempts.get(number=attempt).task_rows.select_related("node").get(rank=rank)
    machine: RigNode = next(each for each in dataset["machines"] if each.name == task.node.name)
    return machine.podman("logs", task.container)


def test_torchrun_and_gloo_over_two_nodes_with_a_rank_killed_in_the_middle(dataset) -> None:
    job = submit(
        dataset, "python3", "-c", TRAIN, tasks=2, gpus_per_task=2, launcher="torchrun", retry_on=["command_failure"],
        memory_mib=1500, shm_mib=128,
    )  # fmt: skip
    wait_until(dataset, in_state(job, "RUNNING"), job)
    first = job.attempts.get()
    wait_until(dataset, lambda: first.task_rows.filter(state="RUNNING").count() == 2, job, within_s=120)
    assert set(first.task_rows.values_list("node", flat=True)) == {node.pk for node in dataset["nodes"]}
    row = Rendezvous.objects.get()
    assert row.node_network and row.address == dataset["machines"][0].address
    # four ranks, two on a node: 1 + 2 + 3 + 4
    wait_for("gloo", lambda: all("sum 10.0" in reported(dataset, job, 1, rank) for rank in (0, 1)), 60)

    victim = first.task_rows.select_related("node").get(rank=1)
    machine = next(each for each in dataset["machines"] if each.name == victim.node.name)
    machine.podman("kill", "--signal", "KILL", victim.container)
    wait_until(dataset, lambda: job.attempts.count() == 2, job, within_s=120)
    first.refresh_from_db()
    assert (first.state, first.stop_reason) == ("FAILED", "exit_code")
    proofs = Allocation.objects.filter(task__attempt=first).values_list("proof", flat=True)
    assert set(proofs) == {"gone"}
    wait_until(dataset, in_state(job, "COMPLETED"), job, within_s=180)
    second = job.attempts.get(number=2)
    assert second.rendezvous.port == row.port + 1
    rows = second.task_rows
    wait_until(dataset, lambda: not rows.filter(log_complete=False).exists(), job)
    text = [log_of(job, 2, rank) for rank in (0, 1)]
    assert all(f"rank {rank} of 4" in text[rank // 2] for rank in range(4)), text
    assert all(f"done {rank}" in text[rank // 2] for rank in range(4)), text
    assert held_milli() == 0


def test_two_ranks_on_one_node_meet_on_the_bridge_of_their_job(dataset) -> None:
    NodePool.objects.update(allow_host_network=False)
    script = TRAIN.replace("4000 if attempt == 1 else 40", "30")
    job = submit(
        dataset, "python3", "-c", script, tasks=2, gpus_per_task=1, memory_mib=700, env={"OMP_NUM_THREADS": "1"}
    )  # fmt: skip
    wait_until(dataset, in_state(job, "COMPLETED"), job, within_s=180)
    attempt = job.attempts.get()
    assert attempt.task_rows.values("node").distinct().count() == 1
    assert attempt.rendezvous.address == "" and not attempt.rendezvous.node_network
    wait_until(dataset, lambda: not attempt.task_rows.filter(log_complete=False).exists(), job)
    assert all("of 2 on 0 sum 3.0" in log_of(job, 1, rank) for rank in range(2))


def test_a_node_lost_before_a_gang_starts_undoes_it_on_the_other(dataset) -> None:
    says = "echo begun; exec sleep 600"
    dataset["machines"][1].cut()
    job = submit(dataset, "sh", "-c", says, tasks=2, gpus_per_task=2)
    wait_until(dataset, lambda: job.attempts.exists(), job)
    first = job.attempts.get()
    here, there = sorted(first.task_rows.select_related("node"), key=lambda task: task.node.name)
    held = Allocation.objects.filter(ended_at__isnull=True)
    wait_until(dataset, lambda: not held.filter(task=here).exists(), job, within_s=150)
    first.refresh_from_db()
    there.refresh_from_db()
    assert (first.stop_reason, first.all_prepared_at, first.running_at) == ("start_refused", None, None)
    assert dataset["machines"][0].podman("ps", "--all", "--quiet") == ""
    # what a command went out for is held until its node speaks; where none did the record is proof enough
    assert held.filter(task=there).exists() == (there.start_sent_at is not None)
    dataset["machines"][1].heal()
    wait_until(dataset, lambda: job.attempts.filter(number=2, state="RUNNING").exists(), job, within_s=150)
    assert set(Allocation.objects.filter(task__attempt=first).values_list("proof", flat=True)) <= {
        "gone",
        "never_started",
    }
    do_cancel_job(dataset["owner"], job)
    wait_until(dataset, in_state(job, "CANCELLED"), job)
    assert held_milli() == 0
