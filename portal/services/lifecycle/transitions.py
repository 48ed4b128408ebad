"""State transitions of jobs, attempts and tasks, each with its event.

For ``portal.services.lifecycle`` only, on rows that the caller has locked. Raise Conflict for a transition
that the tables do not allow.
"""

from __future__ import annotations

from collections.abc import Sequence

from django.utils import timezone

from portal.domain.states import (
    ATTEMPT_TRANSITIONS,
    JOB_TRANSITIONS,
    LIVE_JOB_STATES,
    TERMINAL_ATTEMPT_STATES,
    TERMINAL_JOB_STATES,
    AttemptState,
    JobKind,
    JobState,
)
from portal.errors import Conflict
from portal.models import Attempt, Job, Service, Task, Trial
from portal.outbox import enqueue_task, trigger_cycle
from portal.services.lifecycle.state_events import job_event, publish_job_state, record_event


def transition_task(task: Task, to: AttemptState) -> None:
    """Set the task's state and save the whole row, also if the state does not change."""
    old = AttemptState(task.state)
    if old is to:
        task.save()
        return
    if to not in ATTEMPT_TRANSITIONS[old]:
        raise Conflict(f"A task cannot move from {old} to {to}.", code="invalid_transition")
    task.state = to.value
    task.save()


def set_attempt_state(attempt: Attempt, to: AttemptState) -> AttemptState:
    """Set the state of an attempt without saving; return the previous one. Raise Conflict if not allowed."""
    old = AttemptState(attempt.state)
    if to not in ATTEMPT_TRANSITIONS[old]:
        raise Conflict(f"An attempt cannot move from {old} to {to}.", code="invalid_transition")
    attempt.state = to.value
    return old


def transition_attempt(
    attempt: Attempt,
    to: AttemptState,
    reason: str,
    message: str,
    actor: str = "",
    changed: Sequence[str] = (),
) -> None:
    """Set the attempt's state, save it and write the event; a terminal state stores reason and message.

    ``changed`` are other fields to save.
    """
    old = set_attempt_state(attempt, to)
    if to in TERMINAL_ATTEMPT_STATES:
        attempt.reason = reason
        attempt.message = message[:1000]
    attempt.save(update_fields=["state", "reason", "message", *changed])
    record_event(attempt, "attempt_state", reason, message, actor, before=old.value, after=to.value)


def transition_job(
    job: Job, to: JobState, *, reason: str, message: str, attempt: Attempt | None = None, actor: str = ""
) -> None:
    """Set the job's state, save the whole row, write and publish the event, and trigger follow-up work."""
    old = JobState(job.state)
    if to not in JOB_TRANSITIONS[old]:
        raise Conflict(f"A job cannot move from {old} to {to}.", code="invalid_transition")
    now = timezone.now()
    job.state, job.reason, job.message = to.value, str(reason), message[:1000]
    job.version += 1
    if to in TERMINAL_JOB_STATES:
        job.ended_at = now
    elif to is JobState.PENDING:
        job.pending_since = now
    job.save()
    job_event(job, old, attempt, actor).save()
    publish_job_state(job)
    if to in LIVE_JOB_STATES and to is not JobState.RUNNING:
        trigger_cycle("requeue")
    if to in TERMINAL_JOB_STATES and job.dependents.exists():
        enqueue_task("scheduler.dependents", [], "cycle")
    if to is not JobState.RUNNING and "FAIRWAY_TRIAL" in job.env:
        for sweep in Trial.objects.filter(job=job).values_list("sweep__public_id", flat=True):
            enqueue_task("scheduler.advance_sweep", [sweep], "nodes")
    if to is not JobState.RUNNING:
        announce_replica(job)


def announce_replica(job: Job) -> None:
    """Advance the service of a replica after the transaction."""
    if job.kind == JobKind.SERVICE.value:
        for service in Service.objects.filter(versions__replica_rows__job=job):
            enqueue_task("scheduler.advance_service", [service.public_id], "nodes")
