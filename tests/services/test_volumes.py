"""Volumes: who declares and names them, where their jobs can run, and what a node is told of each kind."""

from __future__ import annotations

import pytest

from portal.errors import Conflict, Invalid, NotAllowed
from portal.models import AuditEntry, Volume
from portal.services.jobs import JobRequest, check_job, do_cancel_job, do_submit_job, request_of
from portal.services.volumes import VolumeWords, do_remove_volume, do_save_volume
from portal.words.volumes import FIRST_PROJECT_GID, Reach, VolumeKind
from scheduler.cycle import run_cycle
from scheduler.mounts import NotLent, folders_of, is_plain, mounts_of
from scheduler.snapshot import take_photo
from tests import record

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def scene():
    record.cluster()
    made = record.scene() | {"admin": record.person(admin=True)}
    made["other"] = record.node(made["pool"], gpus=4)
    return made


def asked(scene, *volumes, **more) -> JobRequest:
    fields = {"name": "reads", "command": ["true"], "volumes": volumes, **more}
    return JobRequest(project=scene["project"], environment=scene["environment"], **fields)


def fault(scene, *volumes, **more) -> str:
    with pytest.raises(Invalid) as refused:
        check_job(scene["owner"], asked(scene, *volumes, **more))
    return refused.value.fields["volumes"]


def test_only_admins_declare_and_what_cannot_be_is_named_by_field(scene) -> None:
    words = VolumeWords("sets", VolumeKind.DATASET, path="/data/sets")
    with pytest.raises(NotAllowed):
        do_save_volume(scene["owner"], words)
    row = do_save_volume(scene["admin"], words, reason="for all")
    assert row.read_only and AuditEntry.objects.get(act="volume.save").after["path"] == "/data/sets"
    wrong = {
        "name": VolumeWords("Not A Name", VolumeKind.PATH, path="/x"),
        "path": VolumeWords("x", VolumeKind.PATH, path="/data/../etc"),
        "reach": VolumeWords("x", VolumeKind.NFS, path="/net/x"),
        "quota_mib": VolumeWords("x", VolumeKind.PATH, path="/x", quota_mib=5),
        "read_only": VolumeWords("x", VolumeKind.SCRATCH, read_only=True),
        "kind": VolumeWords("x", VolumeKind.HOME, nodes=[scene["node"]]),
    }
    for field, nonsense in wrong.items():
        with pytest.raises(Invalid) as refused:
            do_save_volume(scene["admin"], nonsense)
        assert list(refused.value.fields) == [field]
    with pytest.raises(Invalid, match="already a volume called sets"):
        do_save_volume(scene["admin"], words)


def test_a_job_names_what_its_project_may_use(scene) -> None:
    admin, elsewhere = scene["admin"], record.project()
    do_save_volume(admin, VolumeWords("sets", VolumeKind.DATASET, path="/data/sets"))
    closed = do_save_volume(admin, VolumeWords("closed", VolumeKind.PATH, path="/c", projects=[elsewhere]))
    home = f"/home/{scene['owner'].username}"
    assert "no volume called nowhere" in fault(scene, {"volume": "nowhere"})
    assert "may not use it" in fault(scene, {"volume": "closed"})
    assert "is in the home" in fault(scene, {"volume": "sets", "target": f"{home}/sets"})
    assert "stand at /a" in fault(
        scene, {"volume": "sets", "target": "/a"}, {"volume": "sets", "target": "/a"}
    )
    assert "at most 32" in fault(scene, *({"volume": "sets", "target": f"/volumes/{n}"} for n in range(33)))
    job = do_submit_job(scene["owner"], asked(scene, {"volume": "sets"}))
    kept = [{"volume": "sets", "target": "/volumes/sets", "read_only": False}]
    assert job.volumes == kept and list(request_of(job).volumes) == kept
    row = Volume.objects.get(name="sets")
    with pytest.raises(Conflict, match="1 job that has not ended names it"):
        do_remove_volume(admin, row)
    Volume.objects.filter(pk=closed.pk).delete()
    row.projects.add(elsewhere)
    with pytest.raises(NotLent, match="may not use it"):
        folders_of(job)
    do_cancel_job(scene["owner"], job)
    do_remove_volume(admin, row)
    assert not Volume.objects.filter(owner=None).exists()


def test_a_job_runs_only_where_its_volumes_are(scene) -> None:
    admin, here, there = scene["admin"], scene["node"], scene["other"]
    one = VolumeWords("one", VolumeKind.PATH, path="/one", nodes=[here])
    row = do_save_volume(admin, one)
    do_save_volume(admin, VolumeWords("two", VolumeKind.PATH, path="/two", nodes=[there]))
    do_save_volume(admin, VolumeWords("all", VolumeKind.PATH, path="/all", pool=scene["pool"]))
    assert fault(scene, {"volume": "one"}, {"volume": "two"}) == "No node has all of one, two."
    assert fault(scene, {"volume": "one"}, pool=record.pool("far")).startswith("No node of far has one")
    job = do_submit_job(scene["owner"], asked(scene, {"volume": "one"}, {"volume": "all"}))
    free = do_submit_job(scene["owner"], asked(scene))
    pending = {each.job: each for each in take_photo(record.cluster()).snapshot.pending}
    assert pending[job.public_id].unfit_nodes == (there.public_id,)
    assert pending[free.public_id].unfit_nodes == ()
    do_save_volume(admin, VolumeWords("one", VolumeKind.PATH, path="/one", nodes=[there]), row)
    assert run_cycle("test", "me") is not None
    assert {task.node for task in job.attempts.get().task_rows.all()} == {there}


def test_what_a_node_is_told_of_each_kind(scene) -> None:
    admin, job, node = (
        scene["admin"],
        record.job(scene["owner"], scene["project"], scene["environment"]),
        scene["node"],
    )
    for words in (
        VolumeWords("sets", VolumeKind.DATASET, path="/sets"),
        VolumeWords("net", VolumeKind.NFS, Reach.SHARED, path="/net/lab"),
        VolumeWords("team", VolumeKind.PROJECT, path="/teams", quota_mib=2048),
        VolumeWords("fast", VolumeKind.SCRATCH, quota_mib=1024),
        VolumeWords("home", VolumeKind.HOME, quota_mib=512),
    ):
        do_save_volume(admin, words)
    names = ("sets", "net", "team", "fast")
    job.volumes = [
        {"volume": name, "target": f"/volumes/{name}", "read_only": name == "net"} for name in names
    ]
    told, workdir = mounts_of(job, folders_of(job), node)
    by = {mount["target"].rpartition("/")[2]: mount for mount in told}
    user = scene["owner"].username
    plain = {"kind": "path", "target": "/volumes/sets", "source": "/sets", "read_only": True}
    assert by["sets"] == plain and is_plain(plain) and not is_plain(by["fast"])
    assert (by["net"]["filesystem"], by["net"]["read_only"]) == ("nfs", True)
    gid = FIRST_PROJECT_GID + scene["project"].pk
    assert (by["team"]["folder"], by["team"]["gid"]) == (scene["project"].public_id, gid)
    assert (by["fast"]["kind"], by["fast"]["quota_mib"], by[user]["quota_mib"]) == ("scratch", 1024, 512)
    assert (by[user]["kind"], workdir) == ("home", f"/home/{user}")
    homes = Volume.objects.get(name="home")
    shared = VolumeWords("home", VolumeKind.HOME, Reach.SHARED, path="/net/homes")
    do_save_volume(admin, shared, homes)
    assert mounts_of(job, folders_of(job), node)[0][0]["source"] == f"/net/homes/{user}"
    Volume.objects.create(name="home", kind="home", owner=scene["owner"], node=node)
    assert mounts_of(job, folders_of(job), node)[0][0]["kind"] == "home"
