"""The snapshot: complete, read with a fixed number of queries, at one moment."""

from __future__ import annotations

import datetime as dt
import math

import pytest
from django.db import connection, transaction
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from agents.engines.replies import TaskExited, parse_event
from portal.domain.jobs.reasons import EndReason
from portal.errors import Conflict
from portal.models import Environment, Job, Node, Quota, Reservation, Topology, UsageInterval, Volume
from portal.services.lifecycle import job_control
from portal.services.lifecycle.allocations import allocate_gpus
from portal.services.lifecycle.job_control import RankPlacement
from portal.services.nodes.gpus import record_foreign_processes
from portal.services.scheduling.reservations import (
    ReservationInput,
    do_cancel_reservation,
    do_save_reservation,
)
from scheduler.core.model.policy import PolicyError
from scheduler.core.model.serialization import snapshot_from_json, snapshot_to_json
from scheduler.core.model.snapshot import ReservationRow, TopologyConstraint, TopologyRow
from scheduler.core.model.validation import check_snapshot
from scheduler.nodes.dispatch import end_reason
from scheduler.nodes.image_pulls import record_images
from scheduler.snapshot.decision_input import SnapshotCache, take_snapshot
from scheduler.snapshot.job_columns import rank_amounts
from tests import factories

pytestmark = pytest.mark.django_db(transaction=True)

QUERIES = 32
"""All reads of one snapshot, its two opening statements and the savepoint-free transaction around them."""


@pytest.fixture
def dataset():
    pool = factories.pool()
    owner = factories.user("ada")
    return {
        "pool": pool,
        "node": factories.node(pool),
        "owner": owner,
        "project": factories.project(member=owner),
        "environment": factories.environment(),
    }


def place(dataset, job: Job, gpus: int = 1, milli: int = 1000):
    with transaction.atomic():
        row = Job.objects.select_for_update().get(pk=job.pk)
        free = dataset["node"].gpus.filter(used_milli=0)[:gpus]
        return job_control.start_attempt(
            row, dataset["pool"], [RankPlacement(dataset["node"], [(gpu.pk, milli) for gpu in free])], epoch=1
        )


def submit(dataset, **fields) -> Job:
    return factories.job(dataset["owner"], dataset["project"], dataset["environment"], **fields)


def count_queries() -> int:
    settings = factories.cluster_settings()
    with CaptureQueriesContext(
        connection,
    ) as seen:
        take_snapshot(settings)
    return len([query for query in seen.captured_queries if query["sql"] not in ("BEGIN", "COMMIT")])


def test_the_number_of_queries_does_not_grow(dataset) -> None:
    place(dataset, submit(dataset))
    submit(dataset)
    few = count_queries()
    for _ in range(3):
        node = factories.node(dataset["pool"])
        factories.project(parent=dataset["project"])
        submit(dataset).avoid_nodes.add(node)
    place(dataset, submit(dataset))
    place(dataset, submit(dataset))
    assert count_queries() == few
    assert few <= QUERIES


def start_tasks(dataset, job: Job, tasks: int) -> None:
    """Start a job on one GPU for each of its first tasks, all on the node of the dataset."""
    free = list(dataset["node"].gpus.filter(used_milli=0)[:tasks])
    with transaction.atomic():
        row = Job.objects.select_for_update().get(pk=job.pk)
        placements = [RankPlacement(dataset["node"], [(gpu.pk, 1000)]) for gpu in free]
        job_control.start_attempt(row, dataset["pool"], placements, epoch=1)


@pytest.mark.parametrize(
    "request_fields",
    [{}, {"tasks": 2}, {"tasks": 2, "launcher": "torchrun"}, {"tasks": 3, "min_tasks": 1, "launcher": "torchrun"}],
    ids=["single", "gang", "rendezvous", "elastic"],
)  # fmt: skip
def test_a_job_avoids_the_same_nodes_while_it_waits_runs_and_grows(dataset, request_fields) -> None:
    """A job is moved only to nodes where it can start again, and grows only onto these."""
    dataset["pool"].allow_host_network = True
    dataset["pool"].save()
    failed = factories.node(dataset["pool"])
    factories.node(dataset["pool"], missing_requirements="It has no address in 10.0.0.0/24.")
    factories.node(factories.pool("no host network"))
    job = submit(dataset, **request_fields)
    job.avoid_nodes.add(failed)
    settings = factories.cluster_settings()
    (waiting,) = take_snapshot(settings).snapshot.pending
    start_tasks(dataset, job, 1 if job.min_tasks else job.tasks)
    snapshot = take_snapshot(settings).snapshot
    assert {row.job for row in snapshot.running} == {job.public_id}
    assert len(snapshot.pending) == (1 if job.min_tasks else 0)
    for row in (*snapshot.running, *snapshot.pending):
        assert set(row.avoid_nodes) == set(waiting.avoid_nodes)


def test_an_elastic_gang_does_not_grow_onto_a_node_that_network_isolation_excludes(dataset) -> None:
    dataset["pool"].allow_host_network = True
    dataset["pool"].save()
    theirs, other = factories.node(dataset["pool"]), factories.project("other", member=dataset["owner"])
    workspace = factories.job(dataset["owner"], other, dataset["environment"], kind="workspace")
    start_tasks({**dataset, "node": theirs}, workspace, 1)
    start_tasks(dataset, submit(dataset, tasks=2, min_tasks=1, launcher="torchrun"), 1)
    (more,) = take_snapshot(factories.cluster_settings()).snapshot.pending
    assert theirs.public_id in more.avoid_nodes


def test_a_snapshot_has_topology_and_constraints(dataset) -> None:
    Topology.objects.create(name="fabric", levels=["block", "rack"])
    Node.objects.filter(pk=dataset["node"].pk).update(labels={"rack": "r7", "block": "a"})
    dataset["node"].gpus.filter(index__gte=2).update(nvlink_island=1)
    near = {"topology": "fabric", "required": "rack", "preferred": None}
    place(dataset, submit(dataset, topology_constraint=near))
    submit(dataset, topology_constraint={"topology": "fabric", "required": None, "preferred": "block"})
    snapshot = take_snapshot(factories.cluster_settings()).snapshot
    assert snapshot.topologies == (TopologyRow("fabric", ("block", "rack")),)
    assert snapshot.nodes[0].labels == (("block", "a"), ("rack", "r7"))
    assert [gpu.nvlink_island for gpu in snapshot.nodes[0].gpus] == [None, None, 1, 1]
    assert snapshot.running[0].topology_constraint == TopologyConstraint("fabric", "rack")
    assert snapshot.pending[0].topology_constraint == TopologyConstraint("fabric", None, "block")
    assert snapshot_from_json(snapshot_to_json(snapshot)) == snapshot


def test_a_snapshot_has_reservations_that_are_not_over(dataset) -> None:
    admin, now, hour = factories.user(admin=True), timezone.now(), dt.timedelta(hours=1)
    gone = factories.node(dataset["pool"])

    def reserve(name, nodes, projects, begin, end) -> Reservation:
        asked = ReservationInput(name, dataset["pool"], nodes, projects, now + begin * hour, now + end * hour)
        return do_save_reservation(admin, asked)

    course = reserve("course", [dataset["node"], gone], [dataset["project"]], 1, 2)
    Node.objects.filter(pk=gone.pk).update(state="retired")
    maintenance = reserve("maintenance", [dataset["node"]], [], 3, 4)
    do_cancel_reservation(admin, reserve("cancelled", [dataset["node"]], [], 5, 6))
    over = reserve("over", [dataset["node"]], [], 7, 8)
    Reservation.objects.filter(pk=over.pk).update(period=(now - 2 * hour, now - hour))
    snapshot = take_snapshot(factories.cluster_settings()).snapshot
    node, project = dataset["node"].public_id, dataset["project"].public_id
    assert snapshot.reservations == (
        ReservationRow(
            course.public_id, "course", (node,), (project,), course.starts_at.timestamp(), course.ends_at.timestamp()
        ),
        ReservationRow(
            maintenance.public_id, "maintenance", (node,), (),
            maintenance.starts_at.timestamp(), maintenance.ends_at.timestamp(),
        ),
    )  # fmt: skip
    submit(dataset)
    check_snapshot(take_snapshot(factories.cluster_settings()).snapshot)


def test_a_snapshot_has_allocations_and_their_owners(dataset) -> None:
    shared = submit(dataset, milli_per_gpu=300, cpu_milli=2000, memory_mib=512)
    place(dataset, shared, milli=300)
    whole = submit(dataset, gpus_per_task=2, time_limit_s=60, priority=-3)
    attempt = place(dataset, whole, gpus=2)
    assert job_control.mark_task_sent(attempt.task_rows.get())
    job_control.request_stop(attempt.pk, EndReason.PREEMPTED)
    waiting = submit(dataset, gpu_model="Test 80", kind="workspace")
    Volume.objects.create(name="home", kind="home", owner=dataset["owner"], node=dataset["node"])
    Quota.objects.create(
        project=dataset["project"],
        pool=dataset["pool"],
        guaranteed_milli=1000,
        limit_milli=5000,
        user_limit_milli=3000,
    )

    inputs = take_snapshot(factories.cluster_settings())

    (node,) = inputs.snapshot.nodes
    assert [(gpu.used_milli, gpu.exclusive) for gpu in node.gpus] == [
        (300, False),
        (1000, True),
        (1000, True),
        (0, False),
    ]
    assert node.cpu_used_milli == 3000
    running = {row.job: row for row in inputs.snapshot.running}
    assert running[whole.public_id].stopping and not running[shared.public_id].stopping
    assert running[whole.public_id].tasks[0].node == node.id
    assert [share.milli for share in running[whole.public_id].tasks[0].gpus] == [1000, 1000]
    (pending,) = inputs.snapshot.pending
    assert (pending.job, pending.version) == (waiting.public_id, waiting.version)
    assert pending.node_affinity == node.id
    assert pending.pools == (dataset["pool"].public_id,)
    (quota,) = inputs.snapshot.quotas
    assert (quota.guaranteed_milli, quota.limit_milli, quota.user_limit_milli) == (1000, 5000, 3000)


def test_dependent_jobs_have_their_unfinished_dependencies(dataset) -> None:
    prep, other, done = (submit(dataset, name=name) for name in ("prep", "other", "done"))
    strict = submit(dataset, name="strict", dependencies=[prep, other, done])
    loose = submit(dataset, name="loose", dependencies=[prep, other], ignore_dependency_failure=True)
    free = submit(dataset, name="free", dependencies=[done])
    job_control.cancel_job(other.pk, EndReason.CANCELLED_BY_USER, actor="x")
    Job.objects.filter(pk=done.pk).update(state="RUNNING")  # as its start would
    Job.objects.filter(pk=done.pk).update(state="COMPLETED", ended_at=timezone.now())

    rows = {row.name: row for row in take_snapshot(factories.cluster_settings()).snapshot.pending}

    # what ended otherwise than it must still holds it back: it is cancelled soon, and never starts
    assert [each.name for each in rows["strict"].dependencies] == ["prep", "other"]
    assert [(each.job, each.name) for each in rows["loose"].dependencies] == [(prep.public_id, "prep")]
    assert rows["loose"].ignore_dependency_failure and not rows["strict"].ignore_dependency_failure
    assert rows["free"].dependencies == ()
    done.refresh_from_db()
    assert rows["free"].submitted_s == done.ended_at.timestamp() > free.submitted_at.timestamp()
    assert rows["prep"].submitted_s == prep.submitted_at.timestamp()
    assert {strict.public_id, loose.public_id} <= {row.job for row in rows.values()}


def test_nodes_of_another_runtime_are_avoided(dataset) -> None:
    process = factories.node(dataset["pool"], runtime="process")
    docker = factories.node(dataset["pool"], runtime="docker")
    submit(dataset)
    (pending,) = take_snapshot(factories.cluster_settings()).snapshot.pending
    assert pending.avoid_nodes == pending.ineligible_nodes == (process.public_id,)
    assert docker.public_id not in pending.avoid_nodes


def test_jobs_with_gpus_avoid_nodes_whose_driver_is_too_old(dataset) -> None:
    Environment.objects.filter(pk=dataset["environment"].pk).update(min_driver="525.60.13")
    drivers = {"470.82.01": True, "525.60.13": False, "535.104.5": False, "simulated": False, None: True}
    nodes = {driver: factories.node(dataset["pool"], agent_info={"driver": driver}) for driver in drivers}
    dataset["node"].delete()
    submit(dataset, name="with", gpus_per_task=1)
    submit(dataset, name="without", gpus_per_task=0)
    rows = {row.name: row for row in take_snapshot(factories.cluster_settings()).snapshot.pending}
    assert set(rows["with"].ineligible_nodes) == {
        nodes[driver].public_id for driver, old in drivers.items() if old
    }
    assert rows["without"].ineligible_nodes == ()


def test_jobs_with_gpus_avoid_drivers_older_than_their_cuda(dataset) -> None:
    known = {"12.2": True, "12.10": False, "13.0": False, None: False}
    nodes = {cuda: factories.node(dataset["pool"], agent_info={"max_cuda_version": cuda}) for cuda in known}
    dataset["node"].delete()
    submit(dataset, name="with", gpus_per_task=1)
    submit(dataset, name="without", gpus_per_task=0)

    def rows() -> dict[str, tuple[str, tuple[str, ...]]]:
        pending = take_snapshot(factories.cluster_settings()).snapshot.pending
        return {row.name: (row.required_cuda, row.ineligible_nodes) for row in pending}

    assert rows() == {"with": ("", ()), "without": ("", ())}
    for cuda in ("13.0", "12.10"):
        record_images(nodes[cuda], [image_row(dataset["environment"], "12.4")])
    old = ("12.4", (nodes["12.2"].public_id,))
    assert rows() == {"with": old, "without": ("", ())}
    record_images(nodes["12.2"], [image_row(dataset["environment"], "12.4") | {"refs": ["another:1"]}])
    assert rows()["with"] == old
    for chosen, needed in (("none", ""), ("12.1", "12.1"), ("13.1", "13.1")):
        Environment.objects.update(min_cuda=chosen)
        assert rows()["with"][0] == needed
        assert len(rows()["with"][1]) == {"": 0, "12.1": 0, "13.1": 3}[needed]


def test_a_missing_image_excludes_only_the_node_that_reports_it(dataset) -> None:
    lying, others = (
        factories.node(dataset["pool"], agent_info={"max_cuda_version": "13.0"}),
        [factories.node(dataset["pool"], agent_info={"max_cuda_version": "13.0"}) for _ in range(2)],
    )
    submit(dataset, name="with", gpus_per_task=1)

    def row() -> tuple[str, tuple[str, ...]]:
        (pending,) = take_snapshot(factories.cluster_settings()).snapshot.pending
        return pending.required_cuda, pending.ineligible_nodes

    for word in ("99.9", "x" * 8, "9" * 64):
        record_images(lying, [image_row(dataset["environment"], word)])
        assert row() == ("", (lying.public_id,) if word == "99.9" else ())
    record_images(lying, [image_row(dataset["environment"], "99.9")])
    for node in others:
        record_images(node, [image_row(dataset["environment"], "12.4")])
    assert row() == ("12.4", (lying.public_id,))


def image_row(environment: Environment, cuda: str | None) -> dict[str, object]:
    """An image as a node tells it."""
    names = {"image_id": "sha256:" + "e" * 64, "refs": [environment.image], "digests": []}
    return names | {"runtime": "podman", "size_mib": 9000, "cuda": cuda}


def test_shares_avoid_nodes_that_cannot_enforce_them_if_required(dataset) -> None:
    reported = {"enforced": False, "message": "Shares of its GPUs are not enforced: they are pretend ones."}
    cannot = factories.node(dataset["pool"], agent_info={"gpu_sharing": reported})
    factories.node(dataset["pool"], agent_info={"gpu_sharing": {**reported, "enforced": True}})
    submit(dataset, name="whole")
    submit(dataset, name="share", milli_per_gpu=500)

    def ineligible() -> dict[str, set[str]]:
        return {
            row.name: set(row.ineligible_nodes)
            for row in take_snapshot(factories.cluster_settings()).snapshot.pending
        }

    assert ineligible() == {"whole": set(), "share": set()}
    type(dataset["pool"]).objects.update(policy={"gpu_sharing_requires_mps": "yes"})
    assert ineligible() == {"whole": set(), "share": {cannot.public_id, dataset["node"].public_id}}


def test_a_task_that_lost_the_daemon_of_its_share_ends_with_that_reason() -> None:
    reported = {
        "event": "exited",
        "container": "fw-c-j1-1-0",
        "job": "j1",
        "attempt": 1,
        "task": 0,
        "exit_code": 137,
    }
    lost, killed = parse_event({**reported, "fault": "mps_daemon_lost"}), parse_event(reported)
    assert isinstance(lost, TaskExited) and isinstance(killed, TaskExited)
    assert end_reason(lost.container) is EndReason.MPS_DAEMON_LOST
    assert end_reason(killed.container) is EndReason.EXIT_CODE


def test_a_gpu_with_a_foreign_process_takes_no_new_job(dataset) -> None:
    row_cache = SnapshotCache()
    assert all(
        gpu.healthy
        for row in take_snapshot(factories.cluster_settings(), row_cache).snapshot.nodes
        for gpu in row.gpus
    )
    gpu = dataset["node"].gpus.first()
    record_foreign_processes(dataset["node"].public_id, {gpu.uuid: "python (process 7) of root"})
    (row,) = take_snapshot(factories.cluster_settings(), row_cache).snapshot.nodes
    assert [each.uuid for each in row.gpus if not each.healthy] == [gpu.uuid]
    with transaction.atomic(), pytest.raises(Conflict, match="process 7"):
        allocate_gpus([(gpu.pk, 1000, 0)])
    record_foreign_processes(dataset["node"].public_id, {gpu.uuid: ""})
    (row,) = take_snapshot(factories.cluster_settings(), row_cache).snapshot.nodes
    assert all(each.healthy for each in row.gpus)


def test_past_use_fades_by_half_each_half_life(dataset) -> None:
    usage_half_life_s = 7 * 86_400.0
    attempt = place(dataset, submit(dataset))
    now = timezone.now()
    UsageInterval.objects.filter(job=attempt.job).update(
        started_at=now - dt.timedelta(seconds=2 * usage_half_life_s),
        ended_at=now - dt.timedelta(seconds=usage_half_life_s),
    )
    (row,) = take_snapshot(factories.cluster_settings()).snapshot.usage
    expected = usage_half_life_s / math.log(2) * (0.5 - 0.25)
    assert row.gpu_seconds == pytest.approx(expected, rel=1e-4)
    assert (row.project, row.user) == (dataset["project"].public_id, dataset["owner"].public_id)


def test_a_job_whose_start_failed_pauses_before_the_next(dataset) -> None:
    job = submit(dataset)
    attempt = place(dataset, job)
    job_control.request_stop(attempt.pk, EndReason.DISK_FULL)
    (pending,) = take_snapshot(factories.cluster_settings()).snapshot.pending
    assert pending.not_before_s is not None
    assert 5 < pending.not_before_s - timezone.now().timestamp() <= 10


def test_a_setting_out_of_range_is_refused(dataset) -> None:
    settings = factories.cluster_settings()
    settings.policy = {"usage_half_life_s": 1}
    with pytest.raises(PolicyError):
        take_snapshot(settings)


def test_a_pool_has_its_own_settings_and_memory(dataset) -> None:
    day_s = 86_400.0
    attempt = place(dataset, submit(dataset))
    now = timezone.now()
    UsageInterval.objects.filter(job=attempt.job).update(started_at=now - dt.timedelta(seconds=day_s))
    before = take_snapshot(factories.cluster_settings()).snapshot
    assert before.pools[0].settings == () and before.pools[0].placement is None
    (long_memory,) = before.usage
    dataset["pool"].policy = {"placement": "spread", "usage_half_life_s": day_s / 4}
    dataset["pool"].save()
    inputs = take_snapshot(factories.cluster_settings())
    assert inputs.snapshot.pools[0].placement == "spread"
    assert dict(inputs.snapshot.pools[0].settings) == dataset["pool"].policy
    (short_memory,) = inputs.snapshot.usage
    expected = day_s / 4 / math.log(2) * (1 - 0.5**4)
    assert short_memory.gpu_seconds == pytest.approx(expected, rel=0.01)
    assert long_memory.gpu_seconds > 2 * short_memory.gpu_seconds
    snapshot = snapshot_from_json(snapshot_to_json(inputs.snapshot))
    assert snapshot == inputs.snapshot


def test_a_rank_that_no_role_has_gets_the_largest_amounts() -> None:
    roles = [{"cpu_milli": 1000, "memory_mib": 5, "tasks": 2}]
    amounts = rank_amounts({"cpu_milli": 2000, "memory_mib": 9, "roles": roles})
    assert amounts(0) == amounts(1) == (1000, 5)
    assert {amounts(rank) for rank in (2, -1, -7)} == {(2000, 9)}
