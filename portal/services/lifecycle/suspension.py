"""Suspends a job, which releases its GPUs and keeps its files, and resumes it with a new attempt.

Users or the idle policy suspend a job; it waits until a user resumes it. Its GPUs are released only when its
node has proved that the container is gone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from django.db import transaction
from django.utils.translation import gettext as _

from portal.domain.jobs.end_states import PREEMPTION_REASONS, is_retried
from portal.domain.jobs.failure_rules import PROGRAM_FAILURES
from portal.domain.jobs.reasons import EndReason
from portal.domain.states import TERMINAL_JOB_STATES, DesiredState, JobState
from portal.domain.stored_texts import stored_text
from portal.errors import Conflict
from portal.models import Attempt, Job, JobEvent, JobVerdict
from portal.outbox import trigger_cycle
from portal.services.lifecycle.attempt_end import apply_gpu_switch
from portal.services.lifecycle.job_control import lock_live_attempt, request_stop
from portal.services.lifecycle.state_events import publish_job_state
from portal.services.lifecycle.transitions import transition_job

RESUMED_REASON = "resumed"


def suspend_job(job_id: int, *, actor: str, message: str = "", only_attempt: int | None = None) -> Job:
    """Suspend a job: at once if it holds no GPUs, else when its nodes have proved the end. Repeatable.

    With ``only_attempt`` (id) nothing happens unless this attempt is live and not stopping, so that an
    outdated decision does not affect a later attempt. Raise Conflict if the job has ended, is about to end,
    or could not be resumed.
    """
    with transaction.atomic():
        job = Job.objects.select_for_update(of=("self",), no_key=True).get(pk=job_id)
        attempt = lock_live_attempt(job)
        if only_attempt is not None and (
            attempt is None or attempt.pk != only_attempt or attempt.stop_requested_at is not None
        ):
            return job
        if job.desired_state == DesiredState.SUSPENDED:
            return job
        if job.state in TERMINAL_JOB_STATES or job.desired_state == DesiredState.CANCELLED:
            raise Conflict(_("It has ended or is stopping."), code="job_ended")
        if attempt is not None and attempt.stop_reason and not _job_survives_stop(job, attempt):
            raise Conflict(_("It is stopping."), code="job_ended")
        if job.is_placeholder:
            raise Conflict(_("It was adopted from a container and could not be resumed."), code="job_unknown")
        message = message or stored_text(f"Suspended by {actor}; its files are kept.")
        job.desired_state = DesiredState.SUSPENDED.value
        job.version += 1
        job.save(update_fields=["desired_state", "version"])
        if attempt is None:
            JobVerdict.objects.filter(job=job).delete()
            transition_job(job, JobState.SUSPENDED, reason=EndReason.SUSPENDED, message=message, actor=actor)
        else:
            request_stop(attempt.pk, EndReason.SUSPENDED, actor=actor, message=message)
            job.refresh_from_db()
            publish_job_state(job)
        return job


def resume_job(job_id: int, *, actor: str) -> Job:
    """Return a suspended job to the queue with its earlier queue age.

    A job that is still stopping becomes pending when it has stopped. Raise Conflict if the job is not
    suspended.
    """
    with transaction.atomic():
        job = Job.objects.select_for_update(of=("self",), no_key=True).get(pk=job_id)
        if job.desired_state != DesiredState.SUSPENDED or job.state in TERMINAL_JOB_STATES:
            raise Conflict(
                _("It is {state}, not suspended.").format(state=job.state.lower()), code="job_not_suspended"
            )
        job.desired_state = DesiredState.RUN.value
        message = stored_text(f"Resumed by {actor}.")
        if job.state == JobState.SUSPENDED:
            transition_job(job, JobState.PENDING, reason=RESUMED_REASON, message=message, actor=actor)
        else:
            job.version += 1
            job.save(update_fields=["desired_state", "version"])
            JobEvent.objects.create(job=job, kind=RESUMED_REASON, actor=actor, message=message)
            publish_job_state(job)
            trigger_cycle("requeue")
        return job


def switch_gpus(job_id: int, columns: Mapping[str, Any], *, actor: str, message: str) -> Job:
    """Change the GPU request of a workspace, which restarts with the same home and address. Repeatable.

    A live attempt is stopped as by a suspension, and ``columns`` of the job change when its end is proved: until
    then it holds the GPUs that it requested. A suspended or pending workspace changes at once. Raise Conflict if it
    has ended, is about to end, or could not be resumed.
    """
    with transaction.atomic():
        job = Job.objects.select_for_update(of=("self",), no_key=True).get(pk=job_id)
        was_suspended = job.desired_state == DesiredState.SUSPENDED
        if lock_live_attempt(job) is not None and not was_suspended:
            suspend_job(job_id, actor=actor, message=message)
            resume_job(job_id, actor=actor)
        elif job.state in TERMINAL_JOB_STATES or job.desired_state == DesiredState.CANCELLED:
            raise Conflict(_("It has ended or is stopping."), code="job_ended")
        elif was_suspended:
            resume_job(job_id, actor=actor)
        job.refresh_from_db()
        job.gpu_switch = dict(columns)
        fields = ["gpu_switch", "version"]
        if lock_live_attempt(job) is None:
            fields += apply_gpu_switch(job)
            JobVerdict.objects.filter(job=job).delete()
        job.version += 1
        job.save(update_fields=fields)
        JobEvent.objects.create(job=job, kind="edited", actor=actor, message=message)
        publish_job_state(job)
        trigger_cycle("requeue")
        return job


def _job_survives_stop(job: Job, attempt: Attempt) -> bool:
    """Return True if the job would be pending again after its stopping attempt has ended."""
    reason = EndReason(attempt.stop_reason)
    if reason in PREEMPTION_REASONS or reason is EndReason.SUSPENDED:
        return True
    if job.apply_failure_actions and reason in PROGRAM_FAILURES:
        return True
    return is_retried(reason, attempt.exit_code, job.retry_on, job.retry_exit_codes)
