"""Roles: their ranks, order and completion, and gangs of tasks that differ."""

from __future__ import annotations

import pytest

from portal.domain.jobs.job_spec import JobRole, JobSpec, roles_as_json
from portal.domain.jobs.reasons import VerdictCode
from portal.domain.jobs.roles import (
    CompletionPolicy,
    earlier_ranks,
    port_variable,
    ranks_of_role,
    role_at,
    role_errors,
    role_of_rank,
    task_label,
)
from scheduler.core.decide import decide
from scheduler.core.model.policy import Policy
from scheduler.core.model.snapshot import GpuConstraints, PendingRow, TaskRequest
from scheduler.snapshot.job_columns import rank_amounts, role_requests
from tests.core.cluster_builder import cluster, node, project, quota, started, waits
from tests.core.plan_rules import check_plan

CHIEF, WORKER, EVALUATOR = 0, (1, 2), 3
ROLES = (
    JobRole(name="chief"),
    JobRole(name="worker", tasks=2, gpus_per_task=2, start_order=1),
    JobRole(name="evaluator", gpus_per_task=0, cpu_milli=500, may_fail=True, start_order=2),
)


def spec(*roles: JobRole, **fields) -> JobSpec:
    return JobSpec(**{"name": "j", "command": ("train",), "roles": roles or ROLES, **fields})


def test_a_role_inherits_from_the_job_and_the_job_has_the_size_of_its_roles() -> None:
    found = spec(cpu_milli=4000, memory_mib=1024)
    assert (found.tasks, found.gpus_per_task, found.total_gpus, found.total_milli) == (4, 2, 5, 5000)
    assert [role.gpus_per_task for role in found.roles] == [1, 2, 0]
    assert [role.cpu_milli for role in found.roles] == [4000, 4000, 500]
    assert {role.command for role in found.roles} == {("train",)}


def test_stored_roles_give_the_same_request_again() -> None:
    found = spec(cpu_milli=4000)
    columns = {name: getattr(found, name) for name in ("command", "gpus_per_task", "cpu_milli", "memory_mib")}
    assert JobSpec(name="j", roles=roles_as_json(found.roles), **columns) == found


def test_ranks_are_numbered_role_by_role() -> None:
    assert [task_label(ROLES, rank) for rank in range(4)] == [
        "chief 0",
        "worker 0",
        "worker 1",
        "evaluator 0",
    ]
    assert role_of_rank(ROLES, 2) == ("worker", 1)
    assert list(ranks_of_role(ROLES, "worker")) == [1, 2]
    assert (role_of_rank((), 3), role_at((), 3), task_label((), 3)) == (("worker", 3), None, "rank 3")
    assert port_variable("grpc-data") == "PORT_GRPC_DATA"


def test_a_task_starts_after_all_tasks_of_lower_orders() -> None:
    assert [set(earlier_ranks(ROLES, rank)) for rank in range(4)] == [set(), {0}, {0}, {0, 1, 2}]
    assert earlier_ranks((), 1) == frozenset()


@pytest.mark.parametrize(
    ("policy", "succeeded", "outcome"),
    [
        ({}, {}, None),
        ({}, {CHIEF: True}, None),
        ({}, {CHIEF: True, 1: True, 2: True}, None),  # the evaluator still runs
        ({}, {CHIEF: True, 1: True, 2: True, 3: True}, True),
        ({}, {CHIEF: True, 1: True, 2: True, 3: False}, True),
        ({}, {3: False}, None),
        ({}, {1: False}, False),
        ({"role": "chief"}, {CHIEF: True}, True),
        ({"role": "chief"}, {1: True, 2: True, 3: True}, None),
        ({"role": "chief"}, {CHIEF: False}, False),
        ({"role": "chief"}, {1: False}, False),
        ({"role": "chief"}, {3: False}, None),
        ({"role": "worker"}, {1: True}, None),
        ({"role": "worker"}, {1: True, 2: True}, True),
        ({"role": "worker", "min_succeeded": 1}, {1: False}, None),
        ({"role": "worker", "min_succeeded": 1}, {1: False, 2: True}, True),
        ({"role": "worker", "min_succeeded": 1}, {1: False, 2: False}, False),
        ({"role": "worker", "min_succeeded": 1}, {CHIEF: False}, False),
        ({"min_succeeded": 2}, {CHIEF: True, 3: True}, True),
        ({"min_succeeded": 2}, {CHIEF: False, 1: False}, None),
        ({"min_succeeded": 2}, {CHIEF: False, 1: False, 2: False}, False),
    ],
)
def test_which_ends_complete_a_job(policy, succeeded, outcome) -> None:
    tasks = dict.fromkeys(range(4)) | succeeded
    assert CompletionPolicy(ROLES, **policy).outcome(tasks) is outcome


@pytest.mark.parametrize(
    ("succeeded", "outcome"), [({0: True}, None), ({0: False}, False), ({0: True, 1: True}, True)]
)
def test_equal_tasks_complete_together(succeeded, outcome) -> None:
    assert CompletionPolicy(()).outcome({0: None, 1: None} | succeeded) is outcome


@pytest.mark.parametrize(
    ("request_", "field", "part"),
    [
        (spec(JobRole(name="Chief")), "roles", "lower-case"),
        (spec(JobRole()), "roles", "Role 1 has no name"),
        (spec(JobRole(name="a"), JobRole(name="a")), "roles", "given twice"),
        (spec(JobRole(name="a", tasks=0)), "roles", "a, tasks: Must be between 1 and"),
        (spec(JobRole(name="a", ports=("Grpc",))), "roles", "a, ports: 'Grpc'"),
        (spec(JobRole(name="a", ports=("x", "x"))), "roles", "given twice"),
        (spec(JobRole(name="a", start_order=1), JobRole(name="b")), "roles", "lowest start order"),
        (spec(JobRole(name="a", may_fail=True)), "roles", "At least one role"),
        (spec(*(JobRole(name=f"r{i}") for i in range(17))), "roles", "at most 16"),
        (spec(completion_role="boss"), "completion_role", "chief, worker, evaluator"),
        (spec(completion_role="evaluator"), "completion_role", "may fail"),
        (spec(completion_role="worker", min_succeeded=3), "min_succeeded", "at most 2"),
        (spec(min_succeeded=5), "min_succeeded", "at most 4"),
        (spec(min_tasks=4), "min_tasks", "start together"),
        (spec(min_tasks=2), "roles", "a role could lose its tasks"),
        (JobSpec(name="j", completion_role="chief"), "completion_role", "no roles"),
        (JobSpec(name="j", tasks=4, min_tasks=2, min_succeeded=1), "min_succeeded", "elastic"),
    ],
)
def test_invalid_roles_are_refused(request_, field, part) -> None:
    assert part in role_errors(request_, workspace=False)[field]


def test_valid_roles_are_accepted() -> None:
    assert role_errors(spec(completion_role="chief"), workspace=False) == {}
    assert role_errors(spec(JobRole(name="a", may_fail=True), min_succeeded=1), workspace=False) == {}
    assert role_errors(JobSpec(name="j", tasks=3, min_succeeded=2), workspace=False) == {}
    assert set(role_errors(spec(), workspace=True)) == {"roles"}


# -- decisions ---------------------------------------------------------------------------------------


def gang(name: str, *sizes: tuple[int, int], **fields) -> PendingRow:
    """A pending job with tasks of (GPUs, CPU milli) each."""
    asks = tuple(TaskRequest(gpus, 1000, cpu_milli, 1024) for gpus, cpu_milli in sizes)
    largest = {"cpu_milli": max(cpu for _, cpu in sizes), "memory_mib": 1024}
    gpus = max(gpus for gpus, _ in sizes)
    return waits(name, "p", gpus, tasks=len(asks), task_requests=asks, **{**largest, **fields})


def test_requests_of_roles_follow_their_ranks() -> None:
    largest = TaskRequest(2, 500, 4000, 1024, constraints=GpuConstraints("A100"))
    roles = [
        {"tasks": 1, "gpus_per_task": 0, "cpu_milli": 4000, "memory_mib": 512},
        {"tasks": 2, "gpus_per_task": 2, "cpu_milli": 1000, "memory_mib": 1024},
    ]
    first, second, third = role_requests(roles, largest)
    assert first == TaskRequest(0, 1000, 4000, 512, constraints=GpuConstraints("A100"))
    assert second == third == TaskRequest(2, 500, 1000, 1024, constraints=GpuConstraints("A100"))
    equal = [{"tasks": 2, "gpus_per_task": 2, "cpu_milli": 4000, "memory_mib": 1024}]
    assert role_requests(equal, largest) == ()
    amounts = rank_amounts({"cpu_milli": 1, "memory_mib": 2, "roles": roles})
    assert [amounts(rank) for rank in range(4)] == [(4000, 512), (1000, 1024), (1000, 1024), (1, 2)]
    assert rank_amounts({"cpu_milli": 1, "memory_mib": 2, "roles": [{}]})(0) == (1, 2)


def test_a_gang_counts_the_gpus_of_its_tasks() -> None:
    job = gang("j", (1, 1000), (4, 1000), (4, 1000))
    assert (job.total_milli, job.required_milli) == (9000, 9000)


def test_roles_start_together_on_nodes_of_their_size() -> None:
    job = gang("j", (0, 2000), (1, 1000), (4, 1000))
    snapshot = cluster([node("small", 1), node("large", 4)], [project("p")], pending=[job])
    plan = decide(snapshot, Policy())
    check_plan(snapshot, plan)
    assert started(plan) == {"j"}
    (placed,) = plan.starts
    assert [len(task.gpus) for task in sorted(placed.tasks, key=lambda task: task.rank)] == [0, 1, 4]
    assert {task.rank: task.node for task in placed.tasks if task.gpus} == {1: "small", 2: "large"}


def test_no_role_starts_while_one_does_not_fit() -> None:
    job = gang("j", (1, 1000), (4, 1000))
    other = waits("other", "p", 4, submitted_s=-1.0)
    snapshot = cluster([node("small", 1), node("large", 4)], [project("p")], pending=[other, job])
    plan = decide(snapshot, Policy())
    check_plan(snapshot, plan)
    assert started(plan) == {"other"}
    (verdict,) = (each for each in plan.verdicts if each.job == "j")
    assert verdict.code is VerdictCode.INSUFFICIENT_RESOURCES
    assert verdict.message.startswith("Needs 1 GPU + 4 GPUs; its task of 4 GPUs, 1 CPU and 1 GiB does")
    assert verdict.details["needed_gpus"] == 5


@pytest.mark.parametrize(
    ("sizes", "fits"),
    [
        (((1, 1000), (4, 1000)), True),
        (((2, 1000), (4, 1000)), False),  # the small node has one GPU: the sum does not fit
        (((4, 1000), (4, 1000)), False),
        (((1, 1000), (1, 1000), (2, 1000), (2, 1000)), False),
        (((0, 64_000), (0, 64_000), (0, 64_000)), False),
        (((1, 1000), (4, 1000), (0, 60_000)), True),
    ],
)
def test_a_gang_that_never_fits_is_reported(sizes, fits) -> None:
    snapshot = cluster([node("small", 1), node("large", 4)], [project("p")], pending=[gang("j", *sizes)])
    plan = decide(snapshot, Policy())
    codes = {verdict.code for verdict in plan.verdicts}
    assert (VerdictCode.UNSATISFIABLE not in codes) is fits, plan.verdicts
    assert started(plan) == ({"j"} if fits else set())


def test_a_limit_counts_all_roles() -> None:
    jobs = [gang("j", (1, 1000), (4, 1000))]
    nodes = [node("a", 4), node("b", 4)]
    within = cluster(nodes, [project("p")], [quota("p", limit=5)], pending=jobs)
    below = cluster(nodes, [project("p")], [quota("p", limit=4)], pending=jobs)
    assert started(decide(within, Policy())) == {"j"}
    plan = decide(below, Policy())
    assert started(plan) == set()
    assert plan.verdicts[0].message.startswith("Needs 1 GPU + 4 GPUs.")
