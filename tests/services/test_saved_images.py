"""Environments that users save from running jobs: who may, for whom they are, and where they run."""

from __future__ import annotations

import datetime as dt

import pytest
from django.utils import timezone

from portal.domain.states import AttemptState, JobState
from portal.errors import Conflict, Forbidden, InvalidRequest
from portal.models import AuditEntry, Environment, Job, NodePool, SavedImage, Task, UserRequest
from portal.services.environments.prefetch import protected_images
from portal.services.requests.user_requests import do_answer_request
from portal.services.workspaces.saved_images import (
    do_delete_saved_environment,
    do_save_environment_of,
    images_to_save,
    list_saved_images,
    problem_of,
    record_not_saved,
    record_saved,
)
from scheduler.snapshot.decision_input import take_snapshot
from tests import factories
from tests.api.fixture_data import running

pytestmark = pytest.mark.django_db
IMAGE = "sha256:" + "5" * 64
WORDS = {"name": "torch-and-more", "purpose": "Torch with our tokenizer."}


@pytest.fixture
def dataset():
    """A job that runs in a container on one of two nodes, and an administrator."""
    made = factories.basic_cluster() | {"admin": factories.user("root", admin=True)}
    made["other"] = factories.node(made["node"].pool, name="other-node")
    made["job"] = up(factories.job(made["owner"], made["project"], made["environment"]), made["node"])
    return made


def up(job: Job, node) -> Job:
    """The job with its task running."""
    job = running(job, node)
    job.attempts.update(state=AttemptState.RUNNING.value)
    Task.objects.filter(attempt__job=job).update(state=AttemptState.RUNNING.value)
    return job


def save(dataset, **words) -> SavedImage:
    """The environment as its node saved it."""
    do_save_environment_of(dataset["owner"], dataset["job"], **WORDS | words)
    (row,) = images_to_save(dataset["node"])
    record_saved(row, IMAGE, 12)
    return SavedImage.objects.select_related("environment").get(pk=row.pk)


@pytest.mark.django_db(transaction=True)
def test_a_saved_environment_is_for_its_owner_and_runs_on_its_node_only(dataset) -> None:
    saved = save(dataset)
    environment, owner = saved.environment, dataset["owner"]
    assert (environment.enabled, environment.image_digest, saved.changed_mib) == (True, IMAGE, 12)
    assert environment.tool_command == dataset["environment"].tool_command
    job = factories.job(owner, dataset["project"], environment)
    rows = {row.job: row for row in take_snapshot(factories.cluster_settings()).snapshot.pending}
    assert rows[job.public_id].ineligible_nodes == (dataset["other"].public_id,)
    assert IMAGE in protected_images(dataset["node"].pk)
    colleague = factories.user("bea")
    dataset["project"].memberships.create(user=colleague, role="member")
    with pytest.raises(InvalidRequest) as refused:
        factories.job(colleague, dataset["project"], environment)
    assert "is not available to the project" in refused.value.fields["environment"]
    elsewhere = factories.project("elsewhere", member=owner)
    with pytest.raises(InvalidRequest):
        factories.job(owner, elsewhere, environment)
    assert images_to_save(dataset["node"]) == []
    assert AuditEntry.objects.filter(action="environment.saved", actor=owner).exists()


def test_the_project_may_use_it_once_an_administrator_approves(dataset) -> None:
    environment = save(dataset, for_project=True).environment
    request = UserRequest.objects.get(environment=environment)
    assert (request.requested_by, request.reason) == (dataset["owner"], WORDS["purpose"])
    colleague = factories.user("bea")
    dataset["project"].memberships.create(user=colleague, role="member")
    do_answer_request(dataset["admin"], request, approve=True)
    assert factories.job(colleague, dataset["project"], environment).state == JobState.PENDING
    elsewhere = factories.project("elsewhere", member=colleague)
    environment.refresh_from_db()
    with pytest.raises(InvalidRequest):
        factories.job(colleague, elsewhere, environment)


def test_what_cannot_be_saved_is_refused_with_the_reason(dataset) -> None:
    owner, job = dataset["owner"], dataset["job"]
    for words, field in (({"name": "No Spaces"}, "name"), ({"purpose": "  "}, "purpose")):
        with pytest.raises(InvalidRequest) as refused:
            do_save_environment_of(owner, job, **WORDS | words)
        assert list(refused.value.fields) == [field]
    with pytest.raises(InvalidRequest) as refused:
        do_save_environment_of(owner, job, **WORDS | {"name": dataset["environment"].name})
    assert refused.value.fields == {"name": "An environment with this name already exists."}
    waiting = factories.job(owner, dataset["project"], dataset["environment"])
    with pytest.raises(Conflict, match="Only a running job"):
        do_save_environment_of(owner, waiting, **WORDS)
    lab = up(
        factories.job(owner, dataset["project"], dataset["environment"], kind="workspace"), dataset["node"]
    )
    for manager in (dataset["admin"], factories.user("dean")):
        dataset["project"].memberships.get_or_create(user=manager, role="manager")
        with pytest.raises(Forbidden, match="Only its owner"):
            do_save_environment_of(manager, lab, **WORDS)
    do_save_environment_of(owner, job, **WORDS)
    with pytest.raises(Conflict, match="already being saved"):
        do_save_environment_of(owner, job, **WORDS | {"name": "another"})
    NodePool.objects.update(policy={"saved_image_max_mib": 0})
    with pytest.raises(Conflict, match="disabled"):
        do_save_environment_of(owner, lab, **WORDS | {"name": "another"})


def test_a_refused_save_says_why_and_frees_the_name(dataset) -> None:
    owner, job = dataset["owner"], dataset["job"]
    do_save_environment_of(owner, job, **WORDS)
    (row,) = images_to_save(dataset["node"])
    record_not_saved(row, "Its changed files are 9 MiB; at most 1 MiB can be saved.")
    (shown,) = list_saved_images(owner, job)
    assert not shown.environment.enabled and "at most 1 MiB" in problem_of(shown)
    late = do_save_environment_of(owner, job, **WORDS)
    SavedImage.objects.filter(pk=late.pk).update(requested_at=timezone.now() - dt.timedelta(hours=1))
    late.refresh_from_db()
    assert images_to_save(dataset["node"]) == [] and "did not answer in time" in problem_of(late)
    assert save(dataset).environment.name == WORDS["name"]


def test_a_deleted_one_holds_waiting_jobs_and_lets_the_image_go(dataset) -> None:
    environment = save(dataset).environment
    job = factories.job(dataset["owner"], dataset["project"], environment)
    do_delete_saved_environment(dataset["owner"], environment)
    job.refresh_from_db()
    assert job.held and IMAGE not in protected_images(dataset["node"].pk)
    assert list(list_saved_images(dataset["owner"], dataset["job"])) == []
    assert not Environment.objects.filter(name=WORDS["name"]).exists()
    assert save(dataset).environment.name == WORDS["name"]
