"""Submitting: what is refused, with the reason and the nearest request that would work."""

from __future__ import annotations

import pytest

from portal.errors import Conflict, Impossible, Invalid, NotAllowed, NotThere
from portal.models import Outbox, Quota
from portal.services.jobs import do_cancel_job, do_start_again
from tests import record

pytestmark = pytest.mark.django_db


@pytest.fixture
def scene():
    pool = record.pool("main")
    owner = record.person("ada")
    for name in ("n1", "n2"):
        record.node(pool, name=name)
    project = record.project("nlp", member=owner)
    return {"pool": pool, "owner": owner, "project": project, "environment": record.environment()}


def submit(scene, user=None, **fields):
    return record.job(user or scene["owner"], scene["project"], scene["environment"], **fields)


def test_a_submitted_job_waits_and_wakes_the_engine(scene):
    job = submit(scene, gpus_per_task=3)
    assert (job.state, job.total_milli) == ("PENDING", 3000)
    assert job.events.get().sentence == "Submitted by ada."
    assert Outbox.objects.filter(name="scheduler.cycle").exists()


def test_eight_gpus_on_two_nodes_may_wait_and_nine_never_fit(scene):
    assert submit(scene, tasks=2, gpus_per_task=4).state == "PENDING"
    with pytest.raises(Impossible) as refusal:
        submit(scene, gpus_per_task=9)
    assert refusal.value.code == "never"
    assert refusal.value.facts["largest_node_gpus"] == 4
    assert refusal.value.facts["nearest"] == {"tasks": 1, "gpus_per_task": 4}
    with pytest.raises(Impossible) as refusal:
        submit(scene, tasks=9)
    assert refusal.value.facts["nearest"] == {"tasks": 8, "gpus_per_task": 1}


def test_a_limit_of_an_ancestor_is_named(scene):
    parent = record.project("language")
    scene["project"].parent = parent
    scene["project"].save()
    Quota.objects.create(project=parent, pool=scene["pool"], limit_milli=2000)
    with pytest.raises(Impossible) as refusal:
        submit(scene, gpus_per_task=3)
    assert "limit of language in main is 2" in refusal.value.sentence
    assert submit(scene, gpus_per_task=2).state == "PENDING"


def test_other_model_and_memory(scene):
    with pytest.raises(Impossible, match="Models here: Test 80"):
        submit(scene, gpu_model="H200")
    with pytest.raises(Impossible, match=r"64 GiB of memory; the largest node has 62\.5 GiB"):
        submit(scene, memory_mib=65_536)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"name": ""}, "name"),
        ({"name": "a\nb"}, "name"),
        ({"tasks": 0}, "tasks"),
        ({"tasks": -3}, "tasks"),
        ({"gpus_per_task": 65}, "gpus_per_task"),
        ({"milli_per_gpu": 0}, "milli_per_gpu"),
        ({"milli_per_gpu": 500, "gpus_per_task": 2}, "milli_per_gpu"),
        ({"memory_mib": 1}, "memory_mib"),
        ({"command": []}, "command"),
        ({"command": ["a\0b"]}, "command"),
        ({"command": ["x" * 70_000]}, "command"),
        ({"environ": {"LD_PRELOAD": "x"}}, "environ"),
        ({"environ": {"CUDA_VISIBLE_DEVICES": "0"}}, "environ"),
        ({"environ": {"1A": "x"}}, "environ"),
        ({"time_limit_s": 0}, "time_limit_s"),
        ({"kind": "party"}, "kind"),
        ({"kind": "workspace", "tasks": 2}, "tasks"),
        ({"priority": -101}, "priority"),
    ],
)
def test_nonsense_is_refused_by_field(scene, fields, named):
    with pytest.raises(Invalid) as refusal:
        submit(scene, **fields)
    assert named in refusal.value.fields


def test_strangers_do_not_learn_that_the_project_exists(scene):
    with pytest.raises(NotThere):
        submit(scene, user=record.person())
    viewer = record.person()
    scene["project"].memberships.create(user=viewer, role="viewer")
    with pytest.raises(NotAllowed):
        submit(scene, user=viewer)
    with pytest.raises(NotAllowed, match="priority"):
        submit(scene, priority=5)


def test_cancel_by_others(scene):
    job = submit(scene)
    other = record.person()
    with pytest.raises(NotThere):
        do_cancel_job(other, job)
    scene["project"].memberships.create(user=other, role="member")
    with pytest.raises(NotAllowed):
        do_cancel_job(other, job)
    assert do_cancel_job(scene["owner"], job).state == "CANCELLED"


def test_start_again_makes_the_same_request(scene):
    job = submit(scene, gpus_per_task=2, environ={"A": "1"})
    with pytest.raises(Conflict):
        do_start_again(scene["owner"], job)
    do_cancel_job(scene["owner"], job)
    job.refresh_from_db()
    again = do_start_again(scene["owner"], job)
    assert (again.gpus_per_task, again.environ, again.state) == (2, {"A": "1"}, "PENDING")
    assert again.pk != job.pk


def test_one_account_for_all_is_for_one_person_alone(scene):
    """Without root the runtime process cannot keep people apart."""
    admin = record.person(admin=True)
    node = record.node(scene["pool"], runtime="process", hello={"separates_people": False})
    process = record.environment(runtime="process", prefix="/usr")
    assert record.job(admin, scene["project"], process).state == "PENDING"
    with pytest.raises(NotAllowed, match="one account"):
        record.job(scene["owner"], scene["project"], process)
    record.person(password=record.PASSWORD)
    with pytest.raises(NotAllowed, match="second person"):
        record.job(admin, scene["project"], process)
    node.hello = {"separates_people": True}
    node.save()
    assert record.job(scene["owner"], scene["project"], process).state == "PENDING"
