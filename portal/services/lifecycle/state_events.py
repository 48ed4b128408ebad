"""Events of state transitions: rows of the timeline, and messages for open pages."""

from __future__ import annotations

from portal.domain.states import JobState
from portal.live_events import TopicEvent
from portal.models import Attempt, Job, JobEvent


def job_event(job: Job, before: JobState, attempt: Attempt | None, actor: str = "") -> JobEvent:
    """Return an unsaved event with the job's present state."""
    return JobEvent(
        job=job,
        attempt=attempt,
        kind="job_state",
        before=before.value,
        after=job.state,
        reason=job.reason,
        message=job.message,
        actor=actor,
    )


def attempt_event(
    attempt: Attempt, kind: str, before: str, after: str, reason: str, message: str, actor: str = ""
) -> JobEvent:
    """Return an unsaved event for the timeline of the attempt's job."""
    return JobEvent(
        job=attempt.job,
        attempt=attempt,
        kind=kind,
        before=str(before),
        after=str(after),
        reason=reason,
        message=message[:1000],
        actor=actor,
    )


def attempt_topic_event(attempt: Attempt, kind: str, message: str) -> TopicEvent:
    """Return the event for subscribers of the job."""
    data = {"kind": kind, "attempt": attempt.number, "state": attempt.state, "message": message}
    return f"job.{attempt.job.public_id}", data


def job_topic_events(job: Job) -> list[TopicEvent]:
    """Return the job's state for subscribers of the job, its owner and its project."""
    data = {"kind": "job_state", "job": job.public_id, "state": job.state, "message": job.message}
    topics = (f"job.{job.public_id}", f"user.{job.owner.public_id}", f"project.{job.project.public_id}")
    return [(topic, data) for topic in topics]
