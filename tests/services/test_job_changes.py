"""Changing, ordering and moving waiting jobs: what is allowed, what is recorded, and what is refused."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from portal.errors import Conflict, Forbidden, InvalidRequest, NotFound, Unsatisfiable
from portal.models import AuditEntry, Job, OutboxMessage, Quota, User
from portal.services.jobs.bulk import BulkResult, advance_bulk, bulk_results, check_bulk, start_bulk
from portal.services.jobs.changes import do_change_job
from portal.services.jobs.queue_order import do_move_job
from portal.services.jobs.submission import do_cancel_job, do_hold_job
from tests import factories
from tests.api.fixture_data import running

pytestmark = pytest.mark.django_db


@pytest.fixture
def world():
    pool = factories.pool("main")
    owner, manager, admin = factories.user("ada"), factories.user("max"), factories.user("root", admin=True)
    node = factories.node(pool, gpus=4, name="n1")
    project = factories.project("nlp", member=owner, manager=manager)
    return SimpleNamespace(
        pool=pool, owner=owner, manager=manager, admin=admin, node=node, project=project,
        environment=factories.environment("batch", tool=False),
    )  # fmt: skip


def submit(world, name="train", owner=None, project=None, **fields) -> Job:
    return factories.job(
        owner or world.owner, project or world.project, world.environment, name=name, **fields
    )


def test_a_change_is_recorded_with_the_old_value(world):
    first, job = submit(world, "first"), submit(world, "second", gpus_per_task=4)
    OutboxMessage.objects.all().delete()
    changes = {"gpus_per_task": 2, "time_limit_s": 3600, "dependencies": (first,)}
    changed = do_change_job(world.owner, job, changes, version=job.version)
    assert (changed.gpus_per_task, changed.time_limit_s, changed.version) == (2, 3600, job.version + 1)
    assert [row.depends_on for row in changed.dependencies.all()] == [first]
    event = changed.events.get(kind="changed")
    assert event.message == (
        "Changed by ada: GPUs per task from 4 to 2, time limit from none to 1 h, dependencies from none to "
        f"{first.public_id}."
    )
    entry = AuditEntry.objects.get(action="job.change")
    assert entry.before == {"gpus_per_task": 4, "time_limit_s": None, "dependencies": []}
    assert entry.after == {"gpus_per_task": 2, "time_limit_s": 3600, "dependencies": [first.public_id]}
    assert OutboxMessage.objects.filter(name="scheduler.cycle").exists()
    assert do_change_job(world.owner, changed, {"gpus_per_task": 2}).version == changed.version
    assert not do_change_job(world.owner, changed, {"dependencies": ()}).dependencies.exists()


def test_a_change_is_recorded_with_units(world):
    job = submit(world, gpus_per_task=2, cpu_milli=2000, memory_mib=4096)
    changes = {"gpu_model": "Test 80", "cpu_milli": 500, "memory_mib": 1536, "preemptible": False}
    message = do_change_job(world.owner, job, changes).events.get(kind="changed").message
    assert message == (
        "Changed by ada: GPU model from none to Test 80, CPU from 2 cores to 0.5 core, memory from 4 GiB to 1.5 GiB, "
        "preemptible from yes to no."
    )


def test_requests_impossible_in_this_cluster_are_refused(world):
    job = submit(world)
    with pytest.raises(Unsatisfiable):
        do_change_job(world.owner, job, {"gpus_per_task": 5})
    with pytest.raises(InvalidRequest) as wrong:
        do_change_job(world.owner, job, {"time_limit_s": 0, "min_tasks": 3})
    assert set(wrong.value.fields) == {"time_limit_s", "min_tasks"}
    later = submit(world, "later")
    with pytest.raises(InvalidRequest) as wrong:
        do_change_job(world.owner, job, {"dependencies": (later,)})
    assert "not older" in wrong.value.fields["dependencies"]
    assert Job.objects.get(pk=job.pk).version == job.version


def test_a_dependency_that_failed_can_be_ignored_and_not_required_again(world):
    first = submit(world, "first")
    job = submit(world, "second", dependencies=(first,), ignore_dependency_failure=True)
    do_cancel_job(world.owner, first)
    with pytest.raises(InvalidRequest) as wrong:
        do_change_job(world.owner, job, {"ignore_dependency_failure": False})
    assert "was cancelled and can never complete" in wrong.value.fields["dependencies"]
    assert not do_change_job(world.owner, job, {"dependencies": ()}).dependencies.exists()


def test_a_job_that_is_not_visible_cannot_be_a_dependency(world):
    foreign = submit(
        world, "foreign", owner=world.manager, project=factories.project("law", manager=world.manager)
    )
    job = submit(world)
    for user in (world.owner, world.manager):  # nor one that the owner may not see
        with pytest.raises(InvalidRequest):
            do_change_job(user, job, {"dependencies": (foreign,)})


def test_a_job_that_started_or_was_changed_meanwhile_is_left_as_it_is(world):
    job = submit(world)
    do_change_job(world.owner, job, {"time_limit_s": 60})
    with pytest.raises(Conflict) as refused:
        do_change_job(world.owner, Job.objects.get(pk=job.pk), {"time_limit_s": 90}, version=job.version)
    assert refused.value.code == "job_changed"
    seen = Job.objects.get(pk=job.pk)
    running(seen, world.node)
    with pytest.raises(Conflict) as refused:  # the page still shows it as waiting
        do_change_job(world.owner, seen, {"time_limit_s": 90}, version=seen.version)
    assert refused.value.message == "Not changed. It has started; only a waiting job can be changed."
    assert Job.objects.get(pk=job.pk).time_limit_s == 60


def test_a_job_that_has_run_keeps_its_gpu_request(world):
    job = submit(world)
    Job.objects.filter(pk=job.pk).update(attempt_count=1)
    job.refresh_from_db()
    with pytest.raises(Conflict) as refused:
        do_change_job(world.owner, job, {"gpus_per_task": 2})
    assert "It has already run, so its GPUs per task cannot be changed" in refused.value.message
    assert do_change_job(world.owner, job, {"priority": -1}).priority == -1


def test_changes_need_control_of_the_job_and_a_higher_priority_a_manager(world):
    other = factories.user("eve")
    world.project.memberships.create(user=other, role="member")
    job = submit(world)
    with pytest.raises(Forbidden):
        do_change_job(other, job, {"time_limit_s": 60})
    with pytest.raises(Forbidden) as refused:
        do_change_job(world.owner, job, {"priority": 1})
    assert refused.value.code == "priority_not_allowed"
    job = do_change_job(world.manager, job, {"priority": 1})
    assert do_change_job(world.owner, job, {"time_limit_s": 60}).priority == 1


def test_a_job_moves_to_a_project_of_its_owner(world):
    other = factories.project("bio", member=world.owner)
    foreign = factories.project("law", member=world.manager)
    job = submit(world)
    Quota.objects.create(project=other, pool=world.pool, limit_milli=500)
    with pytest.raises(Unsatisfiable):
        do_change_job(world.owner, job, {"project": other})
    Quota.objects.update(limit_milli=None)
    with pytest.raises(NotFound):
        do_change_job(world.owner, job, {"project": foreign})
    with pytest.raises(Conflict) as refused:
        do_change_job(world.manager, job, {"project": foreign})
    assert refused.value.message == "ada may not run jobs in law."
    assert do_change_job(world.owner, job, {"project": other}).project == other


# -- order -----------------------------------------------------------------------------------------


def ranked(world) -> list[str]:
    return list(
        Job.objects.filter(owner=world.owner).order_by("queue_rank", "pk").values_list("name", flat=True)
    )


def test_an_owner_orders_their_waiting_jobs(world):
    jobs = {name: submit(world, name) for name in "abcd"}
    do_move_job(world.owner, jobs["c"], "up")
    assert ranked(world) == ["a", "c", "b", "d"]
    do_move_job(world.owner, Job.objects.get(name="c"), "up")
    do_move_job(world.owner, Job.objects.get(name="a"), "down")
    assert ranked(world) == ["c", "b", "a", "d"]
    assert submit(world, "e") and ranked(world)[-1] == "e"
    with pytest.raises(Conflict) as refused:
        do_move_job(world.owner, Job.objects.get(name="c"), "up")
    assert refused.value.message == "It is the first of your waiting jobs with priority 0."
    assert jobs["c"].events.filter(kind="moved").count() == 2
    assert AuditEntry.objects.filter(action="job.move").count() == 3


def test_jobs_of_others_cannot_be_reordered(world):
    job = submit(world)
    with pytest.raises(Forbidden):
        do_move_job(world.manager, job, "up")
    running(job, world.node)
    with pytest.raises(Conflict) as refused:
        do_move_job(world.owner, Job.objects.get(pk=job.pk), "up")
    assert "It has started" in refused.value.message


def test_an_administrator_moves_a_job_to_the_front_of_its_project(world):
    submit(world, "high", owner=world.manager, priority=7)
    submit(
        world,
        "elsewhere",
        owner=world.manager,
        project=factories.project("x", manager=world.manager),
        priority=50,
    )
    job = submit(world)
    with pytest.raises(Forbidden):
        do_move_job(world.manager, job, "front")
    assert do_move_job(world.admin, job, "front").priority == 8
    with pytest.raises(Conflict) as refused:
        do_move_job(world.admin, Job.objects.get(pk=job.pk), "front")
    assert refused.value.message == "It is already at the front of its project."


# -- several at once -------------------------------------------------------------------------------


def change(user: User, jobs: list[Job], action: str, value: object = None) -> list[BulkResult]:
    return bulk_results(advance_bulk(start_bulk(user, jobs, action, value), 60))


def refusals(results) -> dict[str, str]:
    return {each.job.name: each.refusal for each in results}


def test_each_of_several_jobs_is_changed_or_refused_with_a_reason(world):
    waits, runs = submit(world, "waits"), running(submit(world, "runs"), world.node)
    ended = do_cancel_job(world.owner, submit(world, "ended"))
    held = do_hold_job(world.owner, submit(world, "held"), held=True)
    theirs = submit(world, "theirs", owner=world.manager)
    jobs = [waits, runs, ended, held, theirs]
    denied = "Only its owner and managers of its project may change it."
    assert refusals(check_bulk(world.owner, jobs, "stop")) == {
        "waits": "", "runs": "", "ended": "It has ended or is stopping.", "held": "", "theirs": denied,
    }  # fmt: skip
    assert refusals(change(world.owner, jobs, "hold"))["held"] == "It is held already."
    assert Job.objects.get(pk=waits.pk).held and not Job.objects.get(pk=theirs.pk).held
    changed = refusals(change(world.manager, [Job.objects.get(pk=job.pk) for job in jobs], "priority", 3))
    assert changed["runs"].startswith("It has started") and changed["waits"] == changed["theirs"] == ""
    assert Job.objects.get(pk=theirs.pk).priority == 3


def test_requeue_submits_an_ended_job_again_and_returns_a_running_one_to_the_queue(world):
    runs = running(submit(world, "runs"), world.node)
    ended = do_cancel_job(world.owner, submit(world, "ended"))
    again, stopping = change(world.owner, [ended, runs], "requeue")
    assert again.job.pk != ended.pk and again.job.state == "PENDING"
    runs.refresh_from_db()
    assert not stopping.refusal and runs.desired_state == "run"
    assert runs.attempts.get().stop_requested_at is not None
