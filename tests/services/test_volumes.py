"""Volumes: who declares and names them, where their jobs can run, and what a node is told of each kind."""

from __future__ import annotations

import pytest

from portal.domain.storage.volumes import FIRST_PROJECT_GID, VolumeKind, VolumeScope
from portal.errors import Conflict, Forbidden, InvalidRequest
from portal.models import AuditEntry, Volume
from portal.services.jobs.submission import (
    JobRequest,
    do_cancel_job,
    do_submit_job,
    request_from_job,
    validate_request,
)
from portal.services.storage.volumes import VolumeInput, do_delete_volume, do_save_volume
from scheduler.cycle import run_cycle
from scheduler.nodes.task_spec import VolumeNotAllowedError, build_mounts, is_basic_mount, read_job_volumes
from scheduler.snapshot.decision_input import take_snapshot
from tests import factories

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def dataset():
    factories.cluster_settings()
    made = factories.basic_cluster() | {"admin": factories.user(admin=True)}
    made["other"] = factories.node(made["pool"], gpus=4)
    return made


def asked(dataset, *volumes, **more) -> JobRequest:
    fields = {"name": "reads", "command": ["true"], "volumes": volumes, **more}
    return JobRequest(project=dataset["project"], environment=dataset["environment"], **fields)


def fault(dataset, *volumes, **more) -> str:
    with pytest.raises(InvalidRequest) as refused:
        validate_request(dataset["owner"], asked(dataset, *volumes, **more))
    return refused.value.fields["volumes"]


def test_only_administrators_declare_volumes_and_errors_are_by_field(dataset) -> None:
    words = VolumeInput("sets", VolumeKind.HOST_PATH, path="/data/sets", read_only=True)
    with pytest.raises(Forbidden):
        do_save_volume(dataset["owner"], words)
    row = do_save_volume(dataset["admin"], words, reason="for all")
    assert row.read_only and AuditEntry.objects.get(action="volume.save").after["path"] == "/data/sets"
    wrong = {
        "name": VolumeInput("Not A Name", VolumeKind.HOST_PATH, path="/x"),
        "path": VolumeInput("x", VolumeKind.HOST_PATH, path="/data/../etc"),
        "reach": VolumeInput("x", VolumeKind.NFS, path="/net/x"),
        "quota_mib": VolumeInput("x", VolumeKind.HOST_PATH, path="/x", quota_mib=5),
        "read_only": VolumeInput("x", VolumeKind.SCRATCH, read_only=True),
        "kind": VolumeInput("x", VolumeKind.HOME, nodes=[dataset["node"]]),
    }
    for field, nonsense in wrong.items():
        with pytest.raises(InvalidRequest) as refused:
            do_save_volume(dataset["admin"], nonsense)
        assert list(refused.value.fields) == [field]
    with pytest.raises(InvalidRequest, match="already a volume called sets"):
        do_save_volume(dataset["admin"], words)


def test_a_job_may_mount_only_volumes_of_its_project(dataset) -> None:
    admin, elsewhere = dataset["admin"], factories.project()
    do_save_volume(admin, VolumeInput("sets", VolumeKind.HOST_PATH, path="/data/sets", read_only=True))
    closed = do_save_volume(
        admin, VolumeInput("closed", VolumeKind.HOST_PATH, path="/c", projects=[elsewhere])
    )
    home = f"/home/{dataset['owner'].username}"
    assert "no volume nowhere" in fault(dataset, {"volume": "nowhere"})
    assert "may not use it" in fault(dataset, {"volume": "closed"})
    assert "is inside the home" in fault(dataset, {"volume": "sets", "target": f"{home}/sets"})
    assert "have the mount path /a" in fault(
        dataset, {"volume": "sets", "target": "/a"}, {"volume": "sets", "target": "/a"}
    )
    assert "at most 32" in fault(dataset, *({"volume": "sets", "target": f"/volumes/{n}"} for n in range(33)))
    job = do_submit_job(dataset["owner"], asked(dataset, {"volume": "sets"}))
    kept = [{"volume": "sets", "target": "/volumes/sets", "read_only": False}]
    assert job.volumes == kept and list(request_from_job(job).volumes) == kept
    row = Volume.objects.get(name="sets")
    with pytest.raises(Conflict, match="1 unfinished job uses it"):
        do_delete_volume(admin, row)
    Volume.objects.filter(pk=closed.pk).delete()
    row.projects.add(elsewhere)
    with pytest.raises(VolumeNotAllowedError, match="may not use it"):
        read_job_volumes(job)
    do_cancel_job(dataset["owner"], job)
    do_delete_volume(admin, row)
    assert not Volume.objects.filter(owner=None).exists()


def test_a_job_runs_only_where_its_volumes_are(dataset) -> None:
    admin, here, there = dataset["admin"], dataset["node"], dataset["other"]
    one = VolumeInput("one", VolumeKind.HOST_PATH, path="/one", nodes=[here])
    row = do_save_volume(admin, one)
    do_save_volume(admin, VolumeInput("two", VolumeKind.HOST_PATH, path="/two", nodes=[there]))
    do_save_volume(admin, VolumeInput("all", VolumeKind.HOST_PATH, path="/all", pool=dataset["pool"]))
    assert fault(dataset, {"volume": "one"}, {"volume": "two"}) == "No node has all of one, two."
    assert fault(dataset, {"volume": "one"}, pool=factories.pool("far")).startswith("No node of far has one")
    job = do_submit_job(dataset["owner"], asked(dataset, {"volume": "one"}, {"volume": "all"}))
    free = do_submit_job(dataset["owner"], asked(dataset))
    pending = {each.job: each for each in take_snapshot(factories.cluster_settings()).snapshot.pending}
    assert pending[job.public_id].ineligible_nodes == (there.public_id,)
    assert pending[free.public_id].ineligible_nodes == ()
    do_save_volume(admin, VolumeInput("one", VolumeKind.HOST_PATH, path="/one", nodes=[there]), row)
    assert run_cycle("test", "me") is not None
    assert {task.node for task in job.attempts.get().task_rows.all()} == {there}


def test_mounts_sent_to_a_node_for_each_kind(dataset) -> None:
    admin, job, node = (
        dataset["admin"],
        factories.job(dataset["owner"], dataset["project"], dataset["environment"]),
        dataset["node"],
    )
    for words in (
        VolumeInput("sets", VolumeKind.HOST_PATH, path="/sets", read_only=True),
        VolumeInput("net", VolumeKind.NFS, VolumeScope.SHARED, path="/net/lab"),
        VolumeInput("team", VolumeKind.PROJECT, path="/teams", quota_mib=2048),
        VolumeInput("fast", VolumeKind.SCRATCH, quota_mib=1024),
        VolumeInput("home", VolumeKind.HOME, quota_mib=512),
    ):
        do_save_volume(admin, words)
    names = ("sets", "net", "team", "fast")
    job.volumes = [
        {"volume": name, "target": f"/volumes/{name}", "read_only": name == "net"} for name in names
    ]
    reported, workdir = build_mounts(job, read_job_volumes(job), node)
    by = {mount["target"].rpartition("/")[2]: mount for mount in reported}
    user = dataset["owner"].username
    plain = {"kind": "host_path", "target": "/volumes/sets", "source": "/sets", "read_only": True}
    assert by["sets"] == plain and is_basic_mount(plain) and not is_basic_mount(by["fast"])
    assert (by["net"]["filesystem"], by["net"]["read_only"]) == ("nfs", True)
    gid = FIRST_PROJECT_GID + dataset["project"].pk
    assert (by["team"]["folder"], by["team"]["gid"]) == (dataset["project"].public_id, gid)
    assert (by["fast"]["kind"], by["fast"]["quota_mib"], by[user]["quota_mib"]) == ("scratch", 1024, 512)
    assert (by[user]["kind"], workdir) == ("home", f"/home/{user}")
    homes = Volume.objects.get(name="home")
    shared = VolumeInput("home", VolumeKind.HOME, VolumeScope.SHARED, path="/net/homes")
    do_save_volume(admin, shared, homes)
    assert build_mounts(job, read_job_volumes(job), node)[0][0]["source"] == f"/net/homes/{user}"
    Volume.objects.create(name="home", kind="home", owner=dataset["owner"], node=node)
    assert build_mounts(job, read_job_volumes(job), node)[0][0]["kind"] == "home"
