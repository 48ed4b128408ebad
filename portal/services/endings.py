"""What an ended attempt leaves of its job: the end that it has come to, or another turn in the queue."""

from __future__ import annotations

from django.utils import timezone

from portal.models import Attempt, Job
from portal.services.steps import move_attempt, move_job, move_task
from portal.wake import wake
from portal.words.ends import END_STATES, GIVEN_BACK, RETRIED
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
    move_attempt(attempt, state, reason.value, sentence, attempt.stop_actor)
    job.exit_code = attempt.exit_code
    after = _job_after(job, attempt, reason, state)
    if after is JobState.PENDING and not sentence.endswith("waits again."):
        sentence = f"{sentence} It waits again."
    move_job(job, after, reason=reason, sentence=sentence, attempt=attempt, actor=attempt.stop_actor)
    wake("ended")


def _job_after(job: Job, attempt: Attempt, reason: EndReason, state: AttemptState) -> JobState:
    if job.desired == Desired.CANCELLED:
        return JobState.CANCELLED
    if job.desired == Desired.SUSPENDED or state is AttemptState.SUSPENDED:
        return JobState.SUSPENDED
    if job.stub and (reason in GIVEN_BACK or reason in RETRIED):
        return JobState.FAILED  # nobody knows what to start again
    if reason in GIVEN_BACK:
        return JobState.PENDING
    if reason in RETRIED:
        return JobState.PENDING if _tries_used(job) < job.max_attempts else JobState.FAILED
    return {
        AttemptState.COMPLETED: JobState.COMPLETED,
        AttemptState.CANCELLED: JobState.CANCELLED,
        AttemptState.TIMEOUT: JobState.TIMEOUT,
    }.get(state, JobState.FAILED)


def _tries_used(job: Job) -> int:
    """Attempts that count against ``max_attempts``: those that did not give their GPUs back for others."""
    return job.attempts.exclude(
        state__in=[AttemptState.PREEMPTED.value, AttemptState.SUSPENDED.value]
    ).count()
