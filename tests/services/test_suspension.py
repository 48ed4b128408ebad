"""Suspended jobs: their GPUs go back on proof only, and the same job runs again as a new attempt."""

from __future__ import annotations

import pytest

from portal.domain.jobs.reasons import EndReason
from portal.domain.states import AttemptState, JobState
from portal.errors import Conflict
from portal.models import AuditEntry, Job
from portal.services.jobs.submission import do_cancel_job, do_resume_job, do_suspend_job
from portal.services.lifecycle import job_control
from tests import factories
from tests.services.test_lifecycle import place, run, used

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def dataset():
    return factories.basic_cluster()


@pytest.fixture
def lab(dataset):
    """A workspace that runs on one GPU, with the row of its only task."""
    job = factories.job(dataset["owner"], dataset["project"], dataset["environment"], kind="workspace")
    return job, run(place(dataset, job))[0]


def now(job: Job) -> Job:
    return Job.objects.get(pk=job.pk)


def let_go(task: int) -> None:
    job_control.record_task_ended(task, exit_code=143, reason=EndReason.EXIT_CODE)


def test_a_suspended_workspace_holds_its_gpu_until_the_node_confirms_and_runs_again(dataset, lab) -> None:
    job, task = lab
    do_suspend_job(dataset["owner"], job)
    do_suspend_job(dataset["owner"], job)
    assert (now(job).state, used(dataset)[0]) == (JobState.RUNNING, 1000)  # I6: nothing is free without proof
    let_go(task)
    assert (now(job).state, used(dataset)) == (JobState.SUSPENDED, [0, 0, 0, 0])
    assert now(job).attempts.get().state == AttemptState.SUSPENDED
    do_resume_job(dataset["owner"], now(job))
    again = now(job)
    assert (again.state, again.desired_state, again.submitted_at) == (
        JobState.PENDING,
        "run",
        job.submitted_at,
    )
    run(place(dataset, again))
    assert now(job).attempt_count == 2 and used(dataset)[0] == 1000
    with pytest.raises(Conflict):
        do_resume_job(dataset["owner"], now(job))


def test_a_resume_before_the_node_confirms_waits_for_it(dataset, lab) -> None:
    job, task = lab
    do_suspend_job(dataset["owner"], job)
    do_resume_job(dataset["owner"], now(job))
    assert (now(job).state, used(dataset)[0]) == (JobState.RUNNING, 1000)
    let_go(task)
    assert now(job).state == JobState.PENDING
    assert now(job).message.endswith("It is pending again.")


def test_suspending_and_another_end_cross_cleanly(dataset, lab) -> None:
    job, task = lab
    attempt = job.attempts.get()
    job_control.request_stop(attempt.pk, EndReason.PREEMPTED)
    do_suspend_job(dataset["owner"], job)  # it was to wait again: now by hand
    let_go(task)
    assert (now(job).state, "pending again" in now(job).message) == (JobState.SUSPENDED, False)
    do_cancel_job(dataset["owner"], now(job))
    assert now(job).state == JobState.CANCELLED
    with pytest.raises(Conflict):
        do_suspend_job(dataset["owner"], now(job))


@pytest.mark.parametrize(("retry", "state"), [(True, JobState.SUSPENDED), (False, JobState.FAILED)])
def test_a_workspace_that_failed_is_suspended_instead_of_retried(dataset, retry, state) -> None:
    job = factories.job(
        dataset["owner"],
        dataset["project"],
        dataset["environment"],
        tasks=2,
        retry_on=["command_failure"] if retry else [],
    )
    first, second = run(place(dataset, job))
    job_control.record_task_ended(first, exit_code=1, reason=EndReason.EXIT_CODE)  # the other follows
    if retry:
        do_suspend_job(dataset["owner"], job)
    else:
        with pytest.raises(Conflict):
            do_suspend_job(dataset["owner"], job)
    let_go(second)
    assert now(job).state == state


def test_a_workspace_that_is_ending_is_not_suspended(dataset, lab) -> None:
    job, task = lab
    job_control.request_stop(job.attempts.get().pk, EndReason.TIME_LIMIT)
    with pytest.raises(Conflict):
        do_suspend_job(dataset["owner"], job)
    let_go(task)
    assert now(job).state == JobState.TIMEOUT


def test_a_waiting_workspace_is_suspended_at_once_and_audited(dataset) -> None:
    manager = factories.user()
    dataset["project"].memberships.create(user=manager, role="manager")
    job = factories.job(dataset["owner"], dataset["project"], dataset["environment"])
    assert do_suspend_job(manager, job).state == JobState.SUSPENDED
    with pytest.raises(Conflict):
        place(dataset, job)  # the engine had decided on an earlier look
    assert list(AuditEntry.objects.values_list("action", "actor_name")) == [("job.suspend", manager.username)]
    dataset["project"].memberships.filter(user=dataset["owner"]).delete()
    with pytest.raises(Conflict, match="may no longer run jobs"):
        do_resume_job(manager, now(job))
