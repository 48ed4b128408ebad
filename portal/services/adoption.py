"""Attempts that run on their nodes and that the record forgot, when it was restored from a backup, are adopted."""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from dataclasses import dataclass

from django.db.models import F
from django.utils import timezone

from portal.errors import Conflict
from portal.models import Attempt, Job, Standing, Task
from portal.services.holdings import give_gpus, take_running_gpus
from portal.services.lifecycle import Seat
from portal.services.steps import move_attempt, move_job, move_task
from portal.words.states import ATTEMPT_LIVE, JOB_ENDS, AttemptState, JobKind, JobState


@dataclass(frozen=True)
class Found:
    """A rank that runs already: where, with which GPUs, under which name, since when."""

    rank: int
    seat: Seat
    container: str
    ports: dict[str, int]
    started_at: dt.datetime


def adopt_attempt(job: Job, number: int, found: Sequence[Found], *, actor: str, sentence: str) -> Attempt:
    """Takes an attempt into the record that runs on its nodes and was forgotten by a restore.

    ``job`` must be locked by the caller. Ranks of an attempt that is adopted already join it. The GPUs count
    from now on. Raises Conflict when the job cannot run that attempt any more, or when the record still
    promises one of its GPUs to somebody else (I1).
    """
    now = timezone.now()
    attempt = job.attempts.select_for_update(no_key=True).filter(number=number).first()
    if attempt is None:
        _check_may_adopt(job)
        first = min(found, key=lambda each: each.rank)
        attempt = Attempt.objects.create(
            job=job,
            number=number,
            pool=first.seat.node.pool,
            leader_epoch=0,
            sent_at=now,
            running_at=min(each.started_at for each in found),
            # nobody probes it: what its server would be asked with was in the record that is lost
            ready_at=now if job.kind == JobKind.WORKSPACE.value else None,
        )
        job.attempts_made = max(job.attempts_made, number)
        job.started_at = job.started_at or attempt.running_at
        job.exit_code = None
        Standing.objects.filter(job=job).delete()
        move_job(job, JobState.RUNNING, reason="kept", sentence=sentence, attempt=attempt, actor=actor)
        move_attempt(attempt, AttemptState.RUNNING, "kept", sentence, actor)
    elif attempt.state not in ATTEMPT_LIVE:
        raise Conflict(
            f"The record knows that attempt {number} of {job.name} has ended; it can only be stopped.",
            code="attempt_ended",
        )
    take_running_gpus(share for each in found for share in each.seat.gpus)
    for each in sorted(found, key=lambda each: each.rank):
        task = Task.objects.create(
            attempt=attempt,
            rank=each.rank,
            node=each.seat.node,
            container=each.container,
            ports=each.ports,
            running_at=each.started_at,
        )
        move_task(task, AttemptState.RUNNING)
        give_gpus([(task, attempt.pool, each.seat.gpus)], now)
    return attempt


def skip_attempts(job_id: str, number: int) -> None:
    """Makes the next attempt of a job (public id) come after ``number``, which its node never starts again."""
    Job.objects.filter(public_id=job_id, attempts_made__lt=number).update(
        attempts_made=number, version=F("version") + 1
    )


def _check_may_adopt(job: Job) -> None:
    """Raises Conflict for a job that has ended, or of which another attempt runs by the record."""
    if job.state == JobState.PENDING:
        return
    if job.state in JOB_ENDS:
        sentence = (
            f"The record knows that {job.name} has ended ({job.state.lower()}); it can only be stopped."
        )
        raise Conflict(sentence, code="job_ended")
    live = job.attempts.filter(state__in=ATTEMPT_LIVE).first()
    raise Conflict(
        f"The record still holds {'attempt ' + str(live.number) if live else 'another attempt'} of {job.name} "
        "as running. Once the end of that is proved, this one can be kept.",
        code="job_runs",
    )
