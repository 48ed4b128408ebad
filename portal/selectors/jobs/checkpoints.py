"""Reads checkpoints, why each is kept, and what a job would lose if it stopped now."""

from __future__ import annotations

import datetime as dt
import math
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import NamedTuple

from django.db.models import QuerySet
from django.utils import timezone
from django.utils.translation import gettext as _

from portal.access import Requester, visible_jobs
from portal.domain.jobs.checkpoints import Validity, newest_valid
from portal.domain.states import TERMINAL_JOB_STATES, AttemptState, JobState
from portal.models import Attempt, AttemptObservation, AttemptProgress, AttemptWork, Checkpoint, Job
from portal.selectors.lookup import get_first

INTERVALS_READ = 5
"""Latest intervals between checkpoints from which the next one is predicted."""


def attempt_observation(attempt: Attempt) -> AttemptObservation | None:
    """Return what nodes observed of an attempt, or None. Lists should join ``observation``."""
    return getattr(attempt, "observation", None)


def stalled_since(attempt: Attempt) -> dt.datetime | None:
    """Return since when a live attempt is stalled, or None."""
    seen = attempt_observation(attempt)
    return seen.stalled_at if seen and attempt.ended_at is None else None


def attempt_work(attempt: Attempt) -> AttemptWork | None:
    """Return the booked GPU time of an ended attempt, or None. Lists should join ``work``."""
    return getattr(attempt, "work", None)


def job_checkpoints(job: Job) -> QuerySet[Checkpoint]:
    """Return the checkpoints of a job, newest first."""
    return job.checkpoints.select_related("job__project", "job__owner")


def get_checkpoint(requester: Requester, public_id: str) -> Checkpoint:
    """Return the checkpoint. Raise NotFound if it does not exist or its job is not visible."""
    rows = Checkpoint.objects.select_related("job__project", "job__owner", "job__environment", "job__pool")
    rows = rows.filter(public_id=public_id, job__in=visible_jobs(requester))
    return get_first(rows, _("There is no such checkpoint."))


def kept_because(job: Job, rows: list[Checkpoint]) -> dict[str, str]:
    """Return why each checkpoint is kept, by name."""
    valid = [row for row in rows if row.validity == Validity.VALID]
    newest = newest_valid(rows)
    last = {row.name for row in valid[: job.checkpoint_keep_last or 0]}
    found = {}
    for row in rows:
        every = job.checkpoint_keep_every
        reasons = [
            row.problem,
            _("newest") if newest is not None and row.pk == newest.pk else "",
            _("newest {checkpoint_keep_last}").format(checkpoint_keep_last=job.checkpoint_keep_last)
            if row.name in last and row != newest
            else "",
            _("every {every:,} steps").format(every=every)
            if every and row.step is not None and row.step % every == 0
            else "",
            _("pinned by {pinned_by}").format(pinned_by=row.pinned_by) if row.pinned_at else "",
            _("being deleted") if row.removal_requested_at else "",
        ]
        found[row.name] = "; ".join(filter(None, reasons))
    return found


def next_checkpoint_at(rows: list[Checkpoint], attempt: Attempt | None) -> dt.datetime | None:
    """Return when a running attempt will probably save the next checkpoint: after its median interval.

    ``rows`` are newest first. None before the attempt has saved two.
    """
    if attempt is None or attempt.state != AttemptState.RUNNING or attempt.running_at is None:
        return None
    saved = [row.saved_at for row in rows if row.saved_at >= attempt.running_at][: INTERVALS_READ + 1]
    if len(saved) < 2:
        return None
    interval_s = median((later - earlier).total_seconds() for later, earlier in pairwise(saved))
    return saved[0] + dt.timedelta(seconds=interval_s)


def start_span_s(attempts: list[Attempt]) -> tuple[float, float] | None:
    """Return the shortest and the longest time that an attempt of the job took from its placement until it ran."""
    known = [(each.running_at - each.created_at).total_seconds() for each in attempts if each.running_at]
    known = [each for each in known if each >= 0]
    return (min(known), max(known)) if known else None


@dataclass(frozen=True)
class ResumeChoice:
    """A checkpoint from which a job could go on, and what its running attempt has done since."""

    checkpoint: Checkpoint
    is_live: bool
    dropped_units: float | None
    dropped_gpu_s: float | None


def resume_choice(
    rows: list[Checkpoint], name: str, job: Job, attempt: Attempt | None
) -> ResumeChoice | None:
    """Return the valid checkpoint with the public id ``name``; None if there is none."""
    row = next((each for each in rows if each.public_id == name), None)
    if row is None or row.validity != Validity.VALID or row.removal_requested_at is not None:
        return None
    is_live = JobState(job.state) not in TERMINAL_JOB_STATES
    since = loss_now(job, attempt, row.saved_at)
    progress: AttemptProgress | None = getattr(attempt, "progress", None) if since else None
    units = None if progress is None or row.step is None else progress.completed_units - row.step
    return ResumeChoice(
        row, is_live, units if units is None or units >= 0 else None, since.gpu_seconds if since else None
    )


class LastCheckpoint(NamedTuple):
    at: dt.datetime
    step: int | None


def last_checkpoint(attempt: Attempt) -> LastCheckpoint | None:
    """Return the newest valid checkpoint of its job, or the one it reported if none is listed."""
    listed = list(Checkpoint.objects.filter(job=attempt.job_id).values_list("validity", "saved_at", "step"))
    if not listed:
        at = attempt.checkpoint_at
        return None if at is None else LastCheckpoint(at, attempt.checkpoint_step)
    valid = (LastCheckpoint(at, step) for validity, at, step in listed if validity == Validity.VALID)
    return max(valid, key=lambda each: each.at, default=None)


@dataclass(frozen=True)
class LossNow:
    """What a running attempt would lose: GPU-seconds since ``since``, its last checkpoint or its start."""

    gpu_seconds: float
    gpus: float
    since: dt.datetime
    saved: bool

    @property
    def whole_gpus(self) -> int:
        """Its GPUs rounded up, for the choice between singular and plural."""
        return math.ceil(self.gpus)


def loss_now(job: Job, attempt: Attempt | None, saved_at: dt.datetime | None) -> LossNow | None:
    """Return what a running attempt would lose if it stopped now; None if it does not run or has no GPUs.

    ``saved_at``: when ``last_checkpoint``, or the one from which it would go on, was saved.
    """
    if attempt is None or attempt.state != AttemptState.RUNNING or attempt.running_at is None:
        return None
    milli = sum(
        each.milli
        for task in attempt.task_rows.all()
        for each in task.allocations.all()
        if each.ended_at is None
    )
    if not milli:
        return None
    saved = saved_at is not None and saved_at > attempt.running_at
    since = saved_at if saved and saved_at else attempt.running_at
    seconds = max(0.0, (timezone.now() - since).total_seconds())
    return LossNow(seconds * milli / 1000, milli / 1000, since, saved)
