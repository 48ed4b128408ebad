"""What a move of a job or an attempt leaves behind: an event for its timeline, and news for open pages."""

from __future__ import annotations

from portal.events import News
from portal.models import Attempt, Job, JobEvent
from portal.words.states import JobState


def job_event(job: Job, before: JobState, attempt: Attempt | None, actor: str = "") -> JobEvent:
    """The event, unsaved, of the state that the job has now."""
    return JobEvent(
        job=job,
        attempt=attempt,
        kind="job_state",
        before=before.value,
        after=job.state,
        reason=job.reason,
        sentence=job.sentence,
        actor=actor,
    )


def attempt_event(
    attempt: Attempt, kind: str, before: str, after: str, reason: str, sentence: str, actor: str = ""
) -> JobEvent:
    """An event, unsaved, on the timeline of the attempt's job."""
    return JobEvent(
        job=attempt.job,
        attempt=attempt,
        kind=kind,
        before=str(before),
        after=str(after),
        reason=reason,
        sentence=sentence[:1000],
        actor=actor,
    )


def news_of_attempt(attempt: Attempt, kind: str, sentence: str) -> News:
    """For those who watch the job."""
    data = {"kind": kind, "attempt": attempt.number, "state": attempt.state, "sentence": sentence}
    return f"job.{attempt.job.public_id}", data


def news_of_job(job: Job) -> list[News]:
    """Its state, for those who watch the job, its owner or its project."""
    data = {"kind": "job_state", "job": job.public_id, "state": job.state, "sentence": job.sentence}
    topics = (f"job.{job.public_id}", f"user.{job.owner.public_id}", f"project.{job.project.public_id}")
    return [(topic, data) for topic in topics]
