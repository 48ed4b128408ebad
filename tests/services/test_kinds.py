"""Asking for MIG slices and for newer GPUs: what is refused at submit, and with what nearest request."""

from __future__ import annotations

import pytest

from portal.errors import InvalidRequest, Unsatisfiable
from portal.models import Gpu, Quota
from scheduler.core.decide import decide
from scheduler.core.model.policy import Policy
from scheduler.snapshot.decision_input import take_snapshot
from tests import factories

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def dataset():
    """A node with two whole GPUs of capability 8.0 and two slices."""
    made = factories.basic_cluster()
    made["node"].gpus.update(compute_capability=8.0)
    made["node"].gpus.filter(index__gte=2).update(mig_profile="1g.10gb", memory_mib=9_728)
    return made


def submit(dataset, **asks):
    return factories.job(dataset["owner"], dataset["project"], dataset["environment"], **asks)


@pytest.mark.parametrize(
    ("asks", "field"),
    [
        ({"mig_profile": "big"}, "mig_profile"),
        ({"mig_profile": "1g.10gb; rm"}, "mig_profile"),
        ({"mig_profile": "1g.10gb", "milli_per_gpu": 500}, "milli_per_gpu"),
        ({"min_compute_capability": 0.5}, "min_compute_capability"),
        ({"min_compute_capability": float("nan")}, "min_compute_capability"),
    ],
)
def test_invalid_gpu_models_are_refused_by_field(dataset, asks, field) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        submit(dataset, **asks)
    assert set(refusal.value.fields) == {field}


@pytest.mark.parametrize(
    ("asks", "message", "nearest"),
    [
        (
            {"mig_profile": "3g.40gb"},
            "There is no MIG slice 3g.40gb in this cluster. The cluster has 1g.10gb.",
            {"mig_profile": "1g.10gb"},
        ),
        (
            {"min_compute_capability": 9.0},
            "Needs a GPU of compute capability 9.0 or more; the newest in this cluster has 8.0.",
            {"min_compute_capability": 8.0},
        ),
    ],
)
def test_an_unknown_gpu_model_is_refused_with_the_nearest(dataset, asks, message, nearest) -> None:
    with pytest.raises(Unsatisfiable) as refusal:
        submit(dataset, **asks)
    assert refusal.value.message == message
    assert refusal.value.details["nearest"] == nearest


def test_whole_gpus_and_slices_are_counted_apart(dataset) -> None:
    assert submit(dataset, gpus_per_task=2).pk and submit(dataset, gpus_per_task=2, mig_profile="1g.10gb").pk
    for asks in ({"gpus_per_task": 3}, {"gpus_per_task": 3, "mig_profile": "1g.10gb"}):
        with pytest.raises(Unsatisfiable):
            submit(dataset, **asks)


def test_the_scheduler_places_each_job_on_its_gpu_model(dataset) -> None:
    small = submit(dataset, mig_profile="1g.10gb", min_compute_capability=8.0)
    whole = submit(dataset, gpus_per_task=2)
    plan = decide(take_snapshot(factories.cluster_settings()).snapshot, Policy())
    kinds = dict(Gpu.objects.values_list("uuid", "mig_profile"))
    got = {
        start.job: {kinds[share.uuid] for task in start.tasks for share in task.gpus} for start in plan.starts
    }
    assert got == {small.public_id: {"1g.10gb"}, whole.public_id: {""}}


def test_a_slice_counts_as_one_gpu_of_a_limit(dataset) -> None:
    Quota.objects.create(
        project=dataset["project"], pool=dataset["pool"], guaranteed_milli=0, limit_milli=1000
    )
    with pytest.raises(Unsatisfiable, match="limit of"):
        submit(dataset, gpus_per_task=2, mig_profile="1g.10gb")


def test_a_gang_needs_gpus_of_one_model_unless_it_allows_others(dataset) -> None:
    other = factories.node(dataset["pool"], gpus=2, cpu_milli=64_000)
    other.gpus.update(model="Test 40")
    Gpu.objects.update(mig_profile="", memory_mib=81_920)
    asks = {"tasks": 3, "gpus_per_task": 2, "cpu_milli": 1_000, "memory_mib": 1_024}
    with pytest.raises(Unsatisfiable) as refusal:
        submit(dataset, **asks)
    assert "at once on GPUs of one model; this cluster fits 2." in refusal.value.message
    assert refusal.value.details["nearest"] == {"tasks": 2, "gpus_per_task": 2}
    roles = [{"name": name, "tasks": 1, "gpus_per_task": 3} for name in ("chief", "worker")]
    with pytest.raises(Unsatisfiable, match="Its roles need 6 GPUs"):
        submit(dataset, roles=roles)
    together = submit(dataset, **asks | {"tasks": 2})
    mixed = submit(dataset, **asks, allow_mixed_gpus=True)
    independent = submit(dataset, **asks, min_tasks=1)
    snapshot = take_snapshot(factories.cluster_settings()).snapshot
    flags = {row.job: row.allow_mixed_gpus for row in snapshot.pending}
    assert flags == {mixed.public_id: True, together.public_id: False, independent.public_id: True}
    nodes = {start.job: {task.node for task in start.tasks} for start in decide(snapshot, Policy()).starts}
    assert nodes[together.public_id] == {dataset["node"].public_id}
