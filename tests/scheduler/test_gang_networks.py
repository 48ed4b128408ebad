"""Gangs over two nodes with real SSH and podman: on networks that a pool names, and where nodes are apart."""

from __future__ import annotations

import pytest

from portal.domain.nodes.gang_fabric import GangFabric
from portal.models import Job, Node, NodeIncident, NodePool, Rendezvous
from portal.services.jobs.logs import log_path
from portal.services.jobs.submission import do_cancel_job
from portal.services.nodes.gang_fabric import do_set_gang_fabric
from tests import factories
from tests.agents.ranks import MEETS
from tests.engine_harness import held_milli
from tests.rig.images import RigImage, rig_image
from tests.two_rig_nodes import in_state, submit, two_rig_nodes, wait_until

pytestmark = [pytest.mark.rig, pytest.mark.long, pytest.mark.django_db(transaction=True)]

TORCH = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor([float(dist.get_rank() + 1)])
dist.all_reduce(total)
rank, size, place = dist.get_rank(), dist.get_world_size(), os.environ["MASTER_ADDR"]
print("rank", rank, "of", size, "sum", total.item(), place, flush=True)
dist.destroy_process_group()
"""


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


def log_of(job: Job, rank: int) -> str:
    path = log_path(job.public_id, job.attempts.last().number, rank, "k8s")
    return path.read_text() if path.exists() else ""


def logs_of(dataset, job: Job) -> list[str]:
    rows = job.attempts.last().task_rows
    wait_until(dataset, lambda: not rows.filter(log_complete=False).exists(), job)
    return [log_of(job, rank) for rank in range(job.tasks)]


def name(dataset, **named) -> None:
    """Has the pool name this, and waits until the nodes have said that they have it."""
    pool = dataset["nodes"][0].pool
    do_set_gang_fabric(factories.user(admin=True), pool, allowed=True, fabric=GangFabric(**named))
    wait_until(dataset, lambda: not Node.objects.exclude(missing_requirements="").exists())


@pytest.mark.parametrize(("how", "why"), [("DROP", "no answer in 3 s"), ("REJECT", "connection refused")])
def test_disconnected_nodes_are_named_and_nothing_starts(dataset, how: str, why: str) -> None:
    first, second = dataset["machines"]
    first.close_gang_ports(how)
    job = submit(dataset, "sh", "-c", "echo begun; exec sleep 600", tasks=2, gpus_per_task=2, max_attempts=1)
    wait_until(dataset, lambda: job.attempts.filter(state="NODE_FAIL").exists(), job)
    attempt = job.attempts.order_by("number").first()
    port = Rendezvous.objects.get(attempt=attempt).port
    said = f"{second.name} cannot reach {first.name} ({first.address}:{port}): {why}."
    assert attempt.message.startswith(said) and attempt.stop_reason == "rendezvous_unreachable"
    assert attempt.all_prepared_at is None and not attempt.task_rows.filter(running_at__isnull=False).exists()
    assert attempt.task_rows.get(rank=1).status_message == said
    assert NodeIncident.objects.filter(job=job, kind="peer_unreachable").count() >= 2
    job.refresh_from_db()
    assert job.state == "PENDING"
    first.heal()
    wait_until(dataset, lambda: job.attempts.filter(state="RUNNING").exists(), job, within_s=90)
    do_cancel_job(dataset["owner"], job)
    wait_until(dataset, in_state(job, "CANCELLED"), job)
    assert held_milli() == 0


def test_torchrun_and_gloo_rendezvous_on_an_ipv6_only_interface(dataset) -> None:
    for number, machine in enumerate(dataset["machines"], 1):
        for words in (
            ("link", "add", "ib0", "link", "eth0", "type", "macvlan", "mode", "bridge"),
            ("-6", "addr", "add", f"fd00:77::{number}/64", "dev", "ib0", "nodad"),
            ("link", "set", "ib0", "up"),
        ):
            machine.execute("ip", *words)
    name(dataset, interface="fd00:77::/64")
    job = submit(
        dataset, "python3", "-c", TORCH, tasks=2, gpus_per_task=2, launcher="torchrun", memory_mib=1500, shm_mib=128
    )  # fmt: skip
    wait_until(dataset, in_state(job, "COMPLETED"), job, within_s=180)
    row = Rendezvous.objects.get(attempt__job=job)
    assert (row.address, row.connectivity_check, set(row.interfaces.values())) == (
        "fd00:77::1",
        True,
        {"ib0"},
    )
    text = logs_of(dataset, job)
    assert all(f"rank {rank} of 4 sum 10.0 fd00:77::1" in text[rank // 2] for rank in range(4)), text


def test_ranks_meet_on_a_network_of_the_engine_that_people_made(dataset) -> None:
    for number, machine in enumerate(dataset["machines"], 1):
        machine.podman(
            *("network", "create", "--driver", "macvlan", "--opt", "parent=eth0"),
            *("--subnet", "10.9.0.0/16", "--ip-range", f"10.9.{number}.0/24", "fabric0"),
        )
    name(dataset, network="fabric0")
    job = submit(dataset, "python3", "-c", MEETS, tasks=2, gpus_per_task=2)
    wait_until(dataset, in_state(job, "COMPLETED"), job, within_s=120)
    row = Rendezvous.objects.get(attempt__job=job)
    assert (row.network, row.node_network, row.connectivity_check) == ("fabric0", False, False)
    assert row.address.startswith("10.9.1.")
    assert any("heard one" in text for text in logs_of(dataset, job))
    for machine in dataset["machines"]:
        assert "fabric0" in machine.podman("network", "ls", "--format", "{{.Name}}")  # it is theirs, not ours
