"""Notices to the owners of jobs about starts, ends and preemptions."""

from __future__ import annotations

from collections.abc import Iterable

from portal.domain.end_states import PREEMPTION_REASONS
from portal.domain.formatting import format_duration
from portal.domain.notices import NoticeKind
from portal.domain.reasons import EndReason
from portal.domain.states import JobKind, JobState
from portal.models import Attempt, Job
from portal.services.notices.write import NoticeDraft, write_notices

_END_TITLES = {
    JobState.COMPLETED: (NoticeKind.JOB_ENDED, "{} completed"),
    JobState.CANCELLED: (NoticeKind.JOB_ENDED, "{} was stopped"),
    JobState.SUSPENDED: (NoticeKind.JOB_ENDED, "{} was suspended"),
    JobState.FAILED: (NoticeKind.JOB_FAILED, "{} failed"),
    JobState.TIMEOUT: (NoticeKind.JOB_FAILED, "{} reached its time limit"),
}


def start_notice(attempt: Attempt) -> list[NoticeDraft]:
    """Return the notice of an attempt whose containers run."""
    job = attempt.job
    if _is_managed(job):
        return []
    waited_s = (attempt.created_at - job.pending_since).total_seconds()
    gpus = f" on {job.total_gpus} GPU{'' if job.total_gpus == 1 else 's'}" if job.total_gpus else ""
    message = f"It runs{gpus}, after {format_duration(max(0.0, waited_s))} in the queue."
    return [NoticeDraft(NoticeKind.JOB_STARTED, job.owner_id, f"{job.name} started", message, job=job)]


def state_notice(job: Job, before: JobState, actor: str) -> list[NoticeDraft]:
    """Return the notice of a job that moved to its present state, unless its owner did it."""
    state = JobState(job.state)
    by_owner = bool(actor) and actor == job.owner.username and state is not JobState.FAILED
    if state in _END_TITLES:
        kind, title = _END_TITLES[state]
    elif before is JobState.RUNNING and state is JobState.PENDING and job.reason != EndReason.SUSPENDED:
        preempted = job.reason in PREEMPTION_REASONS
        kind = NoticeKind.JOB_PREEMPTED
        title = "{} was preempted" if preempted else "{} ended early and is queued again"
    else:
        return []
    if _is_managed(job) and kind is not NoticeKind.JOB_FAILED:
        return []
    recipient = None if by_owner else job.owner_id  # webhooks of the project get it all the same
    return [NoticeDraft(kind, recipient, title.format(job.name), job.message, job=job)]


def warn_of_reclaim(stops: Iterable[tuple[Attempt, str, str]]) -> None:
    """Notify the owners of running attempts that lose GPUs, given each reason and message."""
    write_notices(
        [
            NoticeDraft(
                NoticeKind.RECLAIM_WARNING,
                attempt.job.owner_id,
                f"GPUs of {attempt.job.name} are taken back",
                f"{message} Stopped tasks have {attempt.job.termination_grace_s} s to save their work.",
                job=attempt.job,
            )
            for attempt, reason, message in stops
            if reason in PREEMPTION_REASONS
        ]
    )


def _is_managed(job: Job) -> bool:
    """Return True for replicas and trials: their service or sweep starts and ends them all the time."""
    return job.kind == JobKind.SERVICE.value or "FAIRWAY_TRIAL" in job.env
