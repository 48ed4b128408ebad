"""The engine over real SSH with real podman containers: images brought, gangs, memory, partitions, reboots."""

from __future__ import annotations

from pathlib import Path

import pytest

from portal.domain.jobs.reasons import EndReason
from portal.domain.states import JobState, NodeState
from portal.models import ImagePresence, Job, Node
from portal.services.environments.archives import archive_config_digest
from portal.services.environments.pins import do_update_image
from portal.services.environments.prefetch import do_prefetch_image
from portal.services.jobs.logs import log_path
from portal.services.lifecycle import job_control
from tests import factories
from tests.engine_harness import held_milli, wait_for
from tests.rig.cluster import RigCluster
from tests.rig.images import RigImage
from tests.rig.node import RigNode
from tests.two_rig_nodes import describe, in_state, submit, two_rig_nodes, wait_until

pytestmark = [pytest.mark.rig, pytest.mark.early, pytest.mark.django_db(transaction=True)]


@pytest.fixture
def dataset(make_rig, rig_cluster: RigCluster, tiny_image: RigImage, settings, tmp_path: Path):
    """Two enrolled nodes; the first has the tiny image, the second has none."""
    return two_rig_nodes(make_rig, rig_cluster, tiny_image, [[tiny_image.store], []], settings, tmp_path)


def mark(machine: RigNode, image: str, afterwards: str = "true") -> None:
    """Gives the name of an image to another one, which has a file /marked more."""
    machine.execute(
        "sh",
        "-ec",
        f"podman create --name changed {image} true; echo another > /root/marked;"
        "podman cp /root/marked changed:/marked;"
        f"podman export changed | podman import --quiet - {image}; podman rm changed; {afterwards}",
    )


def last_line(job: Job, rank: int = 0) -> str:
    text = log_path(job.public_id, 1, rank, "k8s").read_text()
    return text.splitlines()[-1].rpartition(" F ")[2]


def containers(machine: RigNode) -> list[str]:
    return machine.podman("ps", "-a", "--format", "{{.Names}}").split()


def test_a_gang_over_two_nodes_with_its_image_copied_to_one(dataset) -> None:
    first, second = dataset["nodes"]
    shown = dict(ImagePresence.objects.values_list("node__name", "state"))
    assert shown == {first.name: "present", second.name: "missing"}
    job = submit(
        dataset, "sh", "-c", "echo rank $FAIRWAY_TASK on $CUDA_VISIBLE_DEVICES", tasks=2, gpus_per_task=4
    )
    wait_until(dataset, in_state(job, JobState.COMPLETED), job)
    assert ImagePresence.objects.get(node=second).state == "present"
    for task in job.attempts.get().task_rows.all():
        text = log_path(job.public_id, 1, task.rank, "k8s").read_text()
        uuids = ",".join(task.allocations.order_by("gpu__index").values_list("gpu__uuid", flat=True))
        assert f"rank {task.rank} on {uuids}" in text
    assert held_milli() == 0
    assert [containers(machine) for machine in dataset["machines"]] == [[], []]


@pytest.mark.long  # each of the three is also told by an engine of its own: test_docker, test_podman, test_ssh_node
def test_out_of_memory_a_missing_image_and_a_full_disk_are_reported(dataset) -> None:
    eat = "x = []\nwhile True: x.append(bytearray(b'x') * 10_000_000)"
    job = submit(dataset, "python3", "-c", eat, memory_mib=96)
    wait_until(dataset, in_state(job, JobState.FAILED), job)
    task = job.attempts.get().task_rows.get()
    assert (job.reason, task.oom) == (EndReason.OUT_OF_MEMORY, True), describe(job)
    assert task.peak_memory_mib is None or task.peak_memory_mib >= 60

    nowhere = factories.environment(tool=False, image="localhost/nowhere:1", archive="/nowhere/image.tar")
    job = factories.job(dataset["owner"], dataset["project"], nowhere, command=["true"], max_attempts=1)
    wait_until(dataset, in_state(job, JobState.FAILED), job)
    name = job.attempts.get().task_rows.get().node.name
    assert job.reason == EndReason.IMAGE_MISSING, describe(job)
    assert job.message.startswith(f"The image localhost/nowhere:1 is not on {name} and could not be brought")

    machine, node = dataset["machines"][0], dataset["nodes"][0]
    Node.objects.filter(pk=dataset["nodes"][1].pk).update(state="cordoned", state_reason="new fans")
    machine.fill_disk()
    job = submit(dataset, "true")
    wait_until(dataset, lambda: node.refresh_from_db() or node.state == NodeState.CORDONED, job)
    assert node.state_reason.startswith("The disk of the node is full: /var/lib/fairway-node")
    assert node.state_reason.endswith("It takes work again by itself once there is harness.")
    machine.free_disk()
    Job.objects.filter(pk=job.pk).update(reason="")  # its pause before the next try is not what is looked at
    wait_until(dataset, in_state(job, JobState.COMPLETED), job)
    node.refresh_from_db()
    assert (node.state, node.state_reason) == (NodeState.READY, "")


def test_a_retagged_image_does_not_run_until_an_administrator_accepts_it(dataset) -> None:
    first, environment = dataset["machines"][0], dataset["environment"]
    says = ("sh", "-c", "cat /marked 2> /dev/null || echo as it was")
    environment.refresh_from_db()
    job = submit(dataset, *says)
    pinned = job.image_digest
    assert pinned == archive_config_digest(environment.archive, environment.image) != ""
    wait_until(dataset, in_state(job, JobState.COMPLETED), job)

    # Another image takes the name on the first node; the second node gets no work.
    Node.objects.filter(pk=dataset["nodes"][1].pk).update(state="cordoned", state_reason="new fans")
    mark(first, environment.image)
    job = submit(dataset, *says)
    wait_until(dataset, in_state(job, JobState.COMPLETED), job)
    assert (job.image_digest, last_line(job)) == (pinned, "as it was")

    node = dataset["nodes"][0]
    there = ImagePresence.objects.filter(environment=environment, node=node)
    wait_until(dataset, lambda: there.get().image_pin not in ("", pinned))
    environment.refresh_from_db()
    assert environment.image_digest == pinned
    earlier = submit(dataset, *says)
    do_update_image(factories.user("root", admin=True), environment)
    environment.refresh_from_db()
    later = submit(dataset, *says)
    wait_until(dataset, in_state(earlier, JobState.COMPLETED), earlier)
    wait_until(dataset, in_state(later, JobState.COMPLETED), later)
    assert [last_line(earlier), last_line(later)] == ["as it was", "another"]
    assert (earlier.image_digest, later.image_digest) == (pinned, environment.image_digest)


@pytest.mark.long  # beside the test above it shows only that the node without the image fetches it
def test_a_gang_runs_one_image_where_a_tag_names_two(dataset) -> None:
    """The second node has another image under the tag, and not the one that the first resolved."""
    environment, second = dataset["environment"], dataset["machines"][1]
    do_prefetch_image(factories.user("root", admin=True), environment)
    there = ImagePresence.objects.filter(environment=environment, node=dataset["nodes"][1])
    wait_until(dataset, lambda: there.get().state == "present")
    environment.refresh_from_db()
    mark(second, environment.image, f"podman rmi --force {environment.image_digest}")
    job = submit(dataset, "sh", "-c", "cat /marked 2> /dev/null || echo as it was", tasks=2, gpus_per_task=4)
    wait_until(dataset, in_state(job, JobState.COMPLETED), job)
    assert {last_line(job, rank) for rank in range(2)} == {"as it was"}


def test_a_disconnected_node_keeps_its_job_and_gpus(dataset) -> None:
    job = submit(dataset, "sleep", "600", gpus_per_task=4)
    wait_until(dataset, lambda: job.attempts.filter(state="RUNNING").exists(), job)
    place = dataset["nodes"].index(job.attempts.get().task_rows.get().node)
    machine, node = dataset["machines"][place], dataset["nodes"][place]
    machine.cut()
    wait_until(dataset, lambda: node.refresh_from_db() or not node.reachable, job, within_s=45)
    assert node.status_message and held_milli() == 4000
    other = submit(dataset, "true", gpus_per_task=4)
    wait_until(dataset, in_state(other, JobState.COMPLETED), other)
    job_control.cancel_job(job.pk, EndReason.CANCELLED_BY_USER, actor="ada")
    machine.heal()
    wait_until(dataset, in_state(job, JobState.CANCELLED), job)
    assert held_milli() == 0 and containers(machine) == []
    node.refresh_from_db()
    assert node.reachable and node.status_message == ""


def test_the_job_of_a_restarted_node_gets_another_attempt(dataset) -> None:
    job = submit(dataset, "sleep", "600")
    wait_until(dataset, lambda: job.attempts.filter(state="RUNNING").exists(), job)
    place = dataset["nodes"].index(job.attempts.get().task_rows.get().node)
    dataset["machines"][place].reboot()
    wait_until(dataset, lambda: job.attempts.filter(number=2, state="RUNNING").exists(), job)
    first = job.attempts.get(number=1)
    assert (first.state, first.reason) == ("NODE_FAIL", EndReason.NODE_REBOOTED)
    live = [name for machine in dataset["machines"] for name in containers(machine)]
    assert len(live) == 1


def test_another_host_key_is_never_spoken_to(dataset) -> None:
    machine, node = dataset["machines"][0], dataset["nodes"][0]
    machine.change_host_key()
    wait_until(dataset, lambda: node.refresh_from_db() or not node.reachable)
    assert "key" in node.status_message
    wait_for("the other node works on", lambda: Node.objects.filter(reachable=True).count() == 1)


@pytest.mark.long
def test_an_image_is_copied_before_any_job_needs_it(dataset) -> None:
    second, admin = dataset["nodes"][1], factories.user("root", admin=True)
    there = ImagePresence.objects.filter(environment=dataset["environment"], node=second)
    nowhere = factories.environment(tool=False, image="localhost/nowhere:1", archive="/nowhere/image.tar")
    assert do_prefetch_image(admin, dataset["environment"]) == 1
    do_prefetch_image(admin, nowhere, second)
    wait_until(dataset, lambda: there.get().state == "present")
    failed = ImagePresence.objects.filter(environment=nowhere, node=second)
    wait_until(dataset, lambda: failed.get().state == "failed")
    assert "The archive cannot be read" in failed.get().detail
    assert not ImagePresence.objects.filter(pull_requested_at__isnull=False).exists()
    assert dataset["environment"].image in dataset["machines"][1].podman(
        "images", "--format", "{{.Repository}}:{{.Tag}}"
    )
