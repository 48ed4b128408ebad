"""Single steps of jobs, attempts and tasks along the graph of states, each with what ``moves`` says it leaves.

For ``portal.services.lifecycle`` and its chapters, on rows that they hold locked. Raises Conflict for a step that
is not on the graph.
"""

from __future__ import annotations

from django.utils import timezone

from portal.errors import Conflict
from portal.events import announce_all
from portal.models import Attempt, Job, Task
from portal.services.moves import attempt_event, job_event, news_of_attempt, news_of_job
from portal.wake import leave_hint, wake
from portal.words.states import (
    ATTEMPT_ENDS,
    JOB_ENDS,
    JOB_LIVE,
    AttemptState,
    JobState,
    may_move_attempt,
    may_move_job,
)


def move_task(task: Task, to: AttemptState) -> None:
    """Moves a task and saves all of it, also where it is in that state already."""
    old = AttemptState(task.state)
    if old is to:
        task.save()
        return
    if not may_move_attempt(old, to):
        raise Conflict(f"A task cannot move from {old} to {to}.", code="illegal_move")
    task.state = to.value
    task.save()


def next_state(attempt: Attempt, to: AttemptState) -> AttemptState:
    """Sets the state of an attempt, unsaved, and gives the one before. Raises Conflict off the graph."""
    old = AttemptState(attempt.state)
    if not may_move_attempt(old, to):
        raise Conflict(f"An attempt cannot move from {old} to {to}.", code="illegal_move")
    attempt.state = to.value
    return old


def move_attempt(attempt: Attempt, to: AttemptState, reason: str, sentence: str, actor: str = "") -> None:
    """Moves an attempt, and tells; an end keeps its reason and sentence."""
    old = next_state(attempt, to)
    if to in ATTEMPT_ENDS:
        attempt.reason = reason
        attempt.sentence = sentence[:1000]
    attempt.save(update_fields=["state", "reason", "sentence"])
    note_event(attempt, "attempt_state", old, to, reason, sentence, actor)


def move_job(
    job: Job, to: JobState, *, reason: str, sentence: str, attempt: Attempt | None = None, actor: str = ""
) -> None:
    """Moves a job and saves all of it, tells, and wakes whoever waits for such a move."""
    old = JobState(job.state)
    if not may_move_job(old, to):
        raise Conflict(f"A job cannot move from {old} to {to}.", code="illegal_move")
    now = timezone.now()
    job.state, job.reason, job.sentence = to.value, str(reason), sentence[:1000]
    job.version += 1
    if to in JOB_ENDS:
        job.ended_at = now
    elif to is JobState.PENDING:
        job.queued_at = now
    job.save()
    job_event(job, old, attempt, actor).save()
    tell_job(job)
    if to in JOB_LIVE and to is not JobState.RUNNING:
        wake("requeue")
    if to in JOB_ENDS and job.next_jobs.exists():
        leave_hint("scheduler.dependents", [], "cycle")


def note_event(
    attempt: Attempt, kind: str, before: str, after: str, reason: str, sentence: str, actor: str = ""
) -> None:
    """Leaves an event on the timeline of the attempt's job, and tells."""
    attempt_event(attempt, kind, before, after, reason, sentence, actor).save()
    announce_all([news_of_attempt(attempt, kind, sentence)])


def tell_job(job: Job) -> None:
    """Tells open pages the state of a job."""
    announce_all(news_of_job(job))
