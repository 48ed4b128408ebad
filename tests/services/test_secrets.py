"""Secrets: who writes and uses them, and that the value is nowhere but in a start."""

from __future__ import annotations

import json

import pytest

from portal.access import visible_secrets
from portal.errors import Invalid, NotAllowed, NotThere
from portal.models import AuditEntry, Membership, Secret
from portal.services.jobs import request_of
from portal.services.secrets import NotGiven, do_remove_secret, do_save_secret, secrets_of
from scheduler.mounts import Folders
from scheduler.start_spec import Part, start_spec
from tests import record

pytestmark = pytest.mark.django_db(transaction=True)
VALUE = "it's a\n'quoted' $(value) \\ of \"mine\""


@pytest.fixture
def scene():
    made = record.scene()
    made["manager"] = record.person()
    Membership.objects.create(project=made["project"], user=made["manager"], role="manager")
    return made


def job_with(scene, *secrets):
    return record.job(scene["owner"], scene["project"], scene["environment"], secrets=secrets)


def test_a_value_goes_in_and_is_never_shown(scene) -> None:
    owner, manager, project = scene["owner"], scene["manager"], scene["project"]
    do_save_secret(owner, owner, "hub", VALUE)
    do_save_secret(manager, project, "hub", "the project's")
    with pytest.raises(NotAllowed):
        do_save_secret(owner, project, "hub", "mine")
    with pytest.raises(NotThere):
        do_save_secret(manager, owner, "hub", "mine")
    for name, value in (("Hub", "x"), ("hub", ""), ("hub", "x" * 20_000), ("hub", "a\0b")):
        with pytest.raises(Invalid):
            do_save_secret(owner, owner, name, value)
    assert set(visible_secrets(owner).values_list("project", flat=True)) == {None, project.pk}
    assert [row.project for row in visible_secrets(manager)] == [project]
    assert not visible_secrets(record.person()).exists()
    assert not visible_secrets(record.person(admin=True)).filter(owner=owner).exists()
    told = json.dumps(list(AuditEntry.objects.values("before", "after", "object_name")))
    sealed = "".join(Secret.objects.values_list("sealed", flat=True))
    assert AuditEntry.objects.filter(act="secret.create").count() == 2
    assert "quoted" not in told + sealed and "the project's" not in told + sealed
    do_remove_secret(owner, owner, "hub")
    assert Secret.objects.get().project == project


def test_a_job_gets_its_secrets_while_its_owner_may_have_them(scene) -> None:
    owner, manager, project = scene["owner"], scene["manager"], scene["project"]
    do_save_secret(owner, owner, "hub", VALUE)
    do_save_secret(manager, project, "key", "the project's")
    wanted = [
        {"secret": "hub", "variable": "HUB_TOKEN"},
        {"secret": "key", "of": "project", "file": "key.pem"},
    ]
    job = job_with(scene, *wanted)
    assert [dict(each) for each in request_of(job).secrets] == job.secrets
    assert secrets_of(job) == ({"key.pem": "the project's"}, {"HUB_TOKEN": VALUE})
    with pytest.raises(Invalid, match="has no secret called key"):
        job_with(scene, {"secret": "key", "variable": "A"})
    with pytest.raises(Invalid, match="Two secrets would be the variable A"):
        job_with(scene, *({"secret": "hub", "variable": "A"} for _ in range(2)))
    with pytest.raises(Invalid, match="CUDA_VISIBLE_DEVICES is set by Fairway"):
        job_with(scene, {"secret": "hub", "variable": "CUDA_VISIBLE_DEVICES"})
    with pytest.raises(Invalid, match="token is Fairway's own file"):
        job_with(scene, {"secret": "hub", "file": "token"})
    do_save_secret(manager, project, "key", "another")
    assert secrets_of(job).files == {"key.pem": "another"}
    Membership.objects.filter(user=owner).delete()
    with pytest.raises(NotGiven, match="may not run jobs"):
        secrets_of(job)
    Membership.objects.create(project=project, user=owner, role="member")
    Secret.objects.filter(name="hub").update(sealed=Secret.objects.get(name="key").sealed)
    with pytest.raises(NotGiven, match="cannot be opened"):
        secrets_of(job)
    do_remove_secret(manager, project, "key")
    with pytest.raises(NotGiven, match=r"no secret called key|cannot be opened"):
        secrets_of(job)


def test_the_digest_on_a_label_tells_nothing_of_a_value(scene) -> None:
    job, given = job_with(scene), secrets_of(job_with(scene))
    specs = [
        start_spec("lab", job, Part(1, 0, ()), scene["node"], Folders(), "", given._replace(**more))
        for more in (
            {"variables": {"A": "1"}, "files": {"f": "1"}},
            {"variables": {"A": "2"}, "files": {"f": "2"}},
            {"variables": {"B": "1"}, "files": {"f": "1"}},
        )
    ]
    assert specs[0]["digest"] == specs[1]["digest"] != specs[2]["digest"]
