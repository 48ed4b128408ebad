"""Rights of owners at decision and at start: what was submitted with a right does not start without it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from django.db import connection, transaction
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from portal.domain.jobs.reasons import EndReason
from portal.domain.states import JobState
from portal.errors import Conflict
from portal.models import (
    Attempt,
    ClusterSettings,
    Environment,
    Job,
    JobVerdict,
    Membership,
    Node,
    Project,
    Secret,
    User,
    Volume,
)
from portal.services.jobs.submission import do_resume_job, do_suspend_job
from portal.services.lifecycle import job_control
from portal.services.lifecycle.job_control import OwnerNotPermittedError, RankPlacement
from portal.services.lifecycle.rights_changes import JobChoice, QueuedJobs
from portal.services.projects.projects import do_remove_member
from portal.services.projects.secrets import do_save_secret
from scheduler.cycle import run_cycle
from scheduler.forecast.forecast_pass import run_forecast_pass
from scheduler.snapshot.decision_input import SnapshotCache, take_snapshot
from tests import factories
from tests.engine_harness import EngineHarness, InProcessEngine, held_milli

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def dataset() -> dict[str, Any]:
    factories.cluster_settings()
    dataset = factories.basic_cluster()
    dataset["admin"] = factories.user(admin=True)
    dataset["volume"] = Volume.objects.create(name="sets", kind="host_path", path="/srv/sets")
    do_save_secret(dataset["owner"], dataset["owner"], "hub", "hf_value")
    return dataset


def submit(dataset: dict[str, Any], **fields: Any) -> Job:
    return factories.job(dataset["owner"], dataset["project"], dataset["environment"], **fields)


def leaves(dataset: dict[str, Any]) -> None:
    Membership.objects.filter(user=dataset["owner"]).delete()


def becomes_viewer(dataset: dict[str, Any]) -> None:
    Membership.objects.filter(user=dataset["owner"]).update(role="viewer")


def is_deactivated(dataset: dict[str, Any]) -> None:
    User.objects.filter(pk=dataset["owner"].pk).update(is_active=False)


def project_is_archived(dataset: dict[str, Any]) -> None:
    Project.objects.filter(pk=dataset["project"].pk).update(archived_at=timezone.now())


def environment_is_withdrawn(dataset: dict[str, Any]) -> None:
    Environment.objects.filter(pk=dataset["environment"].pk).update(enabled=False)


def environment_is_for_others(dataset: dict[str, Any]) -> None:
    dataset["environment"].projects.set([factories.project()])


def volume_is_for_others(dataset: dict[str, Any]) -> None:
    dataset["volume"].projects.set([factories.project()])


def volume_is_removed(dataset: dict[str, Any]) -> None:
    dataset["volume"].delete()


def secret_is_removed(dataset: dict[str, Any]) -> None:
    Secret.objects.all().delete()


LOSSES: list[tuple[Callable[[dict[str, Any]], None], str]] = [
    (leaves, "project"),
    (becomes_viewer, "project"),
    (is_deactivated, "account"),
    (project_is_archived, "project"),
    (environment_is_withdrawn, "environment"),
    (environment_is_for_others, "environment"),
    (volume_is_for_others, "volume"),
    (volume_is_removed, "volume"),
    (secret_is_removed, "secret"),
]
USES = {"volumes": [{"volume": "sets"}], "secrets": [{"secret": "hub", "variable": "HUB"}]}


@pytest.mark.parametrize(("lose", "right"), LOSSES, ids=[lose.__name__ for lose, _ in LOSSES])
def test_a_queued_job_waits_with_a_verdict_and_a_decided_one_is_not_sent(dataset, lose, right) -> None:
    decided, queued = submit(dataset, **USES), submit(dataset, **USES)
    with transaction.atomic():  # decided and committed while it had the right, not sent yet
        row = Job.objects.select_for_update().get(pk=decided.pk)
        gpu = dataset["node"].gpus.order_by("index")[0]
        attempt = job_control.start_attempt(
            row, dataset["pool"], [RankPlacement(dataset["node"], [(gpu.pk, 1000)])], epoch=1
        )
    lose(dataset)
    with pytest.raises(OwnerNotPermittedError):
        job_control.mark_task_sent(attempt.task_rows.get())
    assert Attempt.objects.get().start_sent_at is None
    run_cycle("test", "me")
    queued.refresh_from_db()
    assert queued.state == JobState.PENDING
    standing = JobVerdict.objects.get(job=queued)
    assert standing.code == "owner_not_permitted" and standing.details == {"right": right}
    assert "can" in standing.message  # who may give the right back
    run_forecast_pass()
    standing.refresh_from_db()
    assert standing.p50_at is None


def test_a_job_starts_after_the_right_is_restored(dataset) -> None:
    job = submit(dataset)
    becomes_viewer(dataset)
    run_cycle("test", "me")
    Membership.objects.filter(user=dataset["owner"]).update(role="member")
    run_cycle("test", "me")
    job.refresh_from_db()
    assert job.state == JobState.RUNNING


def test_role_in_a_parent_project_counts_and_its_loss_too(dataset) -> None:
    parent = factories.project(member=dataset["owner"])
    dataset["project"].parent = parent
    dataset["project"].save()
    Membership.objects.filter(user=dataset["owner"], project=dataset["project"]).delete()
    job = submit(dataset)
    Project.objects.filter(pk=dataset["project"].pk).update(parent=None)
    run_cycle("test", "me")
    assert JobVerdict.objects.get(job=job).code == "owner_not_permitted"
    Project.objects.filter(pk=dataset["project"].pk).update(parent=parent)
    run_cycle("test", "me")
    job.refresh_from_db()
    assert job.state == JobState.RUNNING


def test_suspended_workspace_is_not_resumed_without_the_right(dataset) -> None:
    job = submit(dataset, kind="workspace")
    do_suspend_job(dataset["owner"], job)
    environment_is_withdrawn(dataset)
    with pytest.raises(Conflict) as refusal:
        do_resume_job(dataset["owner"], Job.objects.get(pk=job.pk))
    assert refusal.value.code == "environment_not_offered"
    becomes_viewer(dataset)
    with pytest.raises(Conflict) as refusal:
        do_resume_job(dataset["admin"], Job.objects.get(pk=job.pk))
    assert refusal.value.code == "owner_not_permitted"


def test_elastic_job_does_not_grow_without_the_right(dataset) -> None:
    job = submit(dataset, tasks=4, min_tasks=2)
    with transaction.atomic():
        row = Job.objects.select_for_update().get(pk=job.pk)
        gpus = dataset["node"].gpus.order_by("index")[:2]
        slots = [RankPlacement(dataset["node"], [(gpu.pk, 1000)]) for gpu in gpus]
        attempt = job_control.start_attempt(row, dataset["pool"], slots, epoch=1)
    becomes_viewer(dataset)
    run_cycle("test", "me")
    assert attempt.task_rows.count() == 2
    Membership.objects.filter(user=dataset["owner"]).update(role="member")
    run_cycle("test", "me")
    assert attempt.task_rows.count() == 4


def test_number_of_queries_does_not_grow_with_jobs_and_owners(dataset) -> None:
    def queries() -> int:
        with CaptureQueriesContext(connection) as seen:
            take_snapshot(factories.cluster_settings())
        return len(seen.captured_queries)

    submit(dataset, **USES)
    few = queries()
    for _ in range(3):
        other = factories.user()
        Membership.objects.create(user=other, project=dataset["project"], role="member")
        do_save_secret(other, other, "hub", "x")
        factories.job(other, dataset["project"], dataset["environment"], **USES)
    assert queries() == few


@pytest.fixture
def node_scene(harness: EngineHarness, request: pytest.FixtureRequest) -> dict[str, Any]:
    factories.cluster_settings()
    owner, name = factories.user("ada"), f"n{abs(hash(request.node.name)) % 10**9}"
    node = harness.mark_enrolled(harness.create_node(name=name))
    Node.objects.filter(pk=node.pk).update(reachable=True, runtime="process")
    return {
        "name": name,
        "node": node,
        "owner": owner,
        "project": factories.project(member=owner),
        "environment": factories.environment(runtime="process", tool=False),
        "engine": InProcessEngine(),
    }


@pytest.mark.parametrize("tasks", [pytest.param(1, marks=pytest.mark.long), 2])
def test_removal_between_decision_and_start_starts_nothing(harness: EngineHarness, node_scene, tasks) -> None:
    dataset = node_scene
    job = submit(dataset, command=["true"], memory_mib=64, tasks=tasks)
    run_cycle("test", "me")
    job.refresh_from_db()
    assert job.state == JobState.RUNNING and held_milli() == 1000 * tasks  # decided, and nothing was sent
    leaves(dataset)
    assert dataset["engine"].run_until(
        lambda: JobVerdict.objects.filter(job=job, code="owner_not_permitted").exists()
    )
    job.refresh_from_db()
    attempt = Attempt.objects.get()
    assert (job.state, attempt.reason) == (JobState.PENDING, EndReason.OWNER_NOT_PERMITTED)
    assert attempt.start_sent_at is None and held_milli() == 0
    assert not list(
        (harness.folder / dataset["name"] / "state").glob(f"**/*{job.public_id}*")
    )  # its node knows nothing
    Membership.objects.create(user=dataset["owner"], project=dataset["project"], role="member")
    assert dataset["engine"].run_until(lambda: Job.objects.get(pk=job.pk).state == JobState.COMPLETED)
    assert Job.objects.get(pk=job.pk).attempt_count == 2


def test_removal_with_cancellation_reaches_a_decided_job(dataset) -> None:
    job = submit(dataset)
    run_cycle("test", "me")
    do_remove_member(
        dataset["admin"], dataset["project"], dataset["owner"], choice=JobChoice(queued=QueuedJobs.CANCEL)
    )
    job.refresh_from_db()
    assert (job.state, job.reason) == (JobState.CANCELLED, EndReason.OWNER_NOT_PERMITTED)
    assert held_milli() == 0


def test_rights_are_read_again_only_after_a_write_that_may_change_them(dataset):
    submit(dataset)
    row_cache, settings = SnapshotCache(), ClusterSettings.objects.get(id=1)

    def reads() -> int:
        with CaptureQueriesContext(connection) as queries:
            take_snapshot(settings, row_cache)
        return sum('FROM "portal_membership"' in query["sql"] for query in queries)

    assert [reads(), reads()] == [1, 0]
    submit(dataset)
    assert reads() == 0, "another job that uses the same"
    leaves(dataset)
    assert reads() == 1
    assert len(take_snapshot(settings, row_cache).excluded) == 2
