"""Suspending a job, which gives its GPUs back and keeps the rest, and resuming it: the same job, a new attempt.

A chapter of ``lifecycle`` with its rules. Suspended is what a person, or the idle rule, wants of a job: it waits
until somebody resumes it. Its GPUs are free once its node has proved that the container is gone, and not before.
"""

from __future__ import annotations

from django.db import transaction

from portal.errors import Conflict
from portal.models import Attempt, Job, JobEvent, Standing
from portal.services.lifecycle import want_stop
from portal.services.steps import move_job, tell_job
from portal.wake import wake
from portal.words.ends import GIVEN_BACK, RETRIED
from portal.words.reasons import EndReason
from portal.words.states import ATTEMPT_LIVE, JOB_ENDS, Desired, JobState

RESUMED = "resumed"


def suspend(job_id: int, *, actor: str, sentence: str = "", only_attempt: int | None = None) -> Job:
    """Suspends a job: at once when it holds nothing, else once its nodes let go. Repeatable.

    ``only_attempt`` (row number): nothing happens unless this attempt is the live one and nobody asked it to stop;
    what was decided on an earlier look does not hit what came after. Raises Conflict for a job that has ended, is
    about to, or could not start again.
    """
    with transaction.atomic():
        job = Job.objects.select_for_update(of=("self",), no_key=True).get(pk=job_id)
        attempt = (
            Attempt.objects.select_for_update(no_key=True).filter(job=job, state__in=ATTEMPT_LIVE).first()
        )
        if only_attempt is not None and (
            attempt is None or attempt.pk != only_attempt or attempt.stop_wanted_at is not None
        ):
            return job
        if job.desired == Desired.SUSPENDED:
            return job
        if job.state in JOB_ENDS or job.desired == Desired.CANCELLED:
            raise Conflict("It has ended, or is about to.", code="job_ended")
        if attempt is not None and attempt.stop_reason and not _goes_on_after(EndReason(attempt.stop_reason)):
            raise Conflict("It is about to end.", code="job_ended")
        if job.stub:
            raise Conflict("Only its container is known: it could not be resumed.", code="job_unknown")
        sentence = sentence or f"Suspended by {actor}; its files are kept."
        job.desired = Desired.SUSPENDED.value
        job.version += 1
        job.save(update_fields=["desired", "version"])
        if attempt is None:
            Standing.objects.filter(job=job).delete()
            move_job(job, JobState.SUSPENDED, reason=EndReason.SUSPENDED, sentence=sentence, actor=actor)
        else:
            want_stop(attempt.pk, EndReason.SUSPENDED, actor=actor, sentence=sentence)
            tell_job(job)
        job.refresh_from_db()
        return job


def resume(job_id: int, *, actor: str) -> Job:
    """Puts a suspended job back into the queue with the age that it has.

    One that still lets go waits as soon as it has. Raises Conflict for a job that is not suspended.
    """
    with transaction.atomic():
        job = Job.objects.select_for_update(of=("self",), no_key=True).get(pk=job_id)
        if job.desired != Desired.SUSPENDED or job.state in JOB_ENDS:
            raise Conflict(f"It is {job.state.lower()}, not suspended.", code="job_not_suspended")
        job.desired = Desired.RUN.value
        sentence = f"Resumed by {actor}."
        if job.state == JobState.SUSPENDED:
            move_job(job, JobState.PENDING, reason=RESUMED, sentence=sentence, actor=actor)
        else:
            job.version += 1
            job.save(update_fields=["desired", "version"])
            JobEvent.objects.create(job=job, kind=RESUMED, actor=actor, sentence=sentence)
            tell_job(job)
            wake("requeue")
        return job


def _goes_on_after(reason: EndReason) -> bool:
    """True when a job would wait again after its attempt was asked to stop for this."""
    return reason in GIVEN_BACK or reason in RETRIED or reason is EndReason.SUSPENDED
