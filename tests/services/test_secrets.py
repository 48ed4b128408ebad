"""Secrets: who writes and uses them, and that the value is nowhere but in a start."""

from __future__ import annotations

import json

import pytest

from agents.launchers import GangShape, equal_members
from portal.access import visible_secrets
from portal.errors import Forbidden, InvalidRequest, NotFound
from portal.models import AuditEntry, Membership, Secret
from portal.services.jobs.submission import request_from_job
from portal.services.projects.secrets import (
    SecretMissingError,
    do_delete_secret,
    do_save_secret,
    read_job_secrets,
)
from scheduler.nodes.task_spec import JobVolumes, RankAssignment, build_task_spec
from tests import factories

pytestmark = pytest.mark.django_db(transaction=True)
VALUE = "it's a\n'quoted' $(value) \\ of \"mine\""


@pytest.fixture
def dataset():
    made = factories.basic_cluster()
    made["manager"] = factories.user()
    Membership.objects.create(project=made["project"], user=made["manager"], role="manager")
    return made


def job_with(dataset, *secrets):
    return factories.job(dataset["owner"], dataset["project"], dataset["environment"], secrets=secrets)


def test_a_value_can_be_set_and_is_never_shown(dataset) -> None:
    owner, manager, project = dataset["owner"], dataset["manager"], dataset["project"]
    do_save_secret(owner, owner, "hub", VALUE)
    do_save_secret(manager, project, "hub", "the project's")
    with pytest.raises(Forbidden):
        do_save_secret(owner, project, "hub", "mine")
    with pytest.raises(NotFound):
        do_save_secret(manager, owner, "hub", "mine")
    for name, value in (("Hub", "x"), ("hub", ""), ("hub", "x" * 20_000), ("hub", "a\0b")):
        with pytest.raises(InvalidRequest):
            do_save_secret(owner, owner, name, value)
    assert set(visible_secrets(owner).values_list("project", flat=True)) == {None, project.pk}
    assert [row.project for row in visible_secrets(manager)] == [project]
    assert not visible_secrets(factories.user()).exists()
    assert not visible_secrets(factories.user(admin=True)).filter(owner=owner).exists()
    reported = json.dumps(list(AuditEntry.objects.values("before", "after", "object_name")))
    sealed = "".join(Secret.objects.values_list("encrypted_value", flat=True))
    assert AuditEntry.objects.filter(action="secret.create").count() == 2
    assert "quoted" not in reported + sealed and "the project's" not in reported + sealed
    do_delete_secret(owner, owner, "hub")
    assert Secret.objects.get().project == project


def test_a_job_gets_its_secrets_while_its_owner_may_have_them(dataset) -> None:
    owner, manager, project = dataset["owner"], dataset["manager"], dataset["project"]
    do_save_secret(owner, owner, "hub", VALUE)
    do_save_secret(manager, project, "key", "the project's")
    wanted = [
        {"secret": "hub", "variable": "HUB_TOKEN"},
        {"secret": "key", "owner_type": "project", "file": "key.pem"},
    ]
    job = job_with(dataset, *wanted)
    assert [dict(each) for each in request_from_job(job).secrets] == job.secrets
    assert read_job_secrets(job) == ({"key.pem": "the project's"}, {"HUB_TOKEN": VALUE})
    with pytest.raises(InvalidRequest, match="has no secret called key"):
        job_with(dataset, {"secret": "key", "variable": "A"})
    with pytest.raises(InvalidRequest, match="Two secrets use the same variable A"):
        job_with(dataset, *({"secret": "hub", "variable": "A"} for _ in range(2)))
    with pytest.raises(InvalidRequest, match="CUDA_VISIBLE_DEVICES is set by Fairway"):
        job_with(dataset, {"secret": "hub", "variable": "CUDA_VISIBLE_DEVICES"})
    with pytest.raises(InvalidRequest, match="token is reserved by Fairway"):
        job_with(dataset, {"secret": "hub", "file": "token"})
    do_save_secret(manager, project, "key", "another")
    assert read_job_secrets(job).files == {"key.pem": "another"}
    Membership.objects.filter(user=owner).delete()
    with pytest.raises(SecretMissingError, match="may no longer run jobs"):
        read_job_secrets(job)
    Membership.objects.create(project=project, user=owner, role="member")
    Secret.objects.filter(name="hub").update(encrypted_value=Secret.objects.get(name="key").encrypted_value)
    with pytest.raises(SecretMissingError, match="cannot be decrypted"):
        read_job_secrets(job)
    do_delete_secret(manager, project, "key")
    with pytest.raises(SecretMissingError, match=r"no secret called key|cannot be decrypted"):
        read_job_secrets(job)


def test_the_digest_on_a_label_does_not_reveal_the_value(dataset) -> None:
    job, given = job_with(dataset), read_job_secrets(job_with(dataset))
    assignment = RankAssignment(1, 0, (), GangShape(equal_members(1, 0)))
    specs = [
        build_task_spec("lab", job, assignment, dataset["node"], JobVolumes(), "", given._replace(**more))
        for more in (
            {"variables": {"A": "1"}, "files": {"f": "1"}},
            {"variables": {"A": "2"}, "files": {"f": "2"}},
            {"variables": {"B": "1"}, "files": {"f": "1"}},
        )
    ]
    assert specs[0]["digest"] == specs[1]["digest"] != specs[2]["digest"]
