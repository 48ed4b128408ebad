"""Books the GPU time of an attempt when it ends: start-up, useful and lost work. Append-only."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from portal.domain.jobs.lost_work import HeldGpu, loss_cause, split_work
from portal.domain.jobs.reasons import EndReason
from portal.domain.states import JobKind
from portal.models import Allocation, Attempt, AttemptWork
from portal.selectors.jobs.checkpoints import last_checkpoint


def record_work(ended: Sequence[tuple[Attempt, EndReason]]) -> None:
    """Write the rows of attempts that end now, in the caller's transaction; none for jobs without GPUs.

    All time of a workspace or service since its start is useful.
    """
    ended_at = {each.pk: each.ended_at for each, _ in ended if each.job.total_gpus and each.ended_at}
    held: dict[int, list[HeldGpu]] = defaultdict(list)
    rows = Allocation.objects.filter(task__attempt__in=ended_at)
    columns = ("task__attempt_id", "milli", "started_at", "ended_at")
    for attempt_id, milli, start, end in rows.values_list(*columns):
        held[attempt_id].append(HeldGpu(milli, start, max(start, end or ended_at[attempt_id])))
    work = []
    for attempt, reason in ended:
        if attempt.pk not in ended_at:
            continue
        job = attempt.job
        completed = reason is EndReason.COMPLETED or job.kind != JobKind.TRAINING.value
        saved = None if completed else last_checkpoint(attempt)
        saved_at = attempt.ended_at if completed else saved and saved.at
        split = split_work(held[attempt.pk], attempt.running_at, saved_at)
        work.append(
            AttemptWork(
                attempt=attempt,
                project_id=job.project_id,
                user_id=job.owner_id,
                pool_id=attempt.pool_id,
                ended_at=ended_at[attempt.pk],
                cause="" if completed else loss_cause(reason).value,
                startup_gpu_s=split.startup,
                useful_gpu_s=split.useful,
                lost_gpu_s=split.lost,
            )
        )
    AttemptWork.objects.bulk_create(work)
