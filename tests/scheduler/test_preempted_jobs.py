"""A place that somebody was asked to leave goes to the job for which they left, whoever else has come."""

from __future__ import annotations

import pytest

from portal.domain.jobs.reasons import EndReason
from portal.models import Attempt, Job, Quota
from portal.services.jobs.submission import do_cancel_job, do_hold_job
from portal.services.lifecycle import job_control
from scheduler.cycle import run_cycle
from scheduler.snapshot.decision_input import take_snapshot
from tests import factories

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def dataset():
    """One node of one GPU; ``vision`` borrows it, ``nlp`` is promised it."""
    factories.cluster_settings()
    pool = factories.pool()
    ada, ben, cem = factories.user("ada"), factories.user("ben"), factories.user("cem")
    vision, nlp = factories.project("vision", member=ada), factories.project("nlp", member=ben)
    nlp.memberships.create(user=cem, role="manager")
    Quota.objects.create(project=nlp, pool=pool, guaranteed_milli=1000)
    return {
        "node": factories.node(pool, gpus=1),
        "environment": factories.environment(tool=False),
        "ada": ada,
        "ben": ben,
        "cem": cem,
        "vision": vision,
        "nlp": nlp,
    }


def submit(dataset, who: str, project: str, **fields) -> Job:
    return factories.job(dataset[who], dataset[project], dataset["environment"], **fields)


def cycle() -> None:
    assert run_cycle("test", "holder") is not None


def evicted(dataset) -> tuple[Attempt, Job]:
    """A running job that was asked to leave, and the job for which it was."""
    victim = submit(dataset, "ada", "vision", name="borrower")
    cycle()
    task = victim.attempts.get().task_rows.get()
    assert job_control.mark_task_sent(task)
    job_control.record_task_running(task.pk, container="c", ports={})
    winner = submit(dataset, "ben", "nlp", name="entitled")
    cycle()
    attempt = victim.attempts.get()
    assert (attempt.stop_reason, attempt.preempted_for_id) == ("reclaimed", winner.pk)
    return attempt, winner


def gone(attempt: Attempt) -> None:
    """Its node proves that it has left."""
    job_control.record_task_ended(attempt.task_rows.get().pk, exit_code=143, reason=EndReason.EXIT_CODE)


def state(job: Job) -> str:
    job.refresh_from_db()
    return job.state


def promised_to(job: Job) -> tuple[bool, bool]:
    """Whether somebody leaves for it, and whether a place is kept for it, as the next decision sees it."""
    snapshot = take_snapshot(factories.cluster_settings()).snapshot
    left = any(row.job == job.public_id and row.nominated_tasks for row in snapshot.pending)
    return any(row.preempted_for == job.public_id for row in snapshot.running), left


def test_the_preemptor_gets_the_freed_gpu(dataset) -> None:
    attempt, winner = evicted(dataset)
    assert promised_to(winner) == (True, True)
    urgent = submit(dataset, "cem", "nlp", name="urgent", priority=50)  # first in order from now on
    cycle()
    assert (state(winner), state(urgent)) == ("PENDING", "PENDING")
    gone(attempt)
    assert promised_to(winner) == (False, True)
    cycle()
    assert (state(winner), state(urgent)) == ("RUNNING", "PENDING")
    assert promised_to(winner) == (False, False)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("how", ["cancelled", "held"])
def test_without_the_preemptor_the_gpu_is_free_for_all(dataset, how: str, when: str) -> None:
    attempt, winner = evicted(dataset)
    urgent = submit(dataset, "cem", "nlp", name="urgent", priority=50)
    if when == "after":
        gone(attempt)
    if how == "cancelled":
        do_cancel_job(dataset["ben"], winner)
    else:
        do_hold_job(dataset["ben"], winner, True)
    if when == "before":
        gone(attempt)
    cycle()
    assert state(urgent) == "RUNNING"
    assert state(winner) == ("CANCELLED" if how == "cancelled" else "PENDING")


def test_a_promise_ends_with_the_next_attempt(dataset) -> None:
    attempt, winner = evicted(dataset)
    gone(attempt)
    cycle()
    job_control.request_stop(
        winner.attempts.get().pk, EndReason.PREEMPTED
    )  # it had not begun: it waits again
    assert state(winner) == "PENDING"
    assert promised_to(winner) == (False, False)
