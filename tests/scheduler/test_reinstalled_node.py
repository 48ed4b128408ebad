"""Machines with sshd and podman that are reinstalled, renamed, moved, retired and added again, while jobs run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from django.test import Client
from django.urls import reverse

from agents.keys import fingerprint
from portal.domain.states import JobState, NodeState
from portal.models import Job, Node, NodeOperation, User
from portal.services.nodes import identity, nodes
from scheduler.nodes.node_checks import run_check, run_move
from tests import factories
from tests.engine_harness import held_milli
from tests.rig.cluster import RigCluster
from tests.rig.images import RigImage
from tests.rig.node import RigNode
from tests.two_rig_nodes import describe, in_state, submit, two_rig_nodes, wait_until

pytestmark = [pytest.mark.rig, pytest.mark.django_db(transaction=True)]


@pytest.fixture
def dataset(
    make_rig, rig_cluster: RigCluster, tiny_image: RigImage, settings, tmp_path: Path
) -> dict[str, Any]:
    """Two enrolled nodes with the tiny image; only the first accepts jobs."""
    stores = [[tiny_image.store], [tiny_image.store]]
    made = two_rig_nodes(make_rig, rig_cluster, tiny_image, stores, settings, tmp_path)
    Node.objects.filter(pk=made["nodes"][1].pk).update(state="cordoned", state_reason="new fans")
    return made | {"admin": factories.user("root", admin=True), "cluster": rig_cluster}


def started(dataset, *command: str) -> Job:
    job = submit(dataset, *(command or ("sleep", "600")))
    wait_until(dataset, lambda: job.attempts.filter(state="RUNNING").exists(), job)
    return job


def refreshed(node: Node) -> Node:
    node.refresh_from_db()
    return node


def steps(operation: NodeOperation) -> dict[str, bool]:
    operation.refresh_from_db()
    return {step["name"]: step["ok"] for step in operation.steps}


def confirm(admin: User, node: Node, machine: RigNode) -> NodeOperation:
    return identity.do_confirm_host_key(
        admin, node, fingerprint=fingerprint(machine.host_key()), reason="a new disk"
    )


def test_a_reinstalled_machine_returns_after_its_key_is_confirmed_and_it_is_set_up_again(dataset) -> None:
    machine, node, admin = dataset["machines"][0], dataset["nodes"][0], dataset["admin"]
    job = started(dataset)
    machine.reinstall()
    wait_until(dataset, lambda: refreshed(node).unreachable_code == "host_key_mismatch", job)
    assert fingerprint(machine.host_key()) in node.status_message
    browser = Client()
    browser.force_login(admin)
    assert "Confirm the new key" in browser.get(reverse("node", args=[node.public_id])).content.decode()

    operation = confirm(admin, node, machine)
    job.refresh_from_db()
    assert (job.state, held_milli()) == ("RUNNING", 1000)
    run_check(operation.public_id)
    assert steps(operation)["Host key"] and not steps(operation)["Control key"]
    page = browser.get(reverse("node-operation", args=[node.public_id, operation.public_id])).content.decode()
    assert reverse("enrol-node", args=[node.public_id]) in page
    wait_until(dataset, lambda: refreshed(node).unreachable_code == "authentication_refused", job)
    assert held_milli() == 1000  # nothing has proved that its job ended

    dataset["cluster"].enrol(machine)
    wait_until(dataset, lambda: job.attempts.filter(number=2, state="RUNNING").exists(), job)
    first = job.attempts.get(number=1)
    assert (first.state, first.reason) == ("NODE_FAIL", "node_rebooted"), describe(job)
    assert any(f"The node {node.name} was reinstalled" in event.message for event in job.events.all()), (
        describe(job)
    )
    assert job.attempts.get(number=2).task_rows.get().node == refreshed(node)
    assert (held_milli(), len(machine.podman("ps", "--quiet").split())) == (1000, 1)
    assert (node.state, node.reachable, node.status_message) == ("ready", True, "")
    operation = identity.do_start_connection_test(admin, node)
    run_check(operation.public_id)
    assert operation.__class__.objects.get(pk=operation.pk).ok, steps(operation)


def test_a_machine_with_a_third_key_gets_nothing_although_the_second_was_confirmed(dataset) -> None:
    machine, node, admin = dataset["machines"][0], dataset["nodes"][0], dataset["admin"]
    job = started(dataset)
    machine.change_host_key()
    confirm(admin, node, machine)
    # only the key changed: its job continues over a new connection
    wait_until(dataset, lambda: is_applied(node), job)
    machine.change_host_key()
    wait_until(dataset, lambda: refreshed(node).unreachable_code == "host_key_mismatch", job)
    assert in_state(job, JobState.RUNNING)() and held_milli() == 1000
    confirm(admin, node, machine)
    wait_until(dataset, lambda: refreshed(node).reachable, job)
    assert in_state(job, JobState.RUNNING)() and job.attempts.count() == 1
    assert node.host_key_changes.count() == 2


def is_applied(node: Node) -> bool:
    """Return whether the engine has received a hello over a connection with the present address and key."""
    return refreshed(node).reachable and not node.next_hello_is_first


def test_a_job_continues_while_its_node_is_renamed_and_moved(dataset) -> None:
    machine, node, admin = dataset["machines"][0], dataset["nodes"][0], dataset["admin"]
    job = started(dataset, "sh", "-c", "while [ ! -e /tmp/end ]; do sleep 0.1; done; echo done")
    other = machine.address.rpartition(".")[0] + ".77"
    machine.execute("ip", "addr", "add", f"{other}/24", "dev", "eth0")
    identity.do_rename_node(admin, node, name="moved")

    # the other machine is none of its addresses
    elsewhere = identity.do_move_node(admin, node, host=other.removesuffix("77") + "78")
    run_move(elsewhere.public_id)
    elsewhere.refresh_from_db()
    assert elsewhere.ok is False and refreshed(node).host == machine.address

    operation = identity.do_move_node(admin, node, host=other)
    run_move(operation.public_id)
    assert steps(operation)["Machine"], operation.steps
    assert (operation.ok, refreshed(node).host, node.name) == (True, other, "moved")
    wait_until(dataset, lambda: is_applied(node), job)
    machine.execute("iptables", "-I", "INPUT", "-d", machine.address, "-j", "REJECT")
    (name,) = machine.podman("ps", "--format", "{{.Names}}").split()
    machine.podman("exec", name, "touch", "/tmp/end")
    wait_until(dataset, in_state(job, JobState.COMPLETED), job)
    assert job.attempts.count() == 1 and held_milli() == 0
    assert job.attempts.get().task_rows.get().node.name == "moved"


def test_another_machine_with_a_copy_of_the_host_key_is_not_the_node(dataset) -> None:
    machine, clone = dataset["machines"]
    node, admin = dataset["nodes"][0], dataset["admin"]
    Node.objects.filter(pk=dataset["nodes"][1].pk).update(state="retired")
    for name in ("ssh_host_ed25519_key", "ssh_host_ed25519_key.pub"):
        text = machine.execute("cat", f"/etc/ssh/{name}").stdout
        clone.execute("sh", "-c", f"cat > /etc/ssh/{name}", text_in=text)
    clone.stop_sshd()
    clone.start_sshd()
    job = started(dataset)
    operation = identity.do_move_node(admin, node, host=clone.address)
    run_move(operation.public_id)
    assert [name for name, ok in steps(operation).items() if not ok] == ["Machine"]
    assert (operation.ok, refreshed(node).host) == (False, machine.address)
    assert in_state(job, JobState.RUNNING)() and held_milli() == 1000


def test_a_machine_is_retired_and_added_again_with_its_name_and_address(dataset) -> None:
    machine, node, admin = dataset["machines"][0], dataset["nodes"][0], dataset["admin"]
    before = submit(dataset, "true")
    wait_until(dataset, in_state(before, JobState.COMPLETED), before)
    nodes.do_set_node_state(admin, node, NodeState.RETIRED)
    fresh = nodes.do_create_node(
        admin, name=node.name, pool=node.pool, host=node.host, port=node.port, host_key=machine.host_key()
    )
    wait_until(dataset, lambda: refreshed(fresh).state == "ready")
    after = submit(dataset, "true", gpus_per_task=4)
    wait_until(dataset, in_state(after, JobState.COMPLETED), after)
    tasks = [job.attempts.get().task_rows.get() for job in (before, after)]
    assert [(task.node_id, task.node.name) for task in tasks] == [(node.pk, node.name), (fresh.pk, node.name)]
    assert (node.gpus.count(), fresh.gpus.count()) == (0, 4)
