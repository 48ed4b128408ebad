"""Jobs with roles in the database: what is stored, which ports and order their tasks get, and how they end."""

from __future__ import annotations

import pytest
from django.db import IntegrityError, transaction

from portal.domain.jobs.job_spec import JobRole
from portal.domain.jobs.reasons import EndReason
from portal.errors import InvalidRequest, Unsatisfiable
from portal.models import Allocation, Attempt, Job, Node, Quota, Task
from portal.models.jobs.jobs import total_gpus, total_milli
from portal.selectors.jobs.progress import job_workload_fingerprint
from portal.services.jobs.launching import attempt_gang
from portal.services.jobs.submission import do_resubmit_job
from portal.services.lifecycle import elastic, job_control
from portal.services.lifecycle.job_control import RankPlacement
from scheduler import leases
from scheduler.commit.plan_writer import commit_starts
from scheduler.core.decide import decide
from scheduler.forecast.duration_estimates import _read_work_keys
from scheduler.nodes.task_spec import JobVolumes, RankAssignment, build_task_spec
from scheduler.snapshot.decision_input import take_snapshot
from tests import factories
from tests.engine_harness import held_milli

pytestmark = pytest.mark.django_db(transaction=True)

CHIEF, WORKER, OTHER_WORKER, EVALUATOR = range(4)
ROLES = (
    JobRole(name="chief", cpu_milli=500, ports=("grpc",)),
    JobRole(name="worker", tasks=2, command=("work", "--now"), start_order=1),
    JobRole(name="evaluator", gpus_per_task=0, memory_mib=64, may_fail=True, start_order=1),
)


@pytest.fixture
def dataset():
    """Two nodes of four GPUs."""
    dataset = factories.basic_cluster()
    dataset["nodes"] = [dataset["node"], factories.node(dataset["pool"])]
    return dataset


def submit(dataset, *roles: JobRole, **fields) -> Job:
    request = {"roles": roles or ROLES, "command": ["train"], **fields}
    return factories.job(dataset["owner"], dataset["project"], dataset["environment"], **request)


def place(dataset, job: Job) -> Attempt:
    """Chief and evaluator on the first node, the workers on the second."""
    first, second = dataset["nodes"]
    gpus = {node: iter(node.gpus.order_by("index").values_list("pk", flat=True)) for node in dataset["nodes"]}
    where = [first, second, second, first]
    slots = [
        RankPlacement(node, [(next(gpus[node]), 1000)] if rank != EVALUATOR else [])
        for rank, node in enumerate(where)
    ]
    with transaction.atomic():
        row = Job.objects.select_for_update().get(pk=job.pk)
        return job_control.start_attempt(row, dataset["pool"], slots, epoch=1)


def tasks(attempt: Attempt) -> list[Task]:
    return list(attempt.task_rows.select_related("attempt__job", "node").order_by("rank"))


@pytest.fixture
def leader():
    return leases.acquire(leases.LEADER, "test", leases.LEADER_TTL_S)


@pytest.fixture
def attempt(dataset) -> Attempt:
    """A job whose chief ends it; all its tasks run."""
    found = place(dataset, submit(dataset, completion_role="chief"))
    run_all(found)
    return found


def run_all(attempt: Attempt) -> None:
    for task in tasks(attempt):
        job_control.mark_task_sent(task)
        job_control.record_task_prepared(task.pk)
    for task in tasks(attempt):
        job_control.mark_task_sent(task)
        job_control.record_task_running(task.pk, container=f"c{task.rank}", ports={})


def end(attempt: Attempt, rank: int, code: int) -> None:
    reason = EndReason.EXIT_CODE if code else EndReason.COMPLETED
    job_control.record_task_ended(tasks(attempt)[rank].pk, exit_code=code, reason=reason)


def states(attempt: Attempt) -> list[str]:
    return [task.state for task in tasks(attempt)]


# -- what is stored ----------------------------------------------------------------------------------


def test_sums_of_its_roles_are_the_same_in_python_and_in_queries(dataset) -> None:
    job = submit(dataset)
    equal = submit(dataset, JobRole(name="only", tasks=2), gpus_per_task=2)
    plain = factories.job(dataset["owner"], dataset["project"], dataset["environment"], tasks=2)
    assert [(row.tasks, row.total_gpus, row.total_milli) for row in (job, equal, plain)] == [
        (4, 3, 3000),
        (2, 4, 4000),
        (2, 2, 2000),
    ]
    rows = Job.objects.annotate(gpus=total_gpus(), milli=total_milli()).order_by("pk")
    assert list(rows.values_list("gpus", "milli")) == [(3, 3000), (4, 4000), (2, 2000)]
    keys = _read_work_keys([job.public_id, plain.public_id])
    assert keys == {row.public_id: job_workload_fingerprint(row) for row in (job, plain)}


def test_the_database_refuses_roles_without_their_sum(dataset) -> None:
    job = submit(dataset)
    for wrong in ({"role_gpus": None}, {"roles": []}, {"min_tasks": 2}):
        with pytest.raises(IntegrityError), transaction.atomic():
            Job.objects.filter(pk=job.pk).update(**wrong)


def test_a_resubmitted_job_has_the_same_roles(dataset) -> None:
    job = submit(dataset, completion_role="chief", min_succeeded=1)
    job_control.cancel_job(job.pk, EndReason.CANCELLED_BY_USER, actor="ada")
    job.refresh_from_db()
    again = do_resubmit_job(dataset["owner"], job)
    same = ("roles", "role_gpus", "tasks", "command", "completion_role", "min_succeeded")
    assert [getattr(again, name) for name in same] == [getattr(job, name) for name in same]


@pytest.mark.parametrize(
    ("roles", "fields", "named"),
    [
        ((JobRole(name="a"),), {"command": []}, "roles"),
        ((JobRole(name="a", command=("-x",)),), {}, "roles"),
        ((JobRole(name="a", gpus_per_task=2),), {"milli_per_gpu": 500}, "milli_per_gpu"),
        ((JobRole(name="a", tasks=1000), JobRole(name="b", tasks=1000)), {}, "tasks"),
    ],
)
def test_invalid_roles_are_refused_by_field(dataset, roles, fields, named) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        submit(dataset, *roles, **fields)
    assert set(refusal.value.fields) == {named}


@pytest.mark.parametrize(
    ("roles", "message"),
    [
        ((JobRole(name="a"), JobRole(name="b", gpus_per_task=5)), "Role b: Needs 5 GPUs on one node"),
        (
            (JobRole(name="a"), JobRole(name="b", tasks=3, gpus_per_task=4)),
            "Role b: Needs 12 GPUs as 3 tasks",
        ),
        ((JobRole(name="a"), JobRole(name="b", tasks=2, gpus_per_task=4)), "Its roles need 9 GPUs"),
    ],
)
def test_roles_that_never_fit_together_are_refused(dataset, roles, message) -> None:
    with pytest.raises(Unsatisfiable) as refusal:
        submit(dataset, *roles)
    assert refusal.value.message.startswith(message), refusal.value.message


def test_a_limit_counts_the_gpus_of_all_roles(dataset) -> None:
    quota = Quota.objects.create(project=dataset["project"], pool=dataset["pool"], limit_milli=3000)
    submit(dataset)
    quota.limit_milli = 2000
    quota.save()
    with pytest.raises(Unsatisfiable) as refusal:
        submit(dataset)
    assert "Needs 3 GPUs; the limit of" in refusal.value.message


# -- placement ---------------------------------------------------------------------------------------


def test_a_decided_gang_is_committed_with_the_size_of_each_role(dataset, leader) -> None:
    job = submit(
        dataset, JobRole(name="ps", gpus_per_task=0, cpu_milli=2000), JobRole(name="worker", gpus_per_task=4)
    )
    inputs = take_snapshot(factories.cluster_settings())
    (row,) = inputs.snapshot.pending
    assert [(ask.gpus, ask.milli, ask.cpu_milli) for ask in row.task_requests] == [
        (0, 1000, 2000),
        (4, 1000, 1000),
    ]
    plan = decide(inputs.snapshot, inputs.policy)
    assert commit_starts(leader, plan.starts) == []
    attempt = job.attempts.get()
    assert [task.allocations.count() for task in tasks(attempt)] == [0, 4]
    assert held_milli() == job.total_milli == 4000
    after = take_snapshot(factories.cluster_settings()).snapshot
    (running,) = after.running
    assert [(task.cpu_milli, len(task.gpus)) for task in running.tasks] == [(2000, 0), (1000, 4)]
    assert sum(node.cpu_used_milli for node in after.nodes) == 3000


def test_a_task_gets_the_command_size_and_variables_of_its_role(dataset) -> None:
    job = submit(dataset)
    attempt = place(dataset, job)
    specs = [
        build_task_spec(
            "c",
            job,
            RankAssignment(1, task.rank, (), attempt_gang(attempt, None)),
            task.node,
            JobVolumes(),
            "",
        )
        for task in tasks(attempt)
    ]
    assert [spec["command"] for spec in specs] == [["train"], ["work", "--now"], ["work", "--now"], ["train"]]
    assert [spec["cpu_milli"] for spec in specs] == [500, 1000, 1000, 1000]
    assert [spec["memory_mib"] for spec in specs] == [2048, 2048, 2048, 64]
    roles = [tuple(spec["env"][f"ROLE_{name}"] for name in ("NAME", "RANK", "WORLD_SIZE")) for spec in specs]
    assert roles == [("chief", "0", "1"), ("worker", "0", "2"), ("worker", "1", "2"), ("evaluator", "0", "1")]
    assert [spec["env"]["RANK"] for spec in specs] == ["0", "1", "2", "3"]
    (port,) = tasks(attempt)[CHIEF].role_ports.values()
    assert [spec["env"].get("PORT_GRPC") for spec in specs] == [str(port), None, None, None]


def test_ports_of_live_attempts_are_different_on_a_node(dataset) -> None:
    Node.objects.update(
        agent_info={"capabilities": ["rendezvous_port"], "rendezvous_ports": [32_000, 32_004]}
    )
    dataset["nodes"] = list(Node.objects.order_by("pk"))
    roles = [JobRole(name=name, gpus_per_task=0, ports=("a", "b")) for name in ("one", "two")]
    first = submit(dataset, *roles)
    slots = [RankPlacement(dataset["nodes"][0], [])] * 2
    found = job_control.start_attempt(first, dataset["pool"], slots, epoch=1)
    ports = [port for task in tasks(found) for port in task.role_ports.values()]
    assert len({*ports, found.rendezvous.port}) == 5
    assert {*ports, found.rendezvous.port} == set(range(32_000, 32_005))
    job_control.cancel_job(first.pk, EndReason.CANCELLED_BY_USER, actor="ada")
    assert Attempt.objects.get(pk=found.pk).ended_at is not None
    second = job_control.start_attempt(submit(dataset, *roles), dataset["pool"], slots, epoch=1)
    assert len({port for task in tasks(second) for port in task.role_ports.values()}) == 4


# -- start order -------------------------------------------------------------------------------------


def test_later_roles_start_when_earlier_ones_run_and_listen(dataset) -> None:
    Node.objects.update(agent_info={"capabilities": ["listening"]})
    attempt = place(dataset, submit(dataset))
    for task in tasks(attempt):
        job_control.mark_task_sent(task)
        job_control.record_task_prepared(task.pk)

    def may_start() -> list[bool]:
        return [job_control.should_start(task, task.attempt) for task in tasks(attempt)]

    assert may_start() == [True, False, False, False]
    chief = tasks(attempt)[CHIEF]
    job_control.record_task_running(chief.pk, container="c", ports={})
    assert may_start() == [False] * 4
    job_control.record_task_listening(chief.pk)
    assert may_start() == [False, True, True, True]


def test_running_is_enough_if_the_agent_cannot_report_listening_ports(dataset) -> None:
    attempt = place(dataset, submit(dataset))
    for task in tasks(attempt):
        job_control.mark_task_sent(task)
        job_control.record_task_prepared(task.pk)
    job_control.record_task_running(tasks(attempt)[CHIEF].pk, container="c", ports={})
    assert [job_control.should_start(task, task.attempt) for task in tasks(attempt)] == [
        False,
        True,
        True,
        True,
    ]


def test_an_earlier_role_that_has_ended_lets_the_others_start(dataset) -> None:
    attempt = place(dataset, submit(dataset))
    for task in tasks(attempt):
        job_control.mark_task_sent(task)
        job_control.record_task_prepared(task.pk)
    end(attempt, CHIEF, 0)
    assert [job_control.should_start(task, task.attempt) for task in tasks(attempt)] == [
        False,
        True,
        True,
        True,
    ]
    for task in tasks(attempt)[1:]:
        job_control.record_task_running(task.pk, container="c", ports={})
    attempt.refresh_from_db()
    assert attempt.state == "RUNNING"


# -- the end -----------------------------------------------------------------------------------------


def test_the_end_of_the_chief_stops_the_others_and_completes_the_job(attempt) -> None:
    end(attempt, CHIEF, 0)
    attempt.refresh_from_db()
    assert (attempt.state, attempt.stop_reason) == ("COMPLETING", "completed")
    end(attempt, WORKER, 143)
    end(attempt, OTHER_WORKER, 0)
    end(attempt, EVALUATOR, 143)
    attempt.refresh_from_db()
    assert (attempt.state, attempt.job.state, attempt.job.exit_code) == ("COMPLETED", "COMPLETED", 0)
    assert attempt.job.message == "The role chief has completed."
    assert states(attempt) == ["COMPLETED", "CANCELLED", "COMPLETED", "CANCELLED"]
    assert held_milli() == 0


def test_a_failed_worker_ends_the_job_with_the_name_of_the_task(attempt) -> None:
    end(attempt, OTHER_WORKER, 3)
    for rank in (CHIEF, WORKER, EVALUATOR):
        end(attempt, rank, 143)
    attempt.refresh_from_db()
    assert (attempt.job.state, attempt.job.exit_code) == ("FAILED", 3)
    assert attempt.job.message == "worker 1: The command ended with exit code 3."


def test_an_optional_role_releases_its_gpus_on_failure_and_the_rest_continues(attempt) -> None:
    end(attempt, EVALUATOR, 1)
    attempt.refresh_from_db()
    assert (attempt.state, attempt.stop_requested_at) == ("RUNNING", None)
    event = attempt.events.get(kind="task_lost")
    assert event.message == "evaluator 0: The command ended with exit code 1. 3 of 4 tasks keep running."
    (running,) = take_snapshot(factories.cluster_settings()).snapshot.running
    assert len(running.tasks) == 3
    end(attempt, CHIEF, 0)
    for rank in (WORKER, OTHER_WORKER):
        end(attempt, rank, 143)
    attempt.refresh_from_db()
    assert attempt.job.state == "COMPLETED"


def test_a_lost_node_ends_only_its_optional_role(attempt) -> None:
    elastic.end_tasks([tasks(attempt)[EVALUATOR].pk], EndReason.GPU_LOST, message="A GPU failed.")
    attempt.refresh_from_db()
    assert attempt.stop_requested_at is None
    assert tasks(attempt)[EVALUATOR].eviction_requested_at is not None
    elastic.end_tasks([tasks(attempt)[WORKER].pk], EndReason.GPU_LOST, message="A GPU failed.")
    attempt.refresh_from_db()
    assert attempt.stop_reason == "gpu_lost"


def test_a_role_that_may_fail_cannot_be_missing_at_the_start(dataset) -> None:
    attempt = place(dataset, submit(dataset))
    elastic.end_tasks([tasks(attempt)[EVALUATOR].pk], EndReason.START_REFUSED, message="Refused.")
    attempt.refresh_from_db()
    assert attempt.stop_reason == "start_refused"


def test_a_job_without_a_completion_role_waits_for_all_its_tasks(dataset) -> None:
    attempt = place(dataset, submit(dataset))
    run_all(attempt)
    for rank in (CHIEF, WORKER, OTHER_WORKER):
        end(attempt, rank, 0)
    attempt.refresh_from_db()
    assert (attempt.state, attempt.stop_requested_at) == ("RUNNING", None)
    end(attempt, EVALUATOR, 1)
    attempt.refresh_from_db()
    assert attempt.job.state == "COMPLETED"


def test_enough_succeeded_tasks_complete_a_job_of_equal_tasks(dataset) -> None:
    job = factories.job(
        dataset["owner"],
        dataset["project"],
        dataset["environment"],
        tasks=4,
        gpus_per_task=0,
        min_succeeded=2,
    )
    slots = [RankPlacement(node, []) for node in (*dataset["nodes"], *dataset["nodes"])]
    attempt = job_control.start_attempt(job, dataset["pool"], slots, epoch=1)
    run_all(attempt)
    end(attempt, 0, 1)
    end(attempt, 1, 0)
    attempt.refresh_from_db()
    assert attempt.stop_requested_at is None
    end(attempt, 2, 0)
    end(attempt, 3, 143)
    attempt.refresh_from_db()
    assert (attempt.job.state, attempt.job.message) == ("COMPLETED", "Enough of its tasks have succeeded.")
    assert not Allocation.objects.filter(ended_at__isnull=True).exists()


def test_a_job_fails_once_too_few_tasks_can_succeed(dataset) -> None:
    job = factories.job(
        dataset["owner"],
        dataset["project"],
        dataset["environment"],
        tasks=2,
        gpus_per_task=0,
        min_succeeded=2,
    )
    slots = [RankPlacement(node, []) for node in dataset["nodes"]]
    attempt = job_control.start_attempt(job, dataset["pool"], slots, epoch=1)
    run_all(attempt)
    end(attempt, 0, 7)
    end(attempt, 1, 143)
    attempt.refresh_from_db()
    assert (attempt.job.state, attempt.job.exit_code) == ("FAILED", 7)
