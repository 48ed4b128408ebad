"""What an administrator decides after a restore, on the record alone: who may, what is refused, what it leaves."""

from __future__ import annotations

import pytest
from django.db import transaction

from agents.engines.replies import Container, TaskKey
from portal.domain.jobs.reasons import EndReason
from portal.domain.states import NodeState
from portal.errors import Conflict, Forbidden, InvalidRequest, NotFound
from portal.models import AuditEntry, ClusterSettings, Gpu, Job, Node, OrphanContainer, Task
from portal.selectors.cluster.recovery import recovery_status
from portal.services.cluster.recovery import (
    begin_recovery,
    do_adopt_orphan,
    do_stop_orphan,
    end_recovery_if_complete,
    record_orphans,
)
from portal.services.jobs.submission import do_resubmit_job
from portal.services.lifecycle import job_control
from portal.services.lifecycle.job_control import RankPlacement
from portal.services.nodes import nodes
from scheduler.snapshot.decision_input import take_snapshot
from tests import factories

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def dataset():
    """Two nodes after a restore, and an administrator."""
    factories.cluster_settings()
    pool, ada = factories.pool(), factories.user("ada")
    dataset = {
        "pool": pool,
        "nodes": [factories.node(pool, gpus=2), factories.node(pool, gpus=2)],
        "ada": ada,
        "admin": factories.user("root", admin=True),
        "vision": factories.project("vision", member=ada),
        "environment": factories.environment(tool=False),
    }
    begin_recovery()
    Node.objects.update(reachable=True)
    return dataset


def container(
    dataset, job: str, *, node: int = 0, rank: int = 0, attempt: int = 1, gpus=(0,), milli=1000, **more
):
    uuids = list(dataset["nodes"][node].gpus.order_by("index").values_list("uuid", flat=True))
    return Container(
        key=TaskKey(job, attempt, rank),
        name=f"fw-c-{job}-{attempt}-{rank}",
        digest="d",
        state="running",
        started_s=1_790_000_000.0,
        gpus=tuple((uuids[index], milli) for index in gpus),
        **more,
    )


def seen(dataset, *containers: Container, node: int = 0) -> list[OrphanContainer]:
    record_orphans(dataset["nodes"][node], containers)
    names = [each.name for each in containers]
    return list(OrphanContainer.objects.filter(name__in=names).order_by("rank"))


def used(dataset, node: int = 0) -> list[int]:
    return list(dataset["nodes"][node].gpus.order_by("index").values_list("used_milli", flat=True))


def test_only_administrators_decide(dataset) -> None:
    (row,) = seen(dataset, container(dataset, "newer22"))
    for act in (do_adopt_orphan, do_stop_orphan):
        with pytest.raises((Forbidden, NotFound)):
            act(dataset["ada"], row)
    assert used(dataset) == [0, 0]


def test_labels_name_the_owner_else_the_administrator(dataset) -> None:
    labels = {"owner": dataset["ada"].public_id, "project": dataset["vision"].public_id}
    (known,) = seen(dataset, container(dataset, "newer22", **labels))
    job = do_adopt_orphan(dataset["admin"], known)
    assert (job.public_id, job.owner, job.project, job.is_placeholder) == (
        "newer22",
        dataset["ada"],
        dataset["vision"],
        True,
    )
    (foreign,) = seen(
        dataset, container(dataset, "newer23", gpus=(1,), milli=300, owner="gone", project="gone")
    )
    other = do_adopt_orphan(dataset["admin"], foreign)
    assert (other.owner, other.project.name) == (dataset["admin"], "kept-after-restore")
    assert used(dataset) == [1000, 300]
    task = Task.objects.get(attempt__job=other)
    assert (task.state, task.container, task.allocations.get().milli) == ("RUNNING", foreign.name, 300)
    assert do_adopt_orphan(dataset["admin"], foreign).pk == other.pk, "asked twice is once"
    assert used(dataset) == [1000, 300]
    assert AuditEntry.objects.filter(action="container.adopt").count() == 2
    take_snapshot(factories.cluster_settings())  # what is kept is a true snapshot


def test_a_stub_ends_like_others_and_never_starts_again(dataset) -> None:
    (row,) = seen(dataset, container(dataset, "newer22"))
    job = do_adopt_orphan(dataset["admin"], row)
    task = Task.objects.get(attempt__job=job)
    job_control.record_task_ended(task.pk, exit_code=None, reason=EndReason.NODE_REBOOTED, proof="rebooted")
    job.refresh_from_db()
    assert (job.state, job.reason, used(dataset)) == ("FAILED", "node_rebooted", [0, 0])
    with pytest.raises(Conflict) as refusal:
        do_resubmit_job(dataset["admin"], job)
    assert refusal.value.code == "job_unknown"


def test_a_drained_stub_does_not_wait_again(dataset) -> None:
    (row,) = seen(dataset, container(dataset, "newer22"))
    job = do_adopt_orphan(dataset["admin"], row)
    nodes.do_set_node_state(dataset["admin"], dataset["nodes"][0], NodeState.DRAINED)
    task = Task.objects.get(attempt__job=job)
    job_control.record_task_ended(task.pk, exit_code=143, reason=EndReason.EXIT_CODE)
    job.refresh_from_db()
    assert job.state == "FAILED"


def test_a_gang_is_kept_completely_and_later_ranks_join(dataset) -> None:
    first = seen(dataset, container(dataset, "gang22"), container(dataset, "gang22", rank=1, gpus=(1,)))
    job = do_adopt_orphan(dataset["admin"], first[0])
    assert used(dataset) == [1000, 1000]
    (late,) = seen(dataset, container(dataset, "gang22", rank=2, node=1), node=1)
    assert do_adopt_orphan(dataset["admin"], late).pk == job.pk
    job.refresh_from_db()
    assert (job.tasks, used(dataset, 1)) == (3, [1000, 0])
    assert sorted(Task.objects.values_list("rank", "state")) == [
        (0, "RUNNING"),
        (1, "RUNNING"),
        (2, "RUNNING"),
    ]


def test_a_known_job_continues_with_the_running_attempt(dataset) -> None:
    job = factories.job(dataset["ada"], dataset["vision"], dataset["environment"])
    (row,) = seen(dataset, container(dataset, job.public_id, attempt=4))
    assert do_adopt_orphan(dataset["admin"], row).pk == job.pk
    job.refresh_from_db()
    attempt = job.attempts.get()
    assert (job.state, job.is_placeholder, job.attempt_count, attempt.number) == ("RUNNING", False, 4, 4)
    assert attempt.state == "RUNNING"


def test_a_gpu_that_the_record_promises_to_another_is_not_given_twice(dataset) -> None:
    holder = factories.job(dataset["ada"], dataset["vision"], dataset["environment"], name="holder")
    gpu = dataset["nodes"][0].gpus.get(index=0)
    with transaction.atomic():
        slot = RankPlacement(dataset["nodes"][0], [(gpu.pk, 500)])
        attempt = job_control.start_attempt(holder, dataset["pool"], [slot], epoch=1)
    (row,) = seen(dataset, container(dataset, "newer22"))
    with pytest.raises(Conflict) as refusal:
        do_adopt_orphan(dataset["admin"], row)
    assert refusal.value.code == "gpu_taken" and "to holder" in refusal.value.message
    row.refresh_from_db()
    assert (row.decision, used(dataset), Job.objects.filter(is_placeholder=True).count()) == ("", [500, 0], 0)
    job_control.request_stop(attempt.pk, EndReason.START_REFUSED)
    do_adopt_orphan(dataset["admin"], row)
    assert used(dataset) == [1000, 0]


def test_containers_that_cannot_be_kept_are_refused_with_a_reason(dataset) -> None:
    ended = factories.job(dataset["ada"], dataset["vision"], dataset["environment"])
    job_control.cancel_job(ended.pk, EndReason.CANCELLED_BY_USER, actor="ada")
    strange = Container(TaskKey("x" * 40, 1, 0), "fw-x", "d", "running")
    no_gpu = Container(TaskKey("newer22", 1, 0), "fw-y", "d", "running", gpus=(("GPU-elsewhere", 1000),))
    rows = seen(dataset, container(dataset, ended.public_id), strange, no_gpu)
    codes = {}
    for row in rows:
        with pytest.raises(Conflict) as refusal:
            do_adopt_orphan(dataset["admin"], row)
        codes[row.name[:4]] = refusal.value.code
    assert codes == {"fw-c": "job_ended", "fw-x": "not_managed", "fw-y": "no_such_gpu"}
    assert not Job.objects.filter(is_placeholder=True).exists()


def test_a_stop_applies_to_the_whole_attempt_once_the_node_confirms(dataset) -> None:
    job = factories.job(dataset["ada"], dataset["vision"], dataset["environment"], tasks=2)
    gang = (container(dataset, job.public_id), container(dataset, job.public_id, rank=1, gpus=(1,)))
    rows = seen(dataset, *gang)
    do_stop_orphan(dataset["admin"], rows[1])
    do_stop_orphan(dataset["admin"], rows[1])
    assert AuditEntry.objects.filter(action="container.stop").count() == 2
    with pytest.raises(Conflict) as refusal:
        do_adopt_orphan(dataset["admin"], rows[0])
    assert refusal.value.code == "already_decided"
    assert record_orphans(dataset["nodes"][0], gang) == {(job.public_id, 1)}
    assert not OrphanContainer.objects.filter(removed_at__isnull=False).exists()
    assert record_orphans(dataset["nodes"][0], ()) == set()
    assert OrphanContainer.objects.filter(removed_at__isnull=False).count() == 2
    job.refresh_from_db()
    assert (job.state, job.attempt_count) == ("PENDING", 1), (
        "its next attempt is one that was never forbidden"
    )
    with pytest.raises(Conflict) as refusal:
        do_stop_orphan(dataset["admin"], rows[0])
    assert refusal.value.code == "container_gone"


def test_jobs_start_again_once_every_node_is_reconciled_or_fenced(dataset) -> None:
    near, far = dataset["nodes"]
    Node.objects.filter(pk=far.pk).update(reachable=False, status_message="It does not answer.")
    (row,) = seen(dataset, container(dataset, "newer22", node=1), node=1)
    missing = recovery_status()
    assert missing.in_recovery and {left.node for left in missing.nodes} == {near, far}
    assert missing.message == "1 node is unreachable and 1 unknown container needs a decision."
    nodes.record_contact(near.pk, compared=True)
    assert not end_recovery_if_complete()
    with pytest.raises(InvalidRequest):
        nodes.do_fence_node(dataset["admin"], far, reason=" ")
    nodes.do_fence_node(dataset["admin"], far, reason="switched off")
    row.refresh_from_db()
    assert row.removed_at is not None and recovery_status().nodes == []
    assert end_recovery_if_complete() and not end_recovery_if_complete()
    assert not ClusterSettings.objects.get().recovery_mode
    assert AuditEntry.objects.filter(action="cluster.recovered").count() == 1
    with pytest.raises(Conflict) as refusal:
        do_adopt_orphan(dataset["admin"], row)
    assert refusal.value.code == "not_in_recovery"


def test_a_node_that_was_fenced_before_the_backup_is_looked_at(dataset) -> None:
    Node.objects.update(reachable=False)
    for node in dataset["nodes"]:
        nodes.do_fence_node(dataset["admin"], node, reason="switched off")
    begin_recovery()
    assert not end_recovery_if_complete()
    node = Node.objects.first()
    assert (node.state, node.state_reason) == ("cordoned", "Before the restore: Fenced: switched off")


def test_a_workspace_is_kept_and_not_ended_for_want_of_an_answer(dataset) -> None:
    lab = factories.job(dataset["ada"], dataset["vision"], factories.environment(), kind="workspace")
    (row,) = seen(dataset, container(dataset, lab.public_id))
    do_adopt_orphan(dataset["admin"], row)
    attempt = lab.attempts.get()
    assert attempt.ready_at is not None and attempt.secret == ""
    assert "it can only be stopped" in lab.events.last().message
    assert Gpu.objects.filter(used_milli=1000).count() == 1
