"""A gang on the nodes' network and a workspace of another project share no node, whichever comes first."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from portal.models import Job, JobVerdict, NodePool, Task
from scheduler import leases
from scheduler.commit import plan_writer
from scheduler.core.model.plan import JobPlacement, TaskPlacement
from scheduler.core.model.snapshot import GpuShare, NodeId, ProjectId
from scheduler.cycle import run_cycle
from scheduler.snapshot.network_isolation import IsolationClass, isolation_excluded_nodes, must_be_separated
from tests import factories

pytestmark = pytest.mark.django_db(transaction=True)

GUEST = st.tuples(st.sampled_from(IsolationClass), st.sampled_from("abc").map(ProjectId))


@given(st.lists(GUEST, max_size=6), GUEST)
def test_the_rule_is_symmetric(there, comer) -> None:
    apart = must_be_separated(*comer, there)
    assert apart == any(must_be_separated(*guest, [comer]) for guest in there)
    assert isolation_excluded_nodes(*comer, {NodeId("n"): there}) == (("n",) if apart else ())
    assert not any(must_be_separated(*comer, [(side, comer[1])]) for side in IsolationClass)


@pytest.fixture
def dataset():
    factories.cluster_settings()
    made = factories.basic_cluster()
    made["other"] = factories.project("other", member=made["owner"])
    NodePool.objects.update(allow_host_network=True)
    return made


def submit(dataset, project: str = "project", **asks) -> Job:
    return factories.job(dataset["owner"], dataset[project], dataset["environment"], **asks)


def standing(job: Job) -> str:
    row = JobVerdict.objects.filter(job=job).first()
    return f"{row.code}: {row.message}" if row else "starts"


def cycle() -> None:
    run_cycle("test", "me")


def test_a_gang_avoids_nodes_with_a_workspace_of_another_project(dataset) -> None:
    submit(dataset, "other", kind="workspace")
    cycle()
    gang, alone = submit(dataset, tasks=2), submit(dataset)
    theirs = submit(dataset, "other", tasks=2, gpus_per_task=0)
    cycle()
    states = dict(Job.objects.filter(pk__in=[gang.pk, alone.pk, theirs.pk]).values_list("pk", "state"))
    assert states == {gang.pk: "PENDING", alone.pk: "RUNNING", theirs.pk: "RUNNING"}
    assert "insufficient_resources" in standing(gang) and "1 node is excluded" in standing(gang)
    factories.node(dataset["pool"])
    cycle()
    gang.refresh_from_db()
    assert gang.state == "RUNNING"


def test_a_workspace_avoids_nodes_with_a_gang_of_another_project(dataset) -> None:
    submit(dataset, tasks=2)
    cycle()
    theirs, ours = submit(dataset, "other", kind="workspace"), submit(dataset, kind="workspace")
    cycle()
    assert "1 node is excluded" in standing(theirs) and standing(ours) == "starts"
    NodePool.objects.update(allow_host_network=False)
    cycle()
    assert standing(theirs) == "starts"


def test_two_that_meet_in_one_plan_do_not_both_start(dataset) -> None:
    gang, workspace = submit(dataset, tasks=2), submit(dataset, "other", kind="workspace")
    leader = leases.acquire(leases.LEADER, "test", 60)
    assert leader is not None
    gpus = [GpuShare(gpu.uuid, 1000) for gpu in dataset["node"].gpus.order_by("index")]
    node, pool = dataset["node"].public_id, dataset["pool"].public_id
    starts = [
        JobPlacement(
            gang.public_id, pool, gang.version, tuple(TaskPlacement(n, node, (gpus[n],)) for n in (0, 1))
        ),
        JobPlacement(workspace.public_id, pool, workspace.version, (TaskPlacement(0, node, (gpus[2],)),)),
    ]
    refused = plan_writer.commit_starts(leader, starts)
    assert [(each.job, each.code) for each in refused] == [(workspace.public_id, "network_isolation")]
    assert set(Task.objects.values_list("attempt__job", flat=True)) == {gang.pk}


def test_a_launcher_that_needs_a_rendezvous_waits_for_a_pool_with_a_network(dataset) -> None:
    gang = submit(dataset, tasks=2, launcher="torchrun", gpus_per_task=2)
    NodePool.objects.update(allow_host_network=False)
    cycle()
    assert standing(gang).startswith("unsatisfiable: ") and "One task with 4 GPUs" in standing(gang)
    lending = NodePool.objects.create(name="lending", allow_host_network=True)
    factories.node(lending)
    cycle()
    assert standing(gang) == "starts"
    assert set(Task.objects.values_list("node__pool__name", flat=True)) == {"lending"}
