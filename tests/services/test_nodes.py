"""What nodes tell and what admins say of them: reboots end tasks, unreachable ones keep their GPUs."""

from __future__ import annotations

import pytest
from django.core.management.base import CommandError
from django.db import IntegrityError, transaction

from portal.domain.reasons import EndReason
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
def scene():
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


def test_what_a_node_tells_of_its_gpus_is_kept(scene) -> None:
    told = hello(scene)
    told["gpus"][1] |= {"nvlink_island": 2, "compute_capability": 9.0, "mig_profile": "1g.10gb"}
    nodes.record_hello(scene["node"].pk, told, received_s=100.0)
    rows = list(scene["node"].gpus.values_list("nvlink_island", "compute_capability", "mig_profile"))
    assert rows[:2] == [(None, None, ""), (2, 9.0, "1g.10gb")]


def hello(scene, boot_id="one", gpus=None, **more):
    told = [
        {
            "uuid": gpu.uuid,
            "index": gpu.index,
            "model": gpu.model,
            "memory_mib": gpu.memory_mib,
            "health": "ok",
        }
        for gpu in scene["node"].gpus.all()
    ]
    return {
        "boot_id": boot_id,
        "cpu_count": 8,
        "memory_mib": 32_000,
        "clock_s": 100.5,
        "gpus": told if gpus is None else gpus,
        **more,
    }


def running(scene) -> Job:
    job = factories.job(scene["owner"], scene["project"], scene["environment"])
    run(place(scene, job))
    return job


def test_a_first_hello_makes_an_enrolled_node_ready(scene):
    node = nodes.do_create_node(
        scene["admin"],
        name="fresh",
        pool=scene["pool"],
        link=NodeTransport.SSH,
        host="10.0.0.5",
        host_key="ssh-ed25519 AAAA",
    )
    assert node.state == NodeState.ENROLLING
    gpus = [
        {"uuid": "GPU-new", "index": 0, "model": "X", "memory_mib": 1000, "simulated": True, "health": "ok"}
    ]
    assert nodes.record_hello(node.pk, hello(scene, gpus=gpus), received_s=100.0) is False
    node.refresh_from_db()
    assert (node.state, node.cpu_milli, node.clock_skew_s, node.simulated) == ("ready", 8000, 0.5, True)
    assert node.gpus.get().simulated


def test_a_new_boot_id_ends_what_ran_and_frees_its_gpus(scene):
    job = running(scene)
    assert nodes.record_hello(scene["node"].pk, hello(scene, "one"), received_s=100) is False
    job.refresh_from_db()
    assert job.state == "RUNNING"
    assert nodes.record_hello(scene["node"].pk, hello(scene, "two"), received_s=100) is True
    job.refresh_from_db()
    assert job.state == "PENDING"
    assert "restarted" in job.message
    assert not scene["node"].gpus.filter(used_milli__gt=0).exists()


def test_an_unreachable_node_keeps_its_gpus_until_it_is_fenced(scene):
    job = running(scene)
    with pytest.raises(Conflict):
        nodes.do_fence_node(scene["admin"], scene["node"], reason="I am sure")
    nodes.record_unreachable(scene["node"].pk, "It does not answer.")
    job.refresh_from_db()
    assert job.state == "RUNNING"
    assert scene["node"].gpus.filter(used_milli=1000).count() == 1
    with pytest.raises(InvalidRequest):
        nodes.do_fence_node(scene["admin"], scene["node"], reason=" ")
    assert nodes.do_fence_node(scene["admin"], scene["node"], reason="Power cable in my hand.") == 1
    job.refresh_from_db()
    assert job.state == "PENDING"
    assert job.attempts.get().task_rows.get().allocations.get().proof == "fenced"


def test_a_gpu_that_vanishes_is_lost_and_its_job_is_asked_to_leave(scene):
    job = running(scene)
    told = hello(scene)["gpus"][1:]
    nodes.record_hello(scene["node"].pk, hello(scene, gpus=told), received_s=100)
    gpu = scene["node"].gpus.get(index=0)
    assert (gpu.present, gpu.health, gpu.used_milli) == (False, GpuHealth.LOST, 1000)
    attempt = job.attempts.get()
    assert (attempt.state, attempt.stop_reason) == ("COMPLETING", "gpu_lost")
    nodes.record_hello(scene["node"].pk, hello(scene), received_s=100)
    back = Gpu.objects.get(pk=gpu.pk)
    assert (back.present, back.health) == (True, GpuHealth.QUARANTINED)
    assert "It was lost (The node no longer reports it) and responds again" in back.health_reason
    nodes.record_hello(scene["node"].pk, hello(scene), received_s=100)
    assert Gpu.objects.get(pk=gpu.pk).health == GpuHealth.QUARANTINED
    with pytest.raises(Forbidden):
        do_return_gpu_to_service(scene["owner"], back)
    assert do_return_gpu_to_service(scene["admin"], back).health == GpuHealth.OK
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


def test_a_fatal_fault_ends_what_runs_and_a_lesser_one_only_keeps_new_work_off(scene):
    job = running(scene)
    gpu = scene["node"].gpus.get(index=0)
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
        f"A GPU of {scene['node'].name} failed. The driver told XID 95.",
    )
    other = factories.job(scene["owner"], scene["project"], scene["environment"])
    with pytest.raises(Conflict, match="not healthy"):
        place(scene, other)


def test_errors_that_nobody_watched_are_found_by_their_count_once(scene):
    def tell(count: int | None) -> str:
        told = hello(scene)
        told["gpus"][0]["ecc_uncorrected"] = count
        nodes.record_hello(scene["node"].pk, told, received_s=100)
        return str(scene["node"].gpus.get(index=0).health)

    assert [tell(count) for count in (5, 5, 0, None, 7)] == ["ok"] * 5
    job = running(scene)
    assert tell(8) == "quarantined"
    assert job.attempts.get().stop_reason == "gpu_lost"
    do_return_gpu_to_service(scene["admin"], scene["node"].gpus.get(index=0))
    assert [tell(count) for count in (8, 8, 9)] == ["ok", "ok", "quarantined"]


def test_a_gpu_with_a_warning_takes_work_and_says_so_until_it_is_over(scene):
    gpu = scene["node"].gpus.get(index=0)
    for message in ("It runs slower: it is too hot.", ""):
        record_gpu_health(gpu.pk, GpuHealth.OK, message)
        gpu.refresh_from_db()
        assert (gpu.health, gpu.health_reason) == ("ok", message)
    assert not AuditEntry.objects.filter(action="gpu.health").exists()


def test_a_gpu_that_moves_to_another_node_is_not_held_against_it(scene):
    told = hello(scene)["gpus"]
    nodes.record_hello(scene["node"].pk, hello(scene, gpus=told[1:]), received_s=100)
    other = factories.node(scene["pool"], gpus=0)
    nodes.record_hello(other.pk, hello(scene, gpus=told[:1]), received_s=100)
    moved = Gpu.objects.get(uuid=told[0]["uuid"])
    assert (moved.node, moved.health, moved.health_reason) == (other, GpuHealth.OK, "")


def test_a_gpu_that_another_node_has_or_holds_does_not_move_and_raises_an_alarm(scene):
    job, node = running(scene), scene["node"]
    newcomer = factories.node(scene["pool"], gpus=0)
    told = hello(scene)["gpus"]
    own = {"uuid": "GPU-own", "index": 9, "model": "X", "memory_mib": 1000, "health": "ok"}
    for _ in range(2):
        nodes.record_hello(newcomer.pk, hello(scene, gpus=[*told, own]), received_s=100)
    assert node.gpus.count() == len(told) and newcomer.gpus.get().uuid == "GPU-own"
    open_alarms = GpuAlert.objects.filter(kind="claimed")
    assert {(row.gpu.node, row.claimant, row.repeat_count) for row in open_alarms} == {(node, newcomer, 2)}
    assert open_alarms.count() == len(told)
    # what the newcomer says of that GPU ends nothing, and what is not present is still held
    for gpu in told:
        gpu["health"] = "lost"
    nodes.record_hello(newcomer.pk, hello(scene, gpus=[*told, own]), received_s=100)
    node.gpus.update(present=False)
    nodes.record_hello(newcomer.pk, hello(scene, gpus=told[:1]), received_s=100)
    job.refresh_from_db()
    assert (job.state, job.attempts.get().stop_reason) == ("RUNNING", "")
    assert Gpu.objects.get(uuid=told[0]["uuid"]).node == node, "its allocation is there"
    assert open_alarms.filter(resolved_at__isnull=True).get().gpu.uuid == told[0]["uuid"]


def test_a_gpu_of_a_retired_node_moves(scene):
    Node.objects.filter(pk=scene["node"].pk).update(state=NodeState.RETIRED.value)
    newcomer = factories.node(scene["pool"], gpus=0)
    nodes.record_hello(newcomer.pk, hello(scene), received_s=100)
    assert newcomer.gpus.count() == 4 and not GpuAlert.objects.exists()


def test_a_gpu_that_a_hello_names_twice_counts_once_and_keeps_its_health(scene):
    gpu = scene["node"].gpus.get(index=0)
    record_gpu_health(gpu.pk, GpuHealth.QUARANTINED, "Its memory had errors.")
    told = hello(scene)["gpus"]
    pairs = [
        {"a": told[0]["uuid"], "b": told[1]["uuid"], "nvlinks": lines, "level": "single"} for lines in (1, 2)
    ]
    nodes.record_hello(scene["node"].pk, hello(scene, gpus=[*told, *told], links=pairs), received_s=100)
    gpu.refresh_from_db()
    assert (scene["node"].gpus.count(), gpu.health) == (4, GpuHealth.QUARANTINED)
    assert GpuLink.objects.filter(kind="nvlink").count() == GpuLink.objects.filter(kind="pcie").count() == 1


def test_a_full_disk_takes_a_node_out_of_service_until_there_is_room(scene):
    job = running(scene)
    full = "The disk of the node is full: /var has 3 MiB left; 512 MiB are kept."
    nodes.record_disk_full(scene["node"].pk, full)
    node = Node.objects.get(pk=scene["node"].pk)
    assert node.state == NodeState.CORDONED
    assert node.state_reason == f"{full} It accepts jobs again when there is enough space."
    job.refresh_from_db()
    assert job.state == "RUNNING"
    nodes.record_disk_full(node.pk, full)
    nodes.record_disk_full(node.pk, None)
    node.refresh_from_db()
    assert (node.state, node.state_reason) == (NodeState.READY, "")
    assert AuditEntry.objects.filter(action="node.disk").count() == 2
    nodes.do_set_node_state(scene["admin"], node, NodeState.CORDONED, reason="new fans")
    nodes.record_disk_full(node.pk, full)
    nodes.record_disk_full(node.pk, None)
    node.refresh_from_db()
    assert (node.state, node.state_reason) == (NodeState.CORDONED, "new fans")


def test_a_node_that_goes_on_as_before_costs_one_statement(scene, django_assert_num_queries):
    node = scene["node"]
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


def test_a_busy_node_is_not_retired_and_members_cannot_drain(scene):
    running(scene)
    with pytest.raises(Conflict, match="1 tasks"):
        nodes.do_set_node_state(scene["admin"], scene["node"], NodeState.RETIRED)
    with pytest.raises(Forbidden):
        nodes.do_set_node_state(scene["owner"], scene["node"], NodeState.DRAINED)


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
def test_nonsense_addresses_are_refused(scene, bad):
    fields = {"name": "fine", "host": "10.0.0.9", "port": 22, "host_key": "ssh-ed25519 AAAA"} | bad
    with pytest.raises(InvalidRequest):
        nodes.do_create_node(scene["admin"], pool=scene["pool"], **fields)


@pytest.mark.parametrize("column", ["ssh_user", "runtime"])
def test_the_database_refuses_values_that_no_script_accepts(scene, column):
    with pytest.raises(IntegrityError), transaction.atomic():
        Node.objects.filter(pk=scene["node"].pk).update(**{column: "x; id"})


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


def test_check_steps_appear_in_order(scene):
    check = operations.do_start_connection_test(scene["admin"], scene["node"])
    operations.record_operation_step(check.public_id, name="tcp", ok=True, message="Answers.", seconds=0.01)
    operations.record_operation_step(
        check.public_id, name="key", ok=False, message="Another key.", seconds=0.02
    )
    operations.record_connection_test_finished(check.public_id, False)
    check.refresh_from_db()
    assert [step["name"] for step in check.steps] == ["tcp", "key"]
    assert check.ok is False
