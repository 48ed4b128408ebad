"""What follows for the job when an attempt ends: a final state, or PENDING again.

Also what follows when one task ends: an elastic attempt continues while enough of its tasks run.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Collection, Mapping, Sequence

from django.utils import timezone

from portal.domain.jobs.end_states import (
    END_STATES,
    NOT_TASK_FAILURES,
    PREEMPTION_REASONS,
    backoff_s,
    counted_attempts,
    is_retried,
)
from portal.domain.jobs.failure_rules import PROGRAM_FAILURES
from portal.domain.jobs.reasons import PENDING_AGAIN, EndReason, end_message
from portal.domain.states import LIVE_ATTEMPT_STATES, AttemptState, DesiredState, JobState
from portal.domain.stored_texts import stored_text
from portal.models import Attempt, Job, Task
from portal.outbox import trigger_cycle
from portal.services.lifecycle.rendezvous import release_rendezvous
from portal.services.lifecycle.state_events import record_event
from portal.services.lifecycle.transitions import (
    AttemptChange,
    JobChange,
    save_fields,
    set_task_state,
    transition_attempts,
    transition_jobs,
)
from portal.services.lifecycle.work_ledger import record_work


def finish_attempts(ended: Mapping[Attempt, Sequence[Task]]) -> None:
    """End attempts whose tasks (all of them, locked) are gone, and set the next states of their jobs."""
    left: list[Task] = []
    work: list[tuple[Attempt, EndReason]] = []
    changes: list[AttemptChange] = []
    now = timezone.now()
    for attempt, tasks in ended.items():
        reason = EndReason(attempt.stop_reason) if attempt.stop_reason else EndReason.COMPLETED
        state = END_STATES[reason]
        for task in tasks:
            if task.state in LIVE_ATTEMPT_STATES:
                task.ended_at = now
                # the end of other tasks completed the job
                set_task_state(task, AttemptState.CANCELLED if reason is EndReason.COMPLETED else state)
                left.append(task)
        attempt.ended_at = now
        if reason is EndReason.COMPLETED:
            attempt.exit_code = 0
        message = attempt.message or end_message(reason)
        changes.append(AttemptChange(attempt, state, reason.value, message, attempt.stop_requested_by))
        work.append((attempt, reason))
        release_rendezvous(attempt)
    save_fields(left, "state", "ended_at")
    record_work(work)
    transition_attempts(changes, ("ended_at", "exit_code"))
    moved = [_job_change(each, reason) for each, (_, reason) in zip(changes, work, strict=True)]
    for each in moved:
        if each.job.gpu_switch is not None:
            each.job.save(update_fields=apply_gpu_switch(each.job))
    transition_jobs(moved)
    if changes:
        trigger_cycle("ended")


def apply_gpu_switch(job: Job) -> list[str]:
    """Set the columns of a switch on a job without a live attempt; return their names, for the save."""
    columns = job.gpu_switch or {}
    for name, value in columns.items():
        setattr(job, name, value)
    job.gpu_switch = None
    return [*columns, "gpu_switch"]


def _job_change(ended: AttemptChange, reason: EndReason) -> JobChange:
    attempt, job, message = ended.attempt, ended.attempt.job, ended.message
    job.exit_code = attempt.exit_code
    after = _next_job_state(job, attempt, reason, ended.to)
    if job.awaits_failure_rule:
        message = f"{message} {stored_text('The failure rules decide whether it starts again.')}"
    elif after is JobState.PENDING and not message.endswith("is pending again."):
        message = f"{message} {PENDING_AGAIN}"
    if after is JobState.SUSPENDED and reason is not EndReason.SUSPENDED:
        message = end_message(EndReason.SUSPENDED)  # suspended while it stopped for another reason
    return JobChange(job, after, reason, message, attempt, ended.actor)


def _next_job_state(job: Job, attempt: Attempt, reason: EndReason, state: AttemptState) -> JobState:
    if job.desired_state == DesiredState.CANCELLED:
        return JobState.CANCELLED
    if job.desired_state == DesiredState.SUSPENDED:
        return JobState.SUSPENDED
    if state is AttemptState.SUSPENDED:
        return JobState.PENDING  # resumed while it stopped
    retried = is_retried(reason, attempt.exit_code, job.retry_on, job.retry_exit_codes)
    if job.is_placeholder and (reason in PREEMPTION_REASONS or retried):
        return JobState.FAILED  # a placeholder has no command to start again
    if reason in PREEMPTION_REASONS:
        return JobState.PENDING
    by_rule = job.apply_failure_actions and reason in PROGRAM_FAILURES
    if retried or by_rule:
        used = counted_attempts(list(job.attempts.values_list("state", "reason")))
        job.awaits_failure_rule = by_rule and used < job.max_attempts
        return JobState.PENDING if used < job.max_attempts else JobState.FAILED
    return {
        AttemptState.COMPLETED: JobState.COMPLETED,
        AttemptState.CANCELLED: JobState.CANCELLED,
        AttemptState.TIMEOUT: JobState.TIMEOUT,
    }.get(state, JobState.FAILED)


def surviving_tasks(tasks: Sequence[Task], without: Collection[int] = ()) -> int:
    """Return the number of tasks left after evictions and without the tasks ``without`` (ids)."""
    return sum(is_staying(task) and task.pk not in without for task in tasks)


def is_staying(task: Task) -> bool:
    """Return True if the task is live and not evicted."""
    return task.state in LIVE_ATTEMPT_STATES and task.eviction_requested_at is None


def gang_outcome(job: Job, tasks: Sequence[Task], without: Collection[int] = ()) -> bool | None:
    """Return True if a gang has completed, False if it has failed, None while it continues.

    The tasks ``without`` (ids) count as failed.
    """
    return job.completion_policy.outcome(
        {
            task.rank: task.state == AttemptState.COMPLETED
            if task.state not in LIVE_ATTEMPT_STATES or task.pk in without
            else None
            for task in tasks
        }
    )


def survives_without(
    attempt: Attempt, job: Job, tasks: Sequence[Task], without: Collection[int] = ()
) -> bool:
    """Return True if an attempt continues when these tasks (ids) end.

    Not if it must end anyway: a stop was requested, or, if it is elastic, one of its tasks has completed, which
    ends the others. With a launcher rank 0 of an elastic job is where the other tasks meet. A gang continues
    without tasks that may fail, but not if they never started.
    """
    if attempt.stop_requested_at is not None or job.desired_state != DesiredState.RUN:
        return False
    if not job.is_elastic:
        starting = any(task.state == AttemptState.CONFIGURING and task.pk in without for task in tasks)
        return not starting and gang_outcome(job, tasks, without) is not False
    if any(task.state == AttemptState.COMPLETED for task in tasks):
        return False
    if job.needs_rendezvous and not any(
        task.rank == 0 and is_staying(task) and task.pk not in without for task in tasks
    ):
        return False
    return surviving_tasks(tasks, without) >= job.required_tasks


def record_lost_tasks(
    attempt: Attempt, job: Job, lost: int, surviving: int, reason: EndReason, message: str, actor: str = ""
) -> None:
    """Record that tasks of an attempt end while others continue; replacements wait for a backoff first."""
    if reason not in NOT_TASK_FAILURES:
        attempt.failed_tasks += lost
    delay_s = backoff_s(attempt.failed_tasks, job.retry_backoff_s, job.retry_max_backoff_s)
    attempt.scale_up_after = timezone.now() + dt.timedelta(seconds=delay_s)
    attempt.save(update_fields=["failed_tasks", "scale_up_after"])
    more = stored_text(f" {surviving} of {job.tasks} tasks keep running.")
    if job.is_elastic and attempt.failed_tasks >= job.max_attempts:
        more += stored_text(
            f" It is not scaled up again in this attempt: {attempt.failed_tasks} of its tasks failed."
        )
    record_event(attempt, "task_lost", reason.value, f"{message}{more}", actor)
    bump_job_version(job)


def bump_job_version(job: Job) -> None:
    """Invalidate plans for a running job after its tasks changed."""
    job.version += 1
    job.save(update_fields=["version"])
    trigger_cycle("ended")
