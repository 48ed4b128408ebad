"""Reads checkpoints, why each is kept, and what a job would lose if it stopped now."""

from __future__ import annotations

import datetime as dt
import math
from dataclasses import dataclass

from django.db.models import QuerySet
from django.utils import timezone
from django.utils.translation import gettext as _

from portal.access import Requester, visible_jobs
from portal.domain.checkpoints import Validity, newest_valid
from portal.domain.states import AttemptState
from portal.models import Attempt, AttemptObservation, AttemptWork, Checkpoint, Job
from portal.selectors.lookup import get_first


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
    """Return what a running attempt would lose if it stopped now; None if it does not run or has no GPUs."""
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
