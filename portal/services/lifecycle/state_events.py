"""Events of jobs: rows of the timeline, and messages for open pages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from portal.domain.states import JobState
from portal.domain.stored_texts import stored_text
from portal.live_events import TopicEvent, publish_all_on_commit
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
    attempt: Attempt, kind: str, reason: str, message: str, actor: str = "", **columns: Any
) -> JobEvent:
    """Return an unsaved event for the timeline of the attempt's job; ``columns`` are those of a state change."""
    return JobEvent(
        job=attempt.job,
        attempt=attempt,
        kind=kind,
        reason=reason,
        message=message[:1000],
        actor=actor,
        **columns,
    )


def attempt_topic_event(attempt: Attempt, kind: str, message: str) -> TopicEvent:
    """Return the event for subscribers of the job."""
    data = {"kind": kind, "attempt": attempt.number, "state": attempt.state, "message": message}
    return f"job.{attempt.job.public_id}", data


def lock_job(job_id: int) -> Job:
    """Return the job, locked, with the owner and the project that its events name."""
    rows = Job.objects.select_for_update(of=("self",), no_key=True)
    return rows.select_related("owner", "project").get(pk=job_id)


def job_topic_events(job: Job) -> list[TopicEvent]:
    """Return the job's state for subscribers of the job, its owner and its project."""
    data = {"kind": "job_state", "job": job.public_id, "state": job.state, "message": job.message}
    topics = (f"job.{job.public_id}", f"user.{job.owner.public_id}", f"project.{job.project.public_id}")
    return [(topic, data) for topic in topics]


def record_event(
    attempt: Attempt, kind: str, reason: str, message: str, actor: str = "", **columns: Any
) -> None:
    """Write an event to the timeline of the attempt's job and publish it."""
    attempt_event(attempt, kind, reason, message, actor, **columns).save()
    publish_all_on_commit([attempt_topic_event(attempt, kind, message)])


def record_owner_event(
    attempt: Attempt, kind: str, message: str, actor: str = "", details: Mapping[str, Any] | None = None
) -> None:
    """Write an event to the timeline, and publish it with its details to subscribers of the job and its owner."""
    known = dict(details or {})
    attempt_event(attempt, kind, kind, message, actor, details=known).save()
    topic, data = attempt_topic_event(attempt, kind, message)
    news = data | known | {"job": attempt.job.public_id}
    publish_all_on_commit([(topic, news), (f"user.{attempt.job.owner.public_id}", news)])


def publish_job_state(job: Job) -> None:
    publish_all_on_commit(job_topic_events(job))


def placement_text(preferred: Sequence[str], names: Sequence[str]) -> str:
    """Return where an attempt starts, and how that compares with the nodes that its job prefers."""
    node_names, preferred_names = ", ".join(sorted(set(names))), ", ".join(dict.fromkeys(preferred))
    if not preferred:
        return stored_text(f"Starting on {node_names}.")
    if list(names) == list(preferred[: len(names)]):
        return stored_text(f"Starting on {node_names}, as preferred.")
    return stored_text(
        f"Starting on {node_names}; its preferred nodes {preferred_names} could not take all its tasks."
    )
