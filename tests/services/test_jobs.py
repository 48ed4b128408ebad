"""Submitting: what is refused, with the reason and the nearest request that would work."""

from __future__ import annotations

import pytest

from portal.domain.jobs.feasibility import matching_gpu_models
from portal.errors import Conflict, Forbidden, InvalidRequest, NotFound, Unsatisfiable
from portal.models import Node, NodePool, OutboxMessage, Quota
from portal.services.jobs.submission import do_cancel_job, do_resubmit_job
from tests import factories

pytestmark = pytest.mark.django_db


@pytest.fixture
def dataset():
    pool = factories.pool("main")
    owner = factories.user("ada")
    for name in ("n1", "n2"):
        factories.node(pool, name=name)
    project = factories.project("nlp", member=owner)
    return {"pool": pool, "owner": owner, "project": project, "environment": factories.environment()}


def submit(dataset, user=None, **fields):
    return factories.job(user or dataset["owner"], dataset["project"], dataset["environment"], **fields)


def test_a_submitted_job_waits_and_wakes_the_engine(dataset):
    job = submit(dataset, gpus_per_task=3)
    assert (job.state, job.total_milli) == ("PENDING", 3000)
    assert job.events.get().message == "Submitted by ada."
    assert OutboxMessage.objects.filter(name="scheduler.cycle").exists()


def test_eight_gpus_on_two_nodes_may_wait_and_nine_never_fit(dataset):
    assert submit(dataset, tasks=2, gpus_per_task=4).state == "PENDING"
    with pytest.raises(Unsatisfiable) as refusal:
        submit(dataset, gpus_per_task=9)
    assert refusal.value.code == "unsatisfiable"
    assert refusal.value.details["largest_node_gpus"] == 4
    assert refusal.value.details["nearest"] == {"tasks": 1, "gpus_per_task": 4}
    with pytest.raises(Unsatisfiable) as refusal:
        submit(dataset, tasks=9)
    assert refusal.value.details["nearest"] == {"tasks": 8, "gpus_per_task": 1}


def test_a_request_above_the_limit_per_user_is_refused_with_the_nearest(dataset):
    Quota.objects.create(project=dataset["project"], pool=dataset["pool"], user_limit_milli=2000)
    with pytest.raises(Unsatisfiable) as refusal:
        submit(dataset, gpus_per_task=4)
    assert "the user limit of nlp in main is 2" in refusal.value.message
    assert refusal.value.details["nearest"]["gpus_per_task"] == 2


def test_a_limit_of_an_ancestor_is_named(dataset):
    parent = factories.project("language")
    dataset["project"].parent = parent
    dataset["project"].save()
    Quota.objects.create(project=parent, pool=dataset["pool"], limit_milli=2000)
    with pytest.raises(Unsatisfiable) as refusal:
        submit(dataset, gpus_per_task=3)
    assert "limit of language in main is 2" in refusal.value.message
    assert submit(dataset, gpus_per_task=2).state == "PENDING"


@pytest.mark.parametrize(
    ("requested", "models"),
    [
        ("NVIDIA H200", ["NVIDIA H200"]),
        ("nvidia h200", ["NVIDIA H200"]),
        ("H200", ["NVIDIA H200", "NVIDIA H200 NVL"]),
        ("a100", ["NVIDIA A100-SXM4-80GB"]),
        ("RTX", []),
    ],
)
def test_gpu_models_are_found_by_a_part_of_their_name(requested, models):
    known = ["NVIDIA H200 NVL", "NVIDIA H200", "NVIDIA A100-SXM4-80GB", "NVIDIA H200"]
    assert matching_gpu_models(requested, known) == models


def never(dataset, **fields):
    """The message and the nearest request of a refusal, which must be one that is not refused."""
    with pytest.raises(Unsatisfiable) as refusal:
        submit(dataset, **fields)
    assert refusal.value.code == "unsatisfiable"
    nearest = refusal.value.details["nearest"]
    if nearest is not None:
        changed = {
            key: NodePool.objects.get(public_id=v) if key == "pool" else v for key, v in nearest.items()
        }
        assert submit(dataset, **fields | changed).state == "PENDING"
    return refusal.value.message, nearest


@pytest.mark.parametrize(
    ("fields", "says", "nearest"),
    [
        (
            {"gpu_model": "Test 90"},
            "no Test 90 GPU in this cluster. Models there: Other 40, Test 80.",
            {"gpu_model": "Test 80"},
        ),
        (
            {"min_gpu_memory_mib": 90_000},
            "GPU with 87.9 GiB of memory; the largest in this cluster has 80 GiB",
            {"min_gpu_memory_mib": 81_920},
        ),
        (
            {"memory_mib": 65_536},
            "Needs 64 GiB of memory; the largest node has 62.5 GiB",
            {"memory_mib": 64_000},
        ),
        (
            {"cpu_milli": 17_000},
            "Needs 17 CPU cores; the largest node has 16 CPU cores",
            {"cpu_milli": 16_000},
        ),
        ({"gpus_per_task": 0, "cpu_milli": 17_000}, "Needs 17 CPU cores", {"cpu_milli": 16_000}),
        (
            {"gpus_per_task": 4, "cpu_milli": 16_000, "memory_mib": 64_000, "gpu_model": "Other 40"},
            "Request at most 1 on a node",
            None,
        ),
        (
            {"cpu_milli": 16_000, "gpu_model": "Other 40"},
            "1 Other 40 GPU, 16 CPU cores and 2 GiB together; small has 4 CPU cores",
            {"cpu_milli": 4000, "memory_mib": 2048},
        ),
        (
            {"tasks": 3, "cpu_milli": 16_000},
            "fits 2. Request at most 2 tasks",
            {"tasks": 2, "gpus_per_task": 1},
        ),
        ({"tasks": 9}, "fits 8. Request at most 8 tasks", {"tasks": 8, "gpus_per_task": 1}),
        (
            {"tasks": 10, "gpus_per_task": 0, "cpu_milli": 16_000},
            "Needs 10 tasks, each with 16 CPU cores",
            {"tasks": 2, "gpus_per_task": 0},
        ),
    ],
)
def test_a_request_no_node_can_hold_is_refused(dataset, fields, says, nearest):
    """Two large nodes in one pool, a small one with another GPU in a second."""
    other = factories.pool("other")
    small = factories.node(other, name="small", gpus=1, cpu_milli=4000, memory_mib=8000)
    small.gpus.update(model="Other 40", memory_mib=40_960)
    message, found = never(dataset, **fields)
    assert says in message
    assert found == nearest


def test_a_pool_that_could_hold_the_request_is_named(dataset):
    other = factories.pool("other")
    factories.node(other, gpus=1, runtime="process").gpus.update(model="Other 40")
    message, nearest = never(dataset, pool=other)
    assert "No node of the pool other runs containers. The pool main has nodes that do." in message
    assert nearest == {"pool": dataset["pool"].public_id}
    factories.node(other, gpus=1).gpus.update(model="Other 40")
    message, nearest = never(dataset, pool=other, gpu_model="Test 80")
    assert "There is no Test 80 GPU in the pool other; the pool main has some." in message
    assert nearest == {"pool": dataset["pool"].public_id}


def test_a_runtime_that_no_node_has(dataset):
    process = factories.environment(runtime="process", prefix="/usr")
    with pytest.raises(Unsatisfiable, match="No node of this cluster runs environments without a container"):
        factories.job(dataset["owner"], dataset["project"], process)
    Node.objects.update(state="retired")
    with pytest.raises(Unsatisfiable, match="There is no node yet"):
        submit(dataset)


def test_one_pool_must_both_hold_and_allow_the_request(dataset):
    """The limit of the large pool is not lifted by a small pool that has none."""
    factories.node(factories.pool("tiny"), gpus=1)
    Quota.objects.create(project=dataset["project"], pool=dataset["pool"], limit_milli=2000)
    message, nearest = never(dataset, gpus_per_task=3)
    assert "limit of nlp in main is 2" in message
    assert nearest == {"tasks": 1, "gpus_per_task": 2}


def test_a_cluster_returns_to_service(dataset):
    Node.objects.update(state="cordoned")
    assert submit(dataset, gpus_per_task=4).state == "PENDING"


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"name": ""}, "name"),
        ({"name": "a\nb"}, "name"),
        ({"name": "ab\n"}, "name"),
        ({"tasks": 0}, "tasks"),
        ({"tasks": -3}, "tasks"),
        ({"gpus_per_task": 65}, "gpus_per_task"),
        ({"milli_per_gpu": 0}, "milli_per_gpu"),
        ({"milli_per_gpu": 500, "gpus_per_task": 2}, "milli_per_gpu"),
        ({"memory_mib": 1}, "memory_mib"),
        ({"command": []}, "command"),
        ({"command": ["a\0b"]}, "command"),
        ({"command": ["x" * 70_000]}, "command"),
        ({"env": {"LD_PRELOAD": "x"}}, "env"),
        ({"env": {"CUDA_VISIBLE_DEVICES": "0"}}, "env"),
        ({"env": {"1A": "x"}}, "env"),
        ({"env": {"A\n": "x"}}, "env"),
        ({"env": {"A=B": "x"}}, "env"),
        ({"env": {"A": "x" * 40_000}}, "env"),
        ({"env": {f"A{n}": "x" for n in range(501)}}, "env"),
        ({"env": {f"A{n}": "x" * 30_000 for n in range(5)}}, "env"),
        ({"command": ["-c", "true"]}, "command"),
        ({"command": ["x"] * 1001}, "command"),
        ({"time_limit_s": 0}, "time_limit_s"),
        ({"kind": "party"}, "kind"),
        ({"kind": "workspace", "tasks": 2}, "tasks"),
        ({"priority": -101}, "priority"),
    ],
)
def test_nonsense_is_refused_by_field(dataset, fields, named):
    with pytest.raises(InvalidRequest) as refusal:
        submit(dataset, **fields)
    assert named in refusal.value.fields


def test_strangers_cannot_learn_that_a_project_exists(dataset):
    with pytest.raises(NotFound):
        submit(dataset, user=factories.user())
    viewer = factories.user()
    dataset["project"].memberships.create(user=viewer, role="viewer")
    with pytest.raises(Forbidden):
        submit(dataset, user=viewer)
    with pytest.raises(Forbidden, match="priority"):
        submit(dataset, priority=5)


def test_cancel_by_others(dataset):
    job = submit(dataset)
    other = factories.user()
    with pytest.raises(NotFound):
        do_cancel_job(other, job)
    dataset["project"].memberships.create(user=other, role="member")
    with pytest.raises(Forbidden):
        do_cancel_job(other, job)
    assert do_cancel_job(dataset["owner"], job).state == "CANCELLED"


def test_start_again_makes_the_same_request(dataset):
    job = submit(dataset, gpus_per_task=2, env={"A": "1"})
    with pytest.raises(Conflict):
        do_resubmit_job(dataset["owner"], job)
    do_cancel_job(dataset["owner"], job)
    job.refresh_from_db()
    again = do_resubmit_job(dataset["owner"], job)
    assert (again.gpus_per_task, again.env, again.state) == (2, {"A": "1"}, "PENDING")
    assert again.pk != job.pk


def test_a_shared_account_is_for_one_user_only(dataset):
    """Without root the runtime process cannot keep people apart."""
    admin = factories.user(admin=True)
    node = factories.node(dataset["pool"], runtime="process", agent_info={"per_user_isolation": False})
    process = factories.environment(runtime="process", prefix="/usr")
    assert factories.job(admin, dataset["project"], process).state == "PENDING"
    with pytest.raises(Forbidden, match="one account"):
        factories.job(dataset["owner"], dataset["project"], process)
    factories.user(password=factories.PASSWORD)
    with pytest.raises(Forbidden, match="more than one user"):
        factories.job(admin, dataset["project"], process)
    node.agent_info = {"per_user_isolation": True}
    node.save()
    assert factories.job(dataset["owner"], dataset["project"], process).state == "PENDING"


def test_the_nearest_feasible_request_scales_the_cpus_and_memory_of_too_many_gpus(dataset):
    """They are mostly in proportion to the GPUs, and those of more GPUs than a node has fit nowhere."""
    node = dataset["pool"].nodes.first()
    largest = node.gpus.count()
    amounts = {"cpu_milli": node.cpu_milli // largest, "memory_mib": node.memory_mib // largest}
    asked = {name: amount * 2 * largest for name, amount in amounts.items()}
    with pytest.raises(Unsatisfiable) as refused:
        submit(dataset, gpus_per_task=2 * largest, **asked)
    nearest = refused.value.details["nearest"]
    assert nearest == {"tasks": 1, "gpus_per_task": largest} | {
        name: amount * largest for name, amount in amounts.items()
    }
    assert submit(dataset, **nearest).gpus_per_task == largest
