"""Notices to the owners of jobs about starts, ends and preemptions."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable

from portal.domain.formatting import format_duration
from portal.domain.jobs.end_states import PREEMPTION_REASONS
from portal.domain.jobs.reasons import EndReason
from portal.domain.notices.notices import NoticeKind
from portal.domain.states import FAILED_ATTEMPT_STATES, JobKind, JobState
from portal.domain.stored_texts import stored_text
from portal.models import Attempt, Job
from portal.services.notices.write import NoticeDraft, write_notices

CAUSE_WAIT = dt.timedelta(seconds=90)
"""After this time mails and webhooks about a failed attempt are sent even if its log was not searched.

It is searched 60 s after the end at latest, unless worker-nodes is down or behind.
"""
_END_TITLES = {
    JobState.COMPLETED: (NoticeKind.JOB_ENDED, stored_text("{job_name} completed")),
    JobState.CANCELLED: (NoticeKind.JOB_ENDED, stored_text("{job_name} was stopped")),
    JobState.SUSPENDED: (NoticeKind.JOB_ENDED, stored_text("{job_name} was suspended")),
    JobState.FAILED: (NoticeKind.JOB_FAILED, stored_text("{job_name} failed")),
    JobState.TIMEOUT: (NoticeKind.JOB_FAILED, stored_text("{job_name} reached its time limit")),
}


def start_notice(attempt: Attempt) -> list[NoticeDraft]:
    """Return the notice of an attempt whose containers run."""
    job = attempt.job
    if _is_managed(job):
        return []
    waited_s = (attempt.created_at - job.pending_since).total_seconds()
    gpus, waited = job.total_gpus, format_duration(max(0.0, waited_s))
    message = stored_text(
        f"It runs on {gpus} {'GPU' if gpus == 1 else 'GPUs'}, after {waited} in the queue."
        if gpus
        else f"It runs, after {waited} in the queue."
    )
    title = stored_text(f"{job.name} started")
    return [NoticeDraft(NoticeKind.JOB_STARTED, job.owner_id, title, message, job=job)]


def state_notice(job: Job, before: JobState, actor: str, attempt: Attempt | None = None) -> list[NoticeDraft]:
    """Return the notice of a job that moved to its present state, unless its owner did it.

    If ``attempt``, whose end moved it, failed, messages outside of the portal wait for the cause.
    """
    state = JobState(job.state)
    by_owner = bool(actor) and actor == job.owner.username and state is not JobState.FAILED
    if state in _END_TITLES:
        kind, title = _END_TITLES[state]
    elif before is JobState.RUNNING and state is JobState.PENDING and job.reason != EndReason.SUSPENDED:
        preempted = job.reason in PREEMPTION_REASONS
        kind = NoticeKind.JOB_PREEMPTED
        title = stored_text(
            "{job_name} was preempted" if preempted else "{job_name} ended early and is queued again"
        )
    else:
        return []
    if _is_managed(job) and kind is not NoticeKind.JOB_FAILED:
        return []
    recipient = None if by_owner else job.owner_id  # webhooks of the project get it all the same
    searched_later = attempt is not None and attempt.state in FAILED_ATTEMPT_STATES
    hold = CAUSE_WAIT if searched_later and job.kind != JobKind.WORKSPACE.value else dt.timedelta(0)
    return [NoticeDraft(kind, recipient, title.format(job_name=job.name), job.message, job=job, hold=hold)]


def warn_of_reclaim(stops: Iterable[tuple[Attempt, str, str]]) -> None:
    """Notify the owners of running attempts that lose GPUs, given each reason and message."""
    write_notices(
        [
            NoticeDraft(
                NoticeKind.RECLAIM_WARNING,
                attempt.job.owner_id,
                stored_text(f"GPUs of {attempt.job.name} are taken back"),
                f"{message} {_grace_text(attempt.job)}",
                job=attempt.job,
            )
            for attempt, reason, message in stops
            if reason in PREEMPTION_REASONS
        ]
    )


def _grace_text(job: Job) -> str:
    return stored_text(f"Stopped tasks have {job.termination_grace_s} s to save their work.")


def _is_managed(job: Job) -> bool:
    """Return True for replicas and trials: their service or sweep starts and ends them all the time."""
    return job.kind == JobKind.SERVICE.value or "FAIRWAY_TRIAL" in job.env
