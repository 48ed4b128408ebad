"""Adopts attempts that run on nodes but are missing from a database restored from a backup."""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence

from django.db.models import F
from django.utils import timezone
from django.utils.translation import gettext as _

from portal.domain.states import LIVE_ATTEMPT_STATES, TERMINAL_JOB_STATES, AttemptState, JobKind, JobState
from portal.errors import Conflict
from portal.models import Attempt, Job, JobVerdict, OrphanContainer, Task
from portal.services.lifecycle.allocations import allocate_running_gpus, create_allocations
from portal.services.lifecycle.transitions import AttemptChange, transition_attempts, transition_job
from portal.services.reports.report_days import forget_report_days

Gpus = Sequence[tuple[int, int]]
"""GPUs by id, with milli."""


def adopt_attempt(
    job: Job, number: int, found: Sequence[tuple[OrphanContainer, Gpus]], *, actor: str, message: str
) -> Attempt:
    """Create the row of an attempt that runs on its nodes and is missing after a restore.

    ``found`` are its containers and their GPUs; ``job`` must be locked by the caller. Further ranks join an
    adopted attempt. Its GPUs are accounted from now on. Raise Conflict if the job cannot have this attempt any
    more, or if one of its GPUs is allocated otherwise (I1).
    """
    now = timezone.now()
    attempt = job.attempts.select_for_update(no_key=True).filter(number=number).first()
    if attempt is None:
        _check_adoptable(job)
        first = min((row for row, _ in found), key=lambda row: row.rank)
        began_at = min(row.started_at or row.first_seen_at for row, _ in found)
        attempt = Attempt.objects.create(
            job=job,
            number=number,
            pool=first.node.pool,
            leader_epoch=0,
            start_sent_at=now,
            running_at=began_at,
            # not probed: the secret of its server is lost
            ready_at=now if job.kind == JobKind.WORKSPACE.value else None,
        )
        job.attempt_count = max(job.attempt_count, number)
        job.started_at = job.started_at or began_at
        job.exit_code = None
        JobVerdict.objects.filter(job=job).delete()
        transition_job(job, JobState.RUNNING, reason="kept", message=message, attempt=attempt, actor=actor)
        forget_report_days([began_at.astimezone(dt.UTC).date()])  # its first start may be on an earlier day
        transition_attempts([AttemptChange(attempt, AttemptState.RUNNING, "kept", message, actor)])
    elif attempt.state not in LIVE_ATTEMPT_STATES:
        message = _(
            "Attempt {number} of {name} has already ended; the container can only be stopped."
        ).format(number=number, name=job.name)
        raise Conflict(message, code="attempt_ended")
    allocate_running_gpus(share for _, gpus in found for share in gpus)
    for row, gpus in sorted(found, key=lambda each: each[0].rank):
        task = Task.objects.create(
            attempt=attempt,
            rank=row.rank,
            node=row.node,
            state=AttemptState.RUNNING.value,
            container=row.name,
            ports=row.ports,
            running_at=row.started_at or row.first_seen_at,
        )
        create_allocations([(task, attempt.pool, gpus)], now)
    return attempt


def advance_attempt_number(job_id: str, number: int) -> None:
    """Make the next attempt of a job (public id) come after ``number``, which its node never starts again."""
    Job.objects.filter(public_id=job_id, attempt_count__lt=number).update(
        attempt_count=number, version=F("version") + 1
    )


def _check_adoptable(job: Job) -> None:
    """Raise Conflict if the job has ended or another attempt of it is live."""
    if job.state == JobState.PENDING:
        return
    if job.state in TERMINAL_JOB_STATES:
        message = _("{name} has already ended ({state}); the container can only be stopped.").format(
            name=job.name, state=job.state.lower()
        )
        raise Conflict(message, code="job_ended")
    live = job.attempts.filter(state__in=LIVE_ATTEMPT_STATES).first()
    text = (
        _(
            "Attempt {number} of {name} is still running in the database. When its end is proved, this container "
            "can be adopted."
        )
        if live
        else _(
            "Another attempt of {name} is still running in the database. When its end is proved, this container "
            "can be adopted."
        )
    )
    raise Conflict(
        text.format(number=live.number if live else 0, name=job.name),
        code="job_running",
    )
