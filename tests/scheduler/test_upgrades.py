"""Another agent for nodes over real SSH, from the portal, under a job that runs: new, broken, and forged ones."""

from __future__ import annotations

import io
import zipfile
from itertools import pairwise
from pathlib import Path

import pytest

from agents.keys import make_keys, sign_agent
from portal.domain.nodes.node_operations import OperationKind
from portal.domain.states import JobState
from portal.models import AgentRollout, AuditEntry, NodeOperation
from portal.services.jobs.logs import log_path
from portal.services.nodes.operations import do_request_operation, do_upgrade_all
from scheduler.nodes import node_operations
from tests import factories
from tests.rig.cluster import RigCluster
from tests.rig.images import RigImage
from tests.two_rig_nodes import in_state, submit, two_rig_nodes, wait_until

pytestmark = [pytest.mark.rig, pytest.mark.long, pytest.mark.django_db(transaction=True)]


@pytest.fixture
def dataset(make_rig, rig_cluster: RigCluster, tiny_image: RigImage, settings, tmp_path: Path):
    """Two enrolled nodes that both have the tiny image, and an administrator."""
    made = two_rig_nodes(make_rig, rig_cluster, tiny_image, [[tiny_image.store]] * 2, settings, tmp_path)
    return made | {
        "admin": factories.user("root", admin=True),
        "folder": tmp_path / "agent",
        "cluster": rig_cluster,
    }


def publish(dataset, program: bytes, key: Path | None = None) -> None:
    """Leaves a program as `up` does, signed with the cluster's key unless another is given."""
    dataset["folder"].mkdir(exist_ok=True)
    (dataset["folder"] / "agent.pyz").write_bytes(program)
    signature = sign_agent(program, key or dataset["cluster"].keys["signing"])
    (dataset["folder"] / "agent.pyz.sig").write_text(signature)


def broken() -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("__main__.py", "import sys\nsys.exit('broken')\n")
    return packed.getvalue()


def programs(dataset) -> set[str]:
    for node in dataset["nodes"]:
        node.refresh_from_db()
    return {node.agent_info["agent_digest"] for node in dataset["nodes"]}


def over(check: NodeOperation):
    return lambda: check.refresh_from_db() or check.finished_at is not None


def test_agents_are_replaced_under_a_job_that_runs(dataset, monkeypatch, tmp_path: Path) -> None:
    job = submit(dataset, "sh", "-c", "while :; do date +%s.%N; sleep 0.2; done")
    wait_until(dataset, lambda: job.attempts.filter(state="RUNNING").exists(), job)
    task = job.attempts.get().task_rows.get()
    place = dataset["nodes"].index(task.node)
    container = dataset["machines"][place].podman("inspect", "--format", "{{.Id}}", task.container)
    first = programs(dataset)

    publish(dataset, dataset["cluster"].agent.program + b"\n")
    rollout = do_upgrade_all(dataset["admin"])
    assert rollout.operations.filter(dispatched_at__isnull=False).count() == 1, "one node first"
    wait_until(dataset, lambda: rollout.refresh_from_db() or rollout.finished_at is not None, job)
    steps = [(check.node.name, check.steps) for check in rollout.operations.all()]
    assert rollout.ok and rollout.message == "2 of 2 nodes run the new agent.", steps
    newer = programs(dataset)
    assert len(newer) == 1 and not newer & first
    wait_until(
        dataset, lambda: NodeOperation.objects.filter(kind="preflight", ok__isnull=False).count() >= 4, job
    )

    publish(dataset, broken())
    monkeypatch.setattr(node_operations, "UPGRADE_CONFIRM_TIMEOUT_S", 5.0)
    check = do_request_operation(dataset["admin"], dataset["nodes"][place], OperationKind.UPGRADE)
    wait_until(dataset, over(check), job, within_s=90)
    assert not check.ok and check.steps[-1]["message"].endswith("the node runs the previous version."), (
        check.steps
    )
    assert programs(dataset) == newer

    outsider = make_keys(tmp_path / "stranger", "rig")["signing"]
    publish(dataset, dataset["cluster"].agent.program + b"\n\n", outsider)
    rollout = do_upgrade_all(dataset["admin"])
    wait_until(dataset, lambda: rollout.refresh_from_db() or rollout.finished_at is not None, job)
    assert not rollout.ok and "1 were not upgraded" in rollout.message
    assert "not signed with the key" in rollout.operations.get().steps[-1]["message"]
    assert programs(dataset) == newer

    job.refresh_from_db()
    assert (job.state, job.attempts.count()) == (JobState.RUNNING, 1)
    assert dataset["machines"][place].podman("inspect", "--format", "{{.Id}}", task.container) == container
    assert AgentRollout.objects.count() == AuditEntry.objects.filter(action="nodes.upgrade_all").count() == 2
    length = log_path(job.public_id, 1, 0, "k8s")
    dataset["machines"][place].podman("kill", task.container)
    wait_until(dataset, in_state(job, JobState.FAILED), job)
    lines = length.read_text().splitlines()
    stamps = [float(line.split()[-1]) for line in lines]
    assert len(stamps) > 20 and max(b - a for a, b in pairwise(stamps)) < 5, "it never paused"
