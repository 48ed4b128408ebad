"""What an ended attempt leaves of its job: the end that it has come to, or another turn in the queue.

And what a task leaves that ended alone: an elastic attempt goes on as long as enough of its tasks live.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Collection, Sequence

from django.utils import timezone

from portal.models import Attempt, Job, Task
from portal.services.rendezvous import part
from portal.services.steps import move_attempt, move_job, move_task, note_event
from portal.wake import wake
from portal.words.ends import END_STATES, GIVEN_BACK, NO_FAULT, OWN_FAILURES, RETRIED, pause_s, tries_used
from portal.words.reasons import EndReason, end_sentence
from portal.words.states import ATTEMPT_LIVE, AttemptState, Desired, JobState


def finish_attempt(attempt: Attempt, job: Job) -> None:
    """Ends an attempt whose every task is gone, and decides what becomes of the job."""
    reason = EndReason(attempt.stop_reason) if attempt.stop_reason else EndReason.FINISHED
    state = END_STATES[reason]
    sentence = attempt.sentence or end_sentence(reason)
    for task in attempt.task_rows.select_for_update(no_key=True).order_by("pk"):
        if task.state in ATTEMPT_LIVE:
            task.ended_at = timezone.now()
            move_task(task, state)
    attempt.ended_at = timezone.now()
    if reason is EndReason.FINISHED:
        attempt.exit_code = 0
    attempt.save(update_fields=["ended_at", "exit_code"])
    part(attempt)
    move_attempt(attempt, state, reason.value, sentence, attempt.stop_actor)
    job.exit_code = attempt.exit_code
    after = _job_after(job, attempt, reason, state)
    if after is JobState.PENDING and not sentence.endswith("waits again."):
        sentence = f"{sentence} It waits again."
    if after is JobState.SUSPENDED and reason is not EndReason.SUSPENDED:
        sentence = end_sentence(EndReason.SUSPENDED)  # asked for while it left for another reason
    move_job(job, after, reason=reason, sentence=sentence, attempt=attempt, actor=attempt.stop_actor)
    wake("ended")


def _job_after(job: Job, attempt: Attempt, reason: EndReason, state: AttemptState) -> JobState:
    if job.desired == Desired.CANCELLED:
        return JobState.CANCELLED
    if job.desired == Desired.SUSPENDED:
        return JobState.SUSPENDED
    if state is AttemptState.SUSPENDED:
        return JobState.PENDING  # resumed while it let go
    retried = reason in RETRIED or (job.retry_failures and reason in OWN_FAILURES)
    if job.stub and (reason in GIVEN_BACK or retried):
        return JobState.FAILED  # nobody knows what to start again
    if reason in GIVEN_BACK:
        return JobState.PENDING
    if retried:
        used = tries_used(list(job.attempts.values_list("state", "reason")))
        return JobState.PENDING if used < job.max_attempts else JobState.FAILED
    return {
        AttemptState.COMPLETED: JobState.COMPLETED,
        AttemptState.CANCELLED: JobState.CANCELLED,
        AttemptState.TIMEOUT: JobState.TIMEOUT,
    }.get(state, JobState.FAILED)


def staying(tasks: Sequence[Task], without: Collection[int] = ()) -> int:
    """How many tasks go on when those that were asked to leave, and ``without`` (row numbers), have left."""
    return sum(
        task.state in ATTEMPT_LIVE and task.leave_wanted_at is None and task.pk not in without
        for task in tasks
    )


def goes_on_without(attempt: Attempt, job: Job, tasks: Sequence[Task], without: Collection[int] = ()) -> bool:
    """True when an attempt works on although these of its tasks end.

    Not when it is to end anyhow: because somebody wants it, or because one of its tasks has finished, whom the
    others follow.
    """
    if not job.elastic or attempt.stop_wanted_at is not None or job.desired != Desired.RUN:
        return False
    if any(task.state == AttemptState.COMPLETED for task in tasks):
        return False
    return staying(tasks, without) >= job.least_tasks


def note_lost(
    attempt: Attempt, job: Job, lost: int, stay: int, reason: EndReason, sentence: str, actor: str = ""
) -> None:
    """Writes down that tasks of an attempt end and the others go on; what is to replace them pauses first."""
    if reason not in NO_FAULT:
        attempt.failed_tasks += lost
    attempt.grow_after = timezone.now() + dt.timedelta(seconds=pause_s(attempt.failed_tasks))
    attempt.save(update_fields=["failed_tasks", "grow_after"])
    more = f" {stay} of {job.tasks} tasks go on."
    if attempt.failed_tasks >= job.max_attempts:
        more += f" It grows no more in this attempt: {attempt.failed_tasks} of its tasks failed."
    note_event(attempt, "task_lost", "", "", reason.value, f"{sentence}{more}", actor)
    note_change(job)


def note_change(job: Job) -> None:
    """The tasks of a running job changed: a plan that was made before does not hold any more."""
    job.version += 1
    job.save(update_fields=["version"])
    wake("ended")
