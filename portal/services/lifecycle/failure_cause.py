"""Adds the cause of a failure, which its log names, to the message of the job and to the notices of its end."""

from __future__ import annotations

from portal.domain.notices import NoticeKind
from portal.domain.states import JobKind
from portal.live_events import publish_all_on_commit
from portal.models import Attempt, Job, Notice
from portal.services.lifecycle.state_events import job_topic_events

MAX_CAUSE_CHARACTERS = 300
_END_NOTICES = (NoticeKind.JOB_FAILED.value, NoticeKind.JOB_PREEMPTED.value)


def record_failure_cause(attempt: Attempt, cause: str) -> None:
    """Add a text to what an attempt's end wrote. Must run in a transaction.

    Notices that were sent before stay as they are outside the portal. The log of a workspace is its owner's, but all
    members see its message: it stays unchanged.
    """
    job = Job.objects.select_for_update(no_key=True).get(pk=attempt.job_id)
    end = attempt.message
    is_newest = job.attempt_count == attempt.number
    if is_newest and end and end in job.message and job.kind != JobKind.WORKSPACE.value:
        before = job.message
        job.message = before.replace(end, f"{end} {cause[:MAX_CAUSE_CHARACTERS]}", 1)[:1000]
        job.save(update_fields=["message"])
        notices = Notice.objects.filter(job=job, kind__in=_END_NOTICES, created_at__gte=attempt.ended_at)
        notices.filter(message=before).update(message=job.message)
        publish_all_on_commit(job_topic_events(job))
