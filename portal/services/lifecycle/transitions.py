"""State transitions of jobs, attempts and tasks, each with its event.

For ``portal.services.lifecycle`` only, on rows that the caller has locked. Raise Conflict for a transition
that the tables do not allow.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from django.db import models
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
from portal.live_events import publish_all_on_commit
from portal.models import Attempt, Dependency, Job, JobEvent, Service, Sweep, Task
from portal.outbox import enqueue_task, trigger_cycle
from portal.services.lifecycle.job_notices import start_notice, state_notice
from portal.services.lifecycle.state_events import (
    attempt_event,
    attempt_topic_event,
    job_event,
    job_topic_events,
)
from portal.services.notices.write import NoticeDraft, write_notices

_JOB_FIELDS = ("state", "desired_state", "reason", "message", "version", "exit_code", "awaits_failure_rule")
_FIELDS_BY_JOB_STATE = {
    JobState.PENDING: ("pending_since",),
    JobState.RUNNING: ("attempt_count", "started_at"),
    **dict.fromkeys(TERMINAL_JOB_STATES, ("ended_at",)),
}


@dataclass(frozen=True)
class AttemptChange:
    """The next state of an attempt; a terminal state stores reason and message."""

    attempt: Attempt
    to: AttemptState
    reason: str
    message: str
    actor: str = ""


@dataclass(frozen=True)
class JobChange:
    """The next state of a job, and the attempt that caused it, if any."""

    job: Job
    to: JobState
    reason: str
    message: str
    attempt: Attempt | None = None
    actor: str = ""


def set_task_state(task: Task, to: AttemptState) -> None:
    """Set the state of a task without saving; it may stay the same."""
    old = AttemptState(task.state)
    if old is not to and to not in ATTEMPT_TRANSITIONS[old]:
        raise Conflict(f"A task cannot move from {old} to {to}.", code="invalid_transition")
    task.state = to.value


def set_attempt_state(attempt: Attempt, to: AttemptState) -> AttemptState:
    """Set the state of an attempt without saving; return the previous one. Raise Conflict if not allowed."""
    old = AttemptState(attempt.state)
    if to not in ATTEMPT_TRANSITIONS[old]:
        raise Conflict(f"An attempt cannot move from {old} to {to}.", code="invalid_transition")
    attempt.state = to.value
    return old


def transition_attempts(changes: Sequence[AttemptChange], changed: Sequence[str] = ()) -> None:
    """Set the states of attempts, save them with the other fields ``changed``, and write their events."""
    events, news = [], []
    for each in changes:
        attempt, old = each.attempt, set_attempt_state(each.attempt, each.to)
        if each.to in TERMINAL_ATTEMPT_STATES:
            attempt.reason, attempt.message = each.reason, each.message[:1000]
        states = {"before": old.value, "after": each.to.value}
        events.append(
            attempt_event(attempt, "attempt_state", each.reason, each.message, each.actor, **states)
        )
        news.append(attempt_topic_event(attempt, "attempt_state", each.message))
    save_fields([each.attempt for each in changes], "state", "reason", "message", *changed)
    JobEvent.objects.bulk_create(events)
    publish_all_on_commit(news)
    started = [each.attempt for each in changes if each.to is AttemptState.RUNNING]
    write_notices([notice for attempt in started for notice in start_notice(attempt)])


def transition_job(
    job: Job, to: JobState, *, reason: str, message: str, attempt: Attempt | None = None, actor: str = ""
) -> None:
    """Set the state of a single job, as ``transition_jobs``."""
    transition_jobs([JobChange(job, to, reason, message, attempt, actor)])


def transition_jobs(changes: Sequence[JobChange]) -> None:
    """Set the states of jobs, save them, write and publish their events, and trigger follow-up work."""
    now, events, news = timezone.now(), [], []
    notices: list[NoticeDraft] = []
    for each in changes:
        job, old = each.job, JobState(each.job.state)
        if each.to not in JOB_TRANSITIONS[old]:
            raise Conflict(f"A job cannot move from {old} to {each.to}.", code="invalid_transition")
        job.state, job.reason, job.message = each.to.value, str(each.reason), each.message[:1000]
        job.version += 1
        if each.to in TERMINAL_JOB_STATES:
            job.ended_at = now
        elif each.to is JobState.PENDING:
            job.pending_since = now
        events.append(job_event(job, old, each.attempt, each.actor))
        news += job_topic_events(job)
        notices += state_notice(job, old, each.actor, each.attempt)
    for state in dict.fromkeys(each.to for each in changes):
        fields = (*_JOB_FIELDS, *_FIELDS_BY_JOB_STATE.get(state, ()))
        save_fields([each.job for each in changes if each.to is state], *fields)
    JobEvent.objects.bulk_create(events)
    publish_all_on_commit(news)
    write_notices(notices)
    if any(each.to in LIVE_JOB_STATES and each.to is not JobState.RUNNING for each in changes):
        trigger_cycle("requeue")
    ended = [each.job for each in changes if each.to in TERMINAL_JOB_STATES]
    if ended and Dependency.objects.filter(depends_on__in=ended).exists():
        enqueue_task("scheduler.dependents", [], "cycle")
    stopped = [each.job for each in changes if each.to is not JobState.RUNNING]
    if trials := [job for job in stopped if "FAIRWAY_TRIAL" in job.env]:
        sweeps = Sweep.objects.filter(trials__job__in=trials).distinct()
        for sweep in sweeps.values_list("public_id", flat=True):
            enqueue_task("scheduler.advance_sweep", [sweep], "nodes")
    for job in stopped:
        announce_replica(job)


def save_fields(rows: Sequence[models.Model], *names: str) -> None:
    """Save these fields of rows of one table, with one query for all rows that have the same values."""
    same: dict[tuple[Any, ...], list[int]] = defaultdict(list)
    for row in rows:
        same[tuple(getattr(row, name) for name in names)].append(row.pk)
    for values, ids in same.items():
        type(rows[0])._default_manager.filter(pk__in=ids).update(**dict(zip(names, values, strict=True)))


def announce_replica(job: Job) -> None:
    """Advance the service of a replica after the transaction."""
    if job.kind == JobKind.SERVICE.value:
        for service in Service.objects.filter(versions__replica_rows__job=job):
            enqueue_task("scheduler.advance_service", [service.public_id], "nodes")
