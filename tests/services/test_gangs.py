"""Gangs in the record: where ranks meet, two steps, an end that frees what no node was told of, and tries."""

from __future__ import annotations

import datetime as dt

import pytest
from django.db import IntegrityError, transaction
from django.utils import timezone

from portal.domain.jobs.reasons import EndReason
from portal.domain.nodes.gang_fabric import GangFabric
from portal.domain.states import JobState
from portal.errors import Conflict, Forbidden, InvalidRequest, Unsatisfiable
from portal.models import Allocation, Attempt, AuditEntry, Job, Node, NodePool, Rendezvous, Task
from portal.services.jobs.launching import attempt_gang
from portal.services.lifecycle import job_control, rendezvous_check
from portal.services.lifecycle.job_control import RankPlacement
from portal.services.lifecycle.rendezvous_check import should_check_rendezvous
from portal.services.nodes import quarantine
from portal.services.nodes.gang_fabric import do_set_gang_fabric, do_set_interface
from portal.services.nodes.nodes import record_network_info
from scheduler import periodic
from scheduler.core.decide import decide
from scheduler.nodes.gang_connectivity import exclude_faulty_node
from scheduler.nodes.task_spec import JobVolumes, RankAssignment, build_task_spec
from scheduler.snapshot.decision_input import take_snapshot
from tests import factories

pytestmark = pytest.mark.django_db(transaction=True)


def hello(number: int, ports: tuple[int, int] = (32_000, 32_002)) -> dict[str, object]:
    plain = {"name": "eth0", "address": f"192.0.2.{number}", "chosen": True}
    fabric = {"name": "ib0", "address": f"10.0.0.{number}", "chosen": False}
    return {
        "interfaces": [fabric, plain],
        "rendezvous_ports": list(ports),
        "capabilities": ["rendezvous_port"],
    }


@pytest.fixture
def dataset():
    dataset = factories.basic_cluster() | {"other": None}
    dataset["nodes"] = [dataset["node"], factories.node(dataset["pool"])]
    NodePool.objects.update(allow_host_network=True)
    dataset["pool"].refresh_from_db()
    for number, node in enumerate(dataset["nodes"], 1):
        Node.objects.filter(pk=node.pk).update(agent_info=hello(number))
        node.refresh_from_db()
    return dataset


def submit(dataset, **fields) -> Job:
    return factories.job(
        dataset["owner"], dataset["project"], dataset["environment"], **{"tasks": 2, **fields}
    )


def place(dataset, job: Job, *nodes: Node) -> Attempt:
    """Rank after rank on these nodes, each on the first GPU there that is free."""
    with transaction.atomic():
        row = Job.objects.select_for_update().get(pk=job.pk)
        taken: set[int] = set()
        slots = []
        for node in nodes or dataset["nodes"]:
            gpu = node.gpus.filter(used_milli=0).exclude(pk__in=taken).order_by("index").first()
            taken.add(gpu.pk)
            slots.append(RankPlacement(node, [(gpu.pk, 1000)]))
        return job_control.start_attempt(row, NodePool.objects.get(pk=dataset["pool"].pk), slots, epoch=1)


def tasks(attempt: Attempt) -> list[Task]:
    return list(attempt.task_rows.select_related("attempt").order_by("rank"))


def test_ranks_meet_at_the_chosen_interface_and_a_port_of_their_own(dataset) -> None:
    first = place(dataset, submit(dataset)).rendezvous
    assert (first.address, first.port, first.node_network) == ("192.0.2.1", 32_000, True)
    assert first.interfaces == {node.public_id: "eth0" for node in dataset["nodes"]}
    Node.objects.filter(pk=dataset["node"].pk).update(gang_interface="ib0")
    dataset["node"].refresh_from_db()
    second = place(dataset, submit(dataset)).rendezvous
    assert (second.address, second.port) == ("10.0.0.1", 32_001)
    assert second.interfaces[dataset["node"].public_id] == "ib0"
    with pytest.raises(IntegrityError), transaction.atomic():
        Rendezvous.objects.filter(pk=second.pk).update(port=32_000)
    other = place(dataset, submit(dataset), *reversed(dataset["nodes"])).rendezvous
    assert (other.node, other.port) == (dataset["nodes"][1], 32_000)  # another node has ports of its own


def test_a_port_is_free_again_with_the_end_and_not_the_next_to_be_tried(dataset) -> None:
    job = submit(dataset)
    attempt = place(dataset, job)
    job_control.request_stop(attempt.pk, EndReason.START_REFUSED)
    again = place(dataset, job)
    assert (again.number, again.rendezvous.port) == (2, 32_001)
    assert place(dataset, submit(dataset)).rendezvous.port == 32_002
    assert place(dataset, submit(dataset)).rendezvous.port == 32_000
    third = factories.node(dataset["pool"], agent_info=hello(3))
    with pytest.raises(Conflict, match="in use"):
        place(dataset, submit(dataset), dataset["node"], third)


def test_ranks_on_one_node_get_its_address_and_none_without_permission(dataset) -> None:
    here = place(dataset, submit(dataset), dataset["node"], dataset["node"]).rendezvous
    assert (here.address, here.node_network) == ("", False)
    NodePool.objects.update(allow_host_network=False)
    assert not Rendezvous.objects.filter(attempt=place(dataset, submit(dataset))).exists()
    assert not Rendezvous.objects.filter(
        attempt=place(dataset, submit(dataset, tasks=1), dataset["node"])
    ).exists()


def test_gangs_on_nodes_of_before_run_without_a_meeting(dataset) -> None:
    Node.objects.filter(pk=dataset["nodes"][1].pk).update(agent_info={"capabilities": ["owner"]})
    dataset["nodes"][1].refresh_from_db()
    for nodes in (dataset["nodes"], [dataset["nodes"][1]] * 2):
        assert not Rendezvous.objects.filter(attempt=place(dataset, submit(dataset), *nodes)).exists()


def test_a_task_that_a_restored_record_finds_running_does_not_keep_the_others(dataset) -> None:
    attempt = place(dataset, submit(dataset))
    first, second = tasks(attempt)
    job_control.record_task_running(first.pk, container="c0", ports={})
    assert job_control.mark_task_sent(second)
    job_control.record_task_prepared(second.pk)
    attempt.refresh_from_db()
    assert attempt.all_prepared_at is not None and job_control.mark_task_sent(tasks(attempt)[1])


def test_no_rank_starts_before_all_are_prepared(dataset) -> None:
    attempt = place(dataset, submit(dataset))
    first, second = tasks(attempt)
    assert attempt.gang_start and job_control.mark_task_sent(first)
    job_control.record_task_prepared(first.pk)
    assert not job_control.mark_task_sent(first)
    assert job_control.mark_task_sent(second)
    job_control.record_task_prepared(second.pk)
    attempt.refresh_from_db()
    assert attempt.all_prepared_at is not None
    assert all(job_control.mark_task_sent(task) for task in tasks(attempt))


def test_a_refusal_releases_unsent_tasks_and_holds_the_others_until_proof(dataset) -> None:
    job = submit(dataset)
    attempt = place(dataset, job)
    first, second = tasks(attempt)
    assert job_control.mark_task_sent(first)
    job_control.record_task_prepared(first.pk)
    job_control.request_stop(attempt.pk, EndReason.START_REFUSED, message="The node refused.")
    proofs = Allocation.objects.filter(task__attempt=attempt).order_by("task__rank")
    assert list(proofs.values_list("proof", flat=True)) == ["", "never_started"]
    assert not job_control.mark_task_sent(second)
    job_control.record_task_prepared(second.pk)  # an answer that came late changes nothing
    job.refresh_from_db()
    assert job.state == JobState.RUNNING
    job_control.record_task_ended(first.pk, exit_code=None, reason=EndReason.CONTAINER_LOST)
    job.refresh_from_db()
    attempt.refresh_from_db()
    assert (job.state, attempt.state, attempt.stop_reason) == (JobState.PENDING, "FAILED", "start_refused")
    assert not Rendezvous.objects.filter(live=True).exists()


def test_an_older_attempt_holds_its_gpus_until_its_nodes_report(dataset) -> None:
    attempt = place(dataset, submit(dataset))
    Attempt.objects.filter(pk=attempt.pk).update(gang_start=False)
    assert job_control.mark_task_sent(tasks(attempt)[0])
    job_control.request_stop(attempt.pk, EndReason.START_REFUSED)
    assert not Allocation.objects.exclude(proof="").exists()


def test_a_gang_does_not_wait_for_a_node_that_fell_silent(dataset) -> None:
    job = submit(dataset)
    attempt = place(dataset, job)
    first, _ = tasks(attempt)
    assert job_control.mark_task_sent(first)
    job_control.record_task_prepared(first.pk)
    ago = timezone.now() - dt.timedelta(seconds=periodic.GANG_NODE_WAIT_S - 5)
    silent = Node.objects.filter(pk=dataset["nodes"][1].pk)
    silent.update(reachable=False, unreachable_since=ago)
    periodic.stop_gangs_on_unreachable_nodes()
    attempt.refresh_from_db()
    assert attempt.stop_requested_at is None
    silent.update(unreachable_since=ago - dt.timedelta(seconds=10))
    periodic.stop_gangs_on_unreachable_nodes()
    job_control.record_task_ended(first.pk, exit_code=None, reason=EndReason.CONTAINER_LOST)
    job.refresh_from_db()
    assert (job.state, job.reason) == (JobState.PENDING, "start_refused")


@pytest.mark.parametrize("wants", [True, False])
def test_one_failed_rank_ends_all_and_restarts_them_as_often_as_requested(dataset, wants: bool) -> None:
    job = submit(dataset, retry_on=["command_failure"] if wants else [], max_attempts=2)
    for states in [("PENDING", "FAILED"), ("FAILED", None)]:
        attempt = place(dataset, job)
        for task in tasks(attempt):
            job_control.mark_task_sent(task)
            job_control.record_task_running(task.pk, container=f"c{task.pk}", ports={})
        first, second = tasks(attempt)
        job_control.record_task_ended(second.pk, exit_code=137, reason=EndReason.EXIT_CODE)
        attempt.refresh_from_db()
        assert (attempt.state, attempt.stop_reason) == ("COMPLETING", "exit_code")
        job_control.record_task_ended(first.pk, exit_code=143, reason=EndReason.EXIT_CODE)
        job.refresh_from_db()
        assert (job.state, job.exit_code) == (states[0] if wants else "FAILED", 137)
        if not wants:
            return


def test_gang_requests_are_validated(dataset) -> None:
    with pytest.raises(InvalidRequest) as unknown:
        submit(dataset, launcher="mpirun")
    assert "none, torchrun" in unknown.value.fields["launcher"]
    with pytest.raises(InvalidRequest) as elastic:
        submit(dataset, launcher="jax", min_tasks=1)
    assert "an elastic job can use torchrun, horovod" in elastic.value.fields["launcher"]
    for wrong, said in (
        ({"launcher": "torchrun", "launcher_options": {"speed": 1}}, "no option speed; it has processes"),
        ({"launcher": "torchrun", "launcher_options": {"max_restarts": 101}}, "between 0 and 100"),
        ({"launcher": "torchrun", "launcher_options": {"max_restarts": True}}, "of the type integer"),
        ({"launcher": "horovod", "launcher_options": {"controller": "nccl"}}, "Choose one of gloo, mpi"),
        (
            {"launcher": "horovod", "min_tasks": 1, "launcher_options": {"cycle_time_ms": 2.0}},
            "Horovod cannot change cycle_time_ms in an elastic job",
        ),
        ({"launcher": "tensorflow", "launcher_options": {"strategy": "mirrored"}}, "has one task"),
        (
            {"launcher": "tensorflow", "launcher_options": {"strategy": "parameter_server"}},
            "at least 3 tasks",
        ),
        ({"rank_overrides": {"2": {"A": "b"}}}, "no rank 2; ranks are numbered from 0 to 1"),
        ({"rank_overrides": {"1": {"CUDA_VISIBLE_DEVICES": "0"}}}, "set by Fairway"),
    ):
        with pytest.raises(InvalidRequest) as error:
            submit(dataset, **wrong)
        assert said in next(iter(error.value.fields.values()))
    assert submit(dataset, launcher="torchrun").launcher == "torchrun"
    NodePool.objects.update(allow_host_network=False)
    with pytest.raises(Unsatisfiable) as never:
        submit(dataset, launcher="torchrun", gpus_per_task=2)
    assert "one task with 4 GPUs" in never.value.message
    assert never.value.details["nearest"] == {"tasks": 1, "gpus_per_task": 4, "launcher": "torchrun"}
    assert submit(dataset, launcher="torchrun", tasks=1, gpus_per_task=4).tasks == 1
    assert submit(dataset).launcher == "none"


def test_administrators_open_the_network_and_choose_interfaces(dataset) -> None:
    admin, devices = factories.user(admin=True), ("/dev/infiniband/uverbs0",)
    with pytest.raises(Forbidden):
        do_set_gang_fabric(dataset["owner"], dataset["pool"], allowed=False, fabric=GangFabric())
    with pytest.raises(InvalidRequest, match="is not a device"):
        do_set_gang_fabric(admin, dataset["pool"], allowed=True, fabric=GangFabric(devices=("/dev/../sda",)))
    fabric = GangFabric(devices=devices, adapters="mlx5_0")
    do_set_gang_fabric(admin, dataset["pool"], allowed=True, fabric=fabric, reason="a fabric")
    row = place(dataset, submit(dataset)).rendezvous
    assert (row.devices, row.adapters) == (list(devices), "mlx5_0")
    with pytest.raises(InvalidRequest, match=r"ib0, eth0"):
        do_set_interface(admin, dataset["node"], "eth7")
    do_set_interface(admin, dataset["node"], "ib0")
    dataset["node"].refresh_from_db()
    assert place(dataset, submit(dataset)).rendezvous.address == "10.0.0.1"
    acts = list(AuditEntry.objects.order_by("id").values_list("action", "reason"))
    assert acts == [("pool.gang_network", "a fabric"), ("node.interface", "")]


def name(dataset, **named) -> None:
    do_set_gang_fabric(factories.user(admin=True), dataset["pool"], allowed=True, fabric=GangFabric(**named))
    for node in (dataset["pool"], *dataset["nodes"]):
        node.refresh_from_db()


def test_the_fabric_of_a_pool_decides_the_rendezvous_and_nodes_without_it_get_no_gang(dataset) -> None:
    second = dataset["nodes"][1]
    name(dataset, interface="10.0.0.0/24")
    row = place(dataset, submit(dataset)).rendezvous
    assert (row.address, set(row.interfaces.values())) == ("10.0.0.1", {"ib0"})
    assert not any(node.missing_requirements for node in dataset["nodes"])
    reported = hello(2)["interfaces"][1:]
    record_network_info(second.pk, {"interfaces": reported})
    second.refresh_from_db()
    assert second.missing_requirements == "It has no address in 10.0.0.0/24."
    gang, single = submit(dataset, gpus_per_task=second.gpus.count()), submit(dataset, tasks=1)
    inputs = take_snapshot(factories.cluster_settings())
    ineligible = {row.job: row.ineligible_nodes for row in inputs.snapshot.pending}
    assert ineligible == {gang.public_id: (second.public_id,), single.public_id: ()}
    verdict = next(v for v in decide(inputs.snapshot, inputs.policy).verdicts if v.job == gang.public_id)
    assert verdict.code == "unsatisfiable"
    assert (
        f"{second.name} does not meet its pool's requirements for gangs: It has no address in 10.0.0.0/24."
        in verdict.message
    )
    do_set_interface(factories.user(admin=True), second, "eth0")  # an administrator knows better of this one
    second.refresh_from_db()
    assert (
        second.missing_requirements == ""
        and second.gang_address(dataset["pool"].fabric).address == "192.0.2.2"
    )


def test_in_an_engine_network_rank_zero_has_a_unique_address(dataset) -> None:
    subnet = {"subnet": "10.9.0.0/24", "range": ["10.9.0.32", "10.9.0.39"], "gateway": "10.9.0.1"}
    networks = {"podman": [{"name": "fabric0", "driver": "macvlan", "subnets": [subnet]}]}
    for node in dataset["nodes"]:
        record_network_info(node.pk, {"networks": networks})
    name(dataset, network="fabric0", devices=("/dev/infiniband/uverbs*",))
    rows = [place(dataset, submit(dataset)).rendezvous for _ in range(3)]
    assert [row.address for row in rows] == ["10.9.0.39", "10.9.0.38", "10.9.0.37"]
    assert {(row.network, row.node_network, row.connectivity_check) for row in rows} == {
        ("fabric0", False, False)
    }
    job_control.request_stop(rows[0].attempt_id, EndReason.START_REFUSED)
    assert (
        place(dataset, submit(dataset)).rendezvous.address == "10.9.0.36"
    )  # one that failed is not the next
    attempt = rows[1].attempt
    for task in tasks(attempt):
        part = RankAssignment(attempt.number, task.rank, (), attempt_gang(attempt, None), attempt.rendezvous)
        spec = build_task_spec("lab", attempt.job, part, task.node, JobVolumes(), "")
        assert (spec["network"], spec["devices"]) == ("fabric0", ["/dev/infiniband/uverbs*"])
        assert spec.get("address") == ("10.9.0.38" if task.rank == 0 else None)
        assert "host_network" not in spec and "rendezvous_port" not in spec
        assert spec["env"]["MASTER_ADDR"] == "10.9.0.38" and spec["env"]["NCCL_SOCKET_IFNAME"] == "eth0"
    record_network_info(dataset["nodes"][1].pk, {"networks": {"podman": []}})
    dataset["nodes"][1].refresh_from_db()
    assert dataset["nodes"][1].missing_requirements == "Its podman has no network fabric0."


def test_ranks_start_once_every_other_node_reached_rank_zero(dataset) -> None:
    third = factories.node(dataset["pool"])
    dataset["nodes"].append(third)
    for number, node in enumerate(dataset["nodes"], 1):
        reported = hello(number)
        Node.objects.filter(pk=node.pk).update(
            agent_info=reported | {"capabilities": [*reported["capabilities"], "check_rendezvous"]}
        )
        node.refresh_from_db()
    first, second, third = dataset["nodes"]
    attempt = place(dataset, submit(dataset, tasks=4), first, second, second, third)

    def to_try() -> list[int]:
        fresh = Attempt.objects.select_related("rendezvous").get(pk=attempt.pk)
        return [task.rank for task in tasks(attempt) if should_check_rendezvous(task, fresh)]

    def listens_since() -> dt.datetime | None:
        return Rendezvous.objects.get(attempt=attempt).check_started_at

    rows = tasks(attempt)
    for task in rows[:3]:
        job_control.record_task_prepared(task.pk)
    assert to_try() == [] and listens_since() is None
    job_control.record_task_prepared(rows[3].pk)
    assert to_try() == [1, 2, 3]
    rendezvous_check.record_rendezvous_reached(rows[1].pk)
    assert to_try() == [3]
    attempt.refresh_from_db()
    assert attempt.all_prepared_at is None
    since = listens_since()
    assert since is not None
    # one that fails asks whether anybody listened at all
    assert not rendezvous_check.record_rendezvous_failure(rows[3].pk, since)
    assert to_try() == [] and job_control.should_prepare(tasks(attempt)[0], attempt)
    assert not rendezvous_check.record_rendezvous_failure(
        rows[3].pk, since
    )  # of the time before: it says nothing
    job_control.record_task_prepared(rows[0].pk)
    assert to_try() == [3]
    again = listens_since()
    assert (
        again is not None
        and again != since
        and not rendezvous_check.record_rendezvous_failure(rows[3].pk, since)
    )
    assert rendezvous_check.record_rendezvous_failure(rows[3].pk, again)
    rendezvous_check.record_rendezvous_reached(rows[3].pk)
    attempt.refresh_from_db()
    assert attempt.all_prepared_at is not None and to_try() == []

    # the agent of rank 0's node listens until rank 0 begins: another rank would take it for that
    def to_start() -> list[int]:
        fresh = Attempt.objects.select_related("rendezvous").get(pk=attempt.pk)
        return [task.rank for task in tasks(attempt) if job_control.should_start(task, fresh)]

    assert to_start() == [0]
    job_control.record_task_running(rows[0].pk, container="c", ports={})
    assert to_start() == [1, 2, 3]


def test_a_job_avoids_the_node_that_reaches_fewer_others(dataset) -> None:
    nodes = [*dataset["nodes"], factories.node(dataset["pool"]), factories.node(dataset["pool"])]
    Node.objects.update(state="ready", breaker_state="healthy")
    job = submit(dataset)

    def apart(tried: Node, first: Node, whose: Job = job) -> list[str]:
        cause = quarantine.record_peer_unreachable(tried.pk, first.pk, job=whose, message="b cannot reach a")
        exclude_faulty_node(whose, tried, first, cause)
        return sorted(job.avoid_nodes.values_list("name", flat=True))

    a, b, c, d = nodes
    assert apart(b, a) == [b.name]  # nobody can say yet
    assert apart(c, a) == [a.name]  # it is a: the others were good
    other = submit(dataset)
    assert apart(d, a, other) == [a.name]
    a.refresh_from_db()
    assert (a.breaker_state, a.breaker_cause) == ("quarantined", "peer_unreachable")
    assert {node.breaker_state for node in Node.objects.exclude(pk=a.pk)} == {"healthy"}
