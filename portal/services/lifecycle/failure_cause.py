"""What the message of a failed job says: how its task ended, and the cause that its log names."""

from __future__ import annotations

from collections.abc import Mapping

from django.db.models import QuerySet

from portal.domain.formatting import format_memory
from portal.domain.jobs.exit_codes import describe_exit
from portal.domain.jobs.reasons import EndReason, end_message
from portal.domain.notices.notices import NoticeKind
from portal.domain.states import JobKind
from portal.domain.stored_texts import stored_text
from portal.live_events import publish_all_on_commit
from portal.models import Attempt, Job, Notice, Task
from portal.selectors.jobs.signals import sent_signal
from portal.services.lifecycle.job_notices import CAUSE_WAIT
from portal.services.lifecycle.state_events import job_topic_events
from portal.services.notices.write import send_held

MAX_CAUSE_CHARACTERS = 300
_END_NOTICES = (NoticeKind.JOB_FAILED.value, NoticeKind.JOB_PREEMPTED.value)


def task_end_message(attempt: Attempt, task: Task, reason: EndReason, details: Mapping[str, object]) -> str:
    """Return the message of a task that failed by itself, with the signal that its exit code names."""
    memory = format_memory(attempt.job.memory_of(task.rank))
    known = {"exit_code": describe_exit(task.exit_code), "memory": memory, "node": task.node.name}
    message = end_message(reason, **known, **details)
    if reason is EndReason.EXIT_CODE and (sent := sent_signal(attempt, task.exit_code)):
        actor_name = sent.actor.username if sent.actor else "–"
        message += " " + stored_text(f"The portal had sent {sent.signal}, as {actor_name} requested.")
    return message


def record_failure_cause(attempt: Attempt, cause: str) -> None:
    """Add a text to what an attempt's end wrote. Must run in a transaction, before ``send_failure_notices``.

    The log of a workspace is its owner's, but all members see its message: it stays unchanged.
    """
    job = Job.objects.select_for_update(no_key=True).get(pk=attempt.job_id)
    end = attempt.message
    is_newest = job.attempt_count == attempt.number
    if is_newest and end and end in job.message and job.kind != JobKind.WORKSPACE.value:
        before = job.message
        if len(cause) > MAX_CAUSE_CHARACTERS:
            cause = f"{cause[: MAX_CAUSE_CHARACTERS - 1]}…"
        job.message = before.replace(end, f"{end} {cause}", 1)[:1000]
        job.save(update_fields=["message"])
        _end_notices(attempt).filter(message=before).update(message=job.message)
        publish_all_on_commit(job_topic_events(job))


def send_failure_notices(attempt: Attempt) -> None:
    """Send the mails and webhooks about an attempt's end that wait for its cause. Must run in a transaction."""
    send_held(_end_notices(attempt), CAUSE_WAIT)


def _end_notices(attempt: Attempt) -> QuerySet[Notice]:
    return Notice.objects.filter(
        job=attempt.job_id, kind__in=_END_NOTICES, created_at__gte=attempt.ended_at or attempt.created_at
    )
