"""Books the GPU time of an attempt when it ends: start-up, useful and lost work. Append-only."""

from __future__ import annotations

import datetime as dt

from portal.domain.checkpoints import Validity
from portal.domain.lost_work import HeldGpu, loss_cause, split_work
from portal.domain.reasons import EndReason
from portal.domain.states import JobKind
from portal.models import Allocation, Attempt, AttemptWork, Checkpoint, Job


def record_work(attempt: Attempt, job: Job, reason: EndReason) -> None:
    """Write the row of an attempt that ends now, in the caller's transaction; none for a job without GPUs.

    All time of a workspace or service since its start is useful.
    """
    ended_at = attempt.ended_at
    if not job.total_gpus or ended_at is None:
        return
    completed = reason is EndReason.COMPLETED or job.kind != JobKind.TRAINING.value
    rows = Allocation.objects.filter(task__attempt=attempt).values_list("milli", "started_at", "ended_at")
    held = [HeldGpu(milli, start, max(start, end or ended_at)) for milli, start, end in rows]
    saved_at = ended_at if completed else last_saved_at(attempt)
    split = split_work(held, attempt.running_at, saved_at)
    AttemptWork.objects.create(
        attempt=attempt,
        project_id=job.project_id,
        user_id=job.owner_id,
        pool_id=attempt.pool_id,
        ended_at=ended_at,
        cause="" if completed else loss_cause(reason).value,
        startup_gpu_s=split.startup,
        useful_gpu_s=split.useful,
        lost_gpu_s=split.lost,
    )


def last_saved_at(attempt: Attempt) -> dt.datetime | None:
    """Return when the newest valid checkpoint of its job was saved, or its report if none is listed."""
    listed = list(Checkpoint.objects.filter(job=attempt.job_id).values_list("validity", "saved_at"))
    if not listed:
        return attempt.checkpoint_at
    return max((saved_at for validity, saved_at in listed if validity == Validity.VALID), default=None)
