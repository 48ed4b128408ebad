"""Suspended jobs: their GPUs go back on proof only, and the same job runs again as a new attempt."""

from __future__ import annotations

import pytest

from portal.domain.reasons import EndReason
from portal.domain.states import AttemptState, JobState
from portal.errors import Conflict
from portal.models import AuditEntry, Job
from portal.services.jobs.submission import do_cancel_job, do_resume_job, do_suspend_job
from portal.services.lifecycle import job_control
from tests import factories
from tests.services.test_lifecycle import place, run, used

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def scene():
    return factories.basic_cluster()


@pytest.fixture
def lab(scene):
    """A workspace that runs on one GPU, with the row of its only task."""
    job = factories.job(scene["owner"], scene["project"], scene["environment"], kind="workspace")
    return job, run(place(scene, job))[0]


def now(job: Job) -> Job:
    return Job.objects.get(pk=job.pk)


def let_go(task: int) -> None:
    job_control.record_task_ended(task, exit_code=143, reason=EndReason.EXIT_CODE)


def test_a_suspended_workspace_keeps_its_gpu_until_the_node_lets_go_and_runs_again(scene, lab) -> None:
    job, task = lab
    do_suspend_job(scene["owner"], job)
    do_suspend_job(scene["owner"], job)
    assert (now(job).state, used(scene)[0]) == (JobState.RUNNING, 1000)  # I6: nothing is free without proof
    let_go(task)
    assert (now(job).state, used(scene)) == (JobState.SUSPENDED, [0, 0, 0, 0])
    assert now(job).attempts.get().state == AttemptState.SUSPENDED
    do_resume_job(scene["owner"], now(job))
    again = now(job)
    assert (again.state, again.desired_state, again.submitted_at) == (
        JobState.PENDING,
        "run",
        job.submitted_at,
    )
    run(place(scene, again))
    assert now(job).attempt_count == 2 and used(scene)[0] == 1000
    with pytest.raises(Conflict):
        do_resume_job(scene["owner"], now(job))


def test_who_resumes_before_the_node_let_go_waits_as_soon_as_it_has(scene, lab) -> None:
    job, task = lab
    do_suspend_job(scene["owner"], job)
    do_resume_job(scene["owner"], now(job))
    assert (now(job).state, used(scene)[0]) == (JobState.RUNNING, 1000)
    let_go(task)
    assert now(job).state == JobState.PENDING
    assert now(job).message.endswith("It is pending again.")


def test_suspending_and_another_end_cross_cleanly(scene, lab) -> None:
    job, task = lab
    attempt = job.attempts.get()
    job_control.request_stop(attempt.pk, EndReason.PREEMPTED)
    do_suspend_job(scene["owner"], job)  # it was to wait again: now by hand
    let_go(task)
    assert (now(job).state, "pending again" in now(job).message) == (JobState.SUSPENDED, False)
    do_cancel_job(scene["owner"], now(job))
    assert now(job).state == JobState.CANCELLED
    with pytest.raises(Conflict):
        do_suspend_job(scene["owner"], now(job))


@pytest.mark.parametrize(("retry", "state"), [(True, JobState.SUSPENDED), (False, JobState.FAILED)])
def test_who_would_be_tried_again_after_a_failure_of_its_own_is_suspended_instead(
    scene, retry, state
) -> None:
    job = factories.job(
        scene["owner"], scene["project"], scene["environment"], tasks=2, retry_on_failure=retry
    )
    first, second = run(place(scene, job))
    job_control.record_task_ended(first, exit_code=1, reason=EndReason.EXIT_CODE)  # the other follows
    if retry:
        do_suspend_job(scene["owner"], job)
    else:
        with pytest.raises(Conflict):
            do_suspend_job(scene["owner"], job)
    let_go(second)
    assert now(job).state == state


def test_what_is_about_to_end_for_good_is_not_suspended(scene, lab) -> None:
    job, task = lab
    job_control.request_stop(job.attempts.get().pk, EndReason.TIME_LIMIT)
    with pytest.raises(Conflict):
        do_suspend_job(scene["owner"], job)
    let_go(task)
    assert now(job).state == JobState.TIMEOUT


def test_who_waits_is_suspended_at_once_and_a_manager_leaves_an_audit_row(scene) -> None:
    manager = factories.user()
    scene["project"].memberships.create(user=manager, role="manager")
    job = factories.job(scene["owner"], scene["project"], scene["environment"])
    assert do_suspend_job(manager, job).state == JobState.SUSPENDED
    with pytest.raises(Conflict):
        place(scene, job)  # the engine had decided on an earlier look
    assert list(AuditEntry.objects.values_list("action", "actor_name")) == [("job.suspend", manager.username)]
    scene["project"].memberships.filter(user=scene["owner"]).delete()
    with pytest.raises(Conflict, match="may no longer run jobs"):
        do_resume_job(manager, now(job))
