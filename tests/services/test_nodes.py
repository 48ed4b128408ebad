"""What nodes tell and what admins say of them: reboots end tasks, unreachable ones keep their GPUs."""

from __future__ import annotations

import pytest
from django.core.management.base import CommandError
from django.db import IntegrityError, transaction

from portal.domain.jobs.reasons import EndReason
from portal.domain.states import GpuHealth, NodeState, NodeTransport
from portal.errors import Conflict, Forbidden, InvalidRequest
from portal.management.commands.node_setup import Command
from portal.models import AuditEntry, Gpu, GpuAlert, GpuLink, Job, Node
from portal.services.lifecycle import job_control
from portal.services.nodes import enrolment, nodes, operations
from portal.services.nodes.gpus import do_return_gpu_to_service, record_gpu_health
from tests import factories
from tests.services.test_lifecycle import place, run

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def dataset():
    pool = factories.pool()
    owner, admin = factories.user(), factories.user(admin=True)
    return {
        "pool": pool,
        "node": factories.node(pool, boot_id="one"),
        "owner": owner,
        "admin": admin,
        "project": factories.project(member=owner),
        "environment": factories.environment(),
    }


def test_gpu_data_reported_by_a_node_is_stored(dataset) -> None:
    reported = hello(dataset)
    reported["gpus"][1] |= {"nvlink_island": 2, "compute_capability": 9.0, "mig_profile": "1g.10gb"}
    nodes.record_hello(dataset["node"].pk, reported, received_s=100.0)
    rows = list(dataset["node"].gpus.values_list("nvlink_island", "compute_capability", "mig_profile"))
    assert rows[:2] == [(None, None, ""), (2, 9.0, "1g.10gb")]


def hello(dataset, boot_id="one", gpus=None, **more):
    reported = [
        {
            "uuid": gpu.uuid,
            "index": gpu.index,
            "model": gpu.model,
            "memory_mib": gpu.memory_mib,
            "health": "ok",
        }
        for gpu in dataset["node"].gpus.all()
    ]
    return {
        "boot_id": boot_id,
        "cpu_count": 8,
        "memory_mib": 32_000,
        "clock_s": 100.5,
        "gpus": reported if gpus is None else gpus,
        **more,
    }


def running(dataset) -> Job:
    job = factories.job(dataset["owner"], dataset["project"], dataset["environment"])
    run(place(dataset, job))
    return job


def test_a_first_hello_makes_an_enrolled_node_ready(dataset):
    node = nodes.do_create_node(
        dataset["admin"],
        name="fresh",
        pool=dataset["pool"],
        link=NodeTransport.SSH,
        host="10.0.0.5",
        host_key="ssh-ed25519 AAAA",
    )
    assert node.state == NodeState.ENROLLING
    gpus = [
        {"uuid": "GPU-new", "index": 0, "model": "X", "memory_mib": 1000, "simulated": True, "health": "ok"}
    ]
    assert nodes.record_hello(node.pk, hello(dataset, gpus=gpus), received_s=100.0) is False
    node.refresh_from_db()
    assert (node.state, node.cpu_milli, node.clock_skew_s, node.simulated) == ("ready", 8000, 0.5, True)
    assert node.gpus.get().simulated


def test_a_new_boot_id_ends_earlier_tasks_and_releases_gpus(dataset):
    job = running(dataset)
    assert nodes.record_hello(dataset["node"].pk, hello(dataset, "one"), received_s=100) is False
    job.refresh_from_db()
    assert job.state == "RUNNING"
    assert nodes.record_hello(dataset["node"].pk, hello(dataset, "two"), received_s=100) is True
    job.refresh_from_db()
    assert job.state == "PENDING"
    assert "restarted" in job.message
    assert not dataset["node"].gpus.filter(used_milli__gt=0).exists()


def test_an_unreachable_node_holds_its_gpus_until_fenced(dataset):
    job = running(dataset)
    with pytest.raises(Conflict):
        nodes.do_fence_node(dataset["admin"], dataset["node"], reason="I am sure")
    nodes.record_unreachable(dataset["node"].pk, "It does not answer.")
    job.refresh_from_db()
    assert job.state == "RUNNING"
    assert dataset["node"].gpus.filter(used_milli=1000).count() == 1
    with pytest.raises(InvalidRequest):
        nodes.do_fence_node(dataset["admin"], dataset["node"], reason=" ")
    assert nodes.do_fence_node(dataset["admin"], dataset["node"], reason="Power cable in my hand.") == 1
    job.refresh_from_db()
    assert job.state == "PENDING"
    assert job.attempts.get().task_rows.get().allocations.get().proof == "fenced"


def test_a_gpu_that_disappears_is_lost_and_its_job_is_preempted(dataset):
    job = running(dataset)
    reported = hello(dataset)["gpus"][1:]
    nodes.record_hello(dataset["node"].pk, hello(dataset, gpus=reported), received_s=100)
    gpu = dataset["node"].gpus.get(index=0)
    assert (gpu.present, gpu.health, gpu.used_milli) == (False, GpuHealth.LOST, 1000)
    attempt = job.attempts.get()
    assert (attempt.state, attempt.stop_reason) == ("COMPLETING", "gpu_lost")
    nodes.record_hello(dataset["node"].pk, hello(dataset), received_s=100)
    back = Gpu.objects.get(pk=gpu.pk)
    assert (back.present, back.health) == (True, GpuHealth.QUARANTINED)
    assert "It was lost (The node no longer reports it) and responds again" in back.health_reason
    nodes.record_hello(dataset["node"].pk, hello(dataset), received_s=100)
    assert Gpu.objects.get(pk=gpu.pk).health == GpuHealth.QUARANTINED
    with pytest.raises(Forbidden):
        do_return_gpu_to_service(dataset["owner"], back)
    assert do_return_gpu_to_service(dataset["admin"], back).health == GpuHealth.OK
    acts = (
        AuditEntry.objects.filter(action__startswith="gpu.")
        .order_by("id")
        .values_list("action", "after__health")
    )
    assert list(acts) == [
        ("gpu.health", "lost"),
        ("gpu.health", "quarantined"),
        ("gpu.return_to_service", "ok"),
    ]


def test_a_fatal_fault_ends_tasks_and_a_lesser_one_only_blocks_new_ones(dataset):
    job = running(dataset)
    gpu = dataset["node"].gpus.get(index=0)
    record_gpu_health(gpu.pk, GpuHealth.QUARANTINED, "Its NVLink had an error.")
    attempt = job.attempts.get()
    assert (attempt.state, attempt.stop_reason) == ("RUNNING", "")
    record_gpu_health(gpu.pk, GpuHealth.QUARANTINED, "The driver told XID 95.", fatal=True)
    attempt.refresh_from_db()
    assert (attempt.state, attempt.stop_reason) == ("COMPLETING", "gpu_lost")
    task = attempt.task_rows.get()
    job_control.record_task_ended(task.pk, exit_code=137, reason=EndReason.EXIT_CODE)
    attempt.refresh_from_db()
    assert (attempt.state, attempt.message) == (
        "FAILED",
        f"A GPU of {dataset['node'].name} failed. The driver told XID 95.",
    )
    other = factories.job(dataset["owner"], dataset["project"], dataset["environment"])
    with pytest.raises(Conflict, match="not healthy"):
        place(dataset, other)


def test_unobserved_errors_are_found_once_by_their_count(dataset):
    def report(count: int | None) -> str:
        reported = hello(dataset)
        reported["gpus"][0]["ecc_uncorrected"] = count
        nodes.record_hello(dataset["node"].pk, reported, received_s=100)
        return str(dataset["node"].gpus.get(index=0).health)

    assert [report(count) for count in (5, 5, 0, None, 7)] == ["ok"] * 5
    job = running(dataset)
    assert report(8) == "quarantined"
    assert job.attempts.get().stop_reason == "gpu_lost"
    do_return_gpu_to_service(dataset["admin"], dataset["node"].gpus.get(index=0))
    assert [report(count) for count in (8, 8, 9)] == ["ok", "ok", "quarantined"]


def test_a_gpu_with_a_warning_takes_work_and_shows_it(dataset):
    gpu = dataset["node"].gpus.get(index=0)
    for message in ("It runs slower: it is too hot.", ""):
        record_gpu_health(gpu.pk, GpuHealth.OK, message)
        gpu.refresh_from_db()
        assert (gpu.health, gpu.health_reason) == ("ok", message)
    assert not AuditEntry.objects.filter(action="gpu.health").exists()


def test_a_gpu_that_moves_to_another_node_is_not_held_against_it(dataset):
    reported = hello(dataset)["gpus"]
    nodes.record_hello(dataset["node"].pk, hello(dataset, gpus=reported[1:]), received_s=100)
    other = factories.node(dataset["pool"], gpus=0)
    nodes.record_hello(other.pk, hello(dataset, gpus=reported[:1]), received_s=100)
    moved = Gpu.objects.get(uuid=reported[0]["uuid"])
    assert (moved.node, moved.health, moved.health_reason) == (other, GpuHealth.OK, "")


def test_a_gpu_reported_by_a_second_node_does_not_move_and_raises_an_alert(dataset):
    job, node = running(dataset), dataset["node"]
    newcomer = factories.node(dataset["pool"], gpus=0)
    reported = hello(dataset)["gpus"]
    own = {"uuid": "GPU-own", "index": 9, "model": "X", "memory_mib": 1000, "health": "ok"}
    for _ in range(2):
        nodes.record_hello(newcomer.pk, hello(dataset, gpus=[*reported, own]), received_s=100)
    assert node.gpus.count() == len(reported) and newcomer.gpus.get().uuid == "GPU-own"
    open_alerts = GpuAlert.objects.filter(kind="claimed")
    assert {(row.gpu.node, row.claimant, row.repeat_count) for row in open_alerts} == {(node, newcomer, 2)}
    assert open_alerts.count() == len(reported)
    # what the newcomer says of that GPU ends nothing, and what is not present is still held
    for gpu in reported:
        gpu["health"] = "lost"
    nodes.record_hello(newcomer.pk, hello(dataset, gpus=[*reported, own]), received_s=100)
    node.gpus.update(present=False)
    nodes.record_hello(newcomer.pk, hello(dataset, gpus=reported[:1]), received_s=100)
    job.refresh_from_db()
    assert (job.state, job.attempts.get().stop_reason) == ("RUNNING", "")
    assert Gpu.objects.get(uuid=reported[0]["uuid"]).node == node, "its allocation is there"
    assert open_alerts.filter(resolved_at__isnull=True).get().gpu.uuid == reported[0]["uuid"]


def test_a_gpu_of_a_retired_node_moves(dataset):
    Node.objects.filter(pk=dataset["node"].pk).update(state=NodeState.RETIRED.value)
    newcomer = factories.node(dataset["pool"], gpus=0)
    nodes.record_hello(newcomer.pk, hello(dataset), received_s=100)
    assert newcomer.gpus.count() == 4 and not GpuAlert.objects.exists()


def test_a_gpu_listed_twice_counts_once_and_keeps_its_health(dataset):
    gpu = dataset["node"].gpus.get(index=0)
    record_gpu_health(gpu.pk, GpuHealth.QUARANTINED, "Its memory had errors.")
    reported = hello(dataset)["gpus"]
    pairs = [
        {"a": reported[0]["uuid"], "b": reported[1]["uuid"], "nvlinks": lines, "level": "single"}
        for lines in (1, 2)
    ]
    nodes.record_hello(
        dataset["node"].pk, hello(dataset, gpus=[*reported, *reported], links=pairs), received_s=100
    )
    gpu.refresh_from_db()
    assert (dataset["node"].gpus.count(), gpu.health) == (4, GpuHealth.QUARANTINED)
    assert GpuLink.objects.filter(kind="nvlink").count() == GpuLink.objects.filter(kind="pcie").count() == 1


def test_a_full_disk_takes_a_node_out_of_service_until_space_is_free(dataset):
    job = running(dataset)
    full = "The disk of the node is full: /var has 3 MiB left; 512 MiB are kept."
    nodes.record_disk_full(dataset["node"].pk, full)
    node = Node.objects.get(pk=dataset["node"].pk)
    assert node.state == NodeState.CORDONED
    assert node.state_reason == f"{full} It accepts jobs again when there is enough space."
    job.refresh_from_db()
    assert job.state == "RUNNING"
    nodes.record_disk_full(node.pk, full)
    nodes.record_disk_full(node.pk, None)
    node.refresh_from_db()
    assert (node.state, node.state_reason) == (NodeState.READY, "")
    assert AuditEntry.objects.filter(action="node.disk").count() == 2
    nodes.do_set_node_state(dataset["admin"], node, NodeState.CORDONED, reason="new fans")
    nodes.record_disk_full(node.pk, full)
    nodes.record_disk_full(node.pk, None)
    node.refresh_from_db()
    assert (node.state, node.state_reason) == (NodeState.CORDONED, "new fans")


def test_an_unchanged_node_costs_one_statement(dataset, django_assert_num_queries):
    node = dataset["node"]
    with django_assert_num_queries(1):
        nodes.record_contact(node.pk, 0.1234, compared=True)
    node.refresh_from_db()
    assert node.clock_skew_s == 0.123 and node.reconciled_at and node.last_seen_at >= node.reconciled_at
    full = "The disk of the node is full: /var has 3 MiB left."
    nodes.record_contact(node.pk, disk_full_message=full)
    node.refresh_from_db()
    assert node.state == NodeState.CORDONED and node.state_reason.startswith(full)
    nodes.record_unreachable(node.pk, "It does not answer.")
    nodes.record_contact(node.pk, 0.2)
    node.refresh_from_db()
    assert (node.reachable, node.status_message, node.unreachable_since) == (True, "", None)
    assert (node.state, node.clock_skew_s) == (NodeState.READY, 0.2)


def test_a_busy_node_is_not_retired_and_members_cannot_drain(dataset):
    running(dataset)
    with pytest.raises(Conflict, match="1 tasks"):
        nodes.do_set_node_state(dataset["admin"], dataset["node"], NodeState.RETIRED)
    with pytest.raises(Forbidden):
        nodes.do_set_node_state(dataset["owner"], dataset["node"], NodeState.DRAINED)


@pytest.mark.parametrize(
    "bad",
    [
        {"host": ""},
        {"host": "-oProxyCommand=x"},
        {"host": "a b"},
        {"port": 0},
        {"host_key": ""},
        {"host_key": "ssh-ed25519 $(id)"},
        {"ssh_user": "x; id"},
        {"ssh_user": "root"},
        {"ssh_user": ""},
        {"name": "A!"},
    ],
)
def test_nonsense_addresses_are_refused(dataset, bad):
    fields = {"name": "fine", "host": "10.0.0.9", "port": 22, "host_key": "ssh-ed25519 AAAA"} | bad
    with pytest.raises(InvalidRequest):
        nodes.do_create_node(dataset["admin"], pool=dataset["pool"], **fields)


@pytest.mark.parametrize("column", ["ssh_user", "runtime"])
def test_the_database_refuses_values_that_no_script_accepts(dataset, column):
    with pytest.raises(IntegrityError), transaction.atomic():
        Node.objects.filter(pk=dataset["node"].pk).update(**{column: "x; id"})


@pytest.mark.parametrize(
    ("field", "choices"),
    [
        ("engine", {"engine": "$(id)"}),
        ("engine", {"runtime": "docker", "engine": "rootless"}),
        ("runtime", {"runtime": "podman\nid"}),
        ("account", {"account": "a b"}),
    ],
)
def test_a_script_is_made_of_offered_choices_only(field, choices):
    with pytest.raises(InvalidRequest) as refused:
        enrolment.get_script(
            "10.0.0.9", **{"engine": "auto", "runtime": "podman", "account": "fairway"} | choices
        )
    assert list(refused.value.fields) == [field]


def test_the_command_offers_the_choices_of_the_script():
    parser = Command().create_parser("manage.py", "node-setup")
    for option in ("--engine", "--runtime"):
        with pytest.raises(CommandError):
            parser.parse_args([option, "x; id"])


def test_check_steps_appear_in_order(dataset):
    check = operations.do_start_connection_test(dataset["admin"], dataset["node"])
    operations.record_operation_step(check.public_id, name="tcp", ok=True, message="Answers.", seconds=0.01)
    operations.record_operation_step(
        check.public_id, name="key", ok=False, message="Another key.", seconds=0.02
    )
    operations.record_connection_test_finished(check.public_id, False)
    check.refresh_from_db()
    assert [step["name"] for step in check.steps] == ["tcp", "key"]
    assert check.ok is False
