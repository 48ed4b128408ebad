"""Allocates and releases GPUs: ``used_milli``, allocations and usage intervals in one transaction.

Rows are locked in id order. A GPU is released only on proof: ``release_gpus`` is the only function that ends
an allocation.
"""

from __future__ import annotations

import datetime as dt
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

from django.db.models import F
from django.utils import timezone
from django.utils.translation import gettext as _

from portal.errors import Conflict
from portal.models import Allocation, Gpu, NodePool, Task, UsageInterval
from portal.selectors.scheduling.settings import effective_pool_settings

WHOLE_GPU_MILLI = 1000


def allocate_gpus(shares: Iterable[tuple[int, int, int]]) -> None:
    """Add to ``used_milli`` for each (GPU id, milli, project id), locked in order.

    Raise Conflict if a GPU accepts no work, or if projects that must not share a GPU would.
    """
    asked = list(shares)
    wanted = _milli_by_gpu((gpu, milli) for gpu, milli, _ in asked)
    held = Gpu.objects.select_for_update(no_key=True).filter(pk__in=wanted).order_by("pk").in_bulk()
    for gpu in wanted:
        row = held.get(gpu)
        if row is None or row.health != "ok" or not row.present:
            raise Conflict(
                _("GPU {gpu} is not healthy.").format(gpu=row.uuid if row else gpu), code="gpu_not_healthy"
            )
        if row.foreign_process_owner:
            message = _("GPU {uuid} is used by a process of {foreign_process_owner}.").format(
                uuid=row.uuid, foreign_process_owner=row.foreign_process_owner
            )
            raise Conflict(message, code="gpu_busy_foreign_process")
    _check_gpu_sharing_scope(asked)
    _add_used_milli(wanted)


def _check_gpu_sharing_scope(requested: Iterable[tuple[int, int, int]]) -> None:
    """Raise Conflict for partial GPUs shared with another project, if the policy forbids it.

    GPUs must be locked.
    """
    projects: dict[int, set[int]] = defaultdict(set)
    for gpu, milli, project in requested:
        if milli < WHOLE_GPU_MILLI:
            projects[gpu].add(project)
    if not projects:
        return
    standing = Allocation.objects.filter(gpu__in=projects, ended_at__isnull=True, milli__lt=WHOLE_GPU_MILLI)
    for gpu, project in standing.values_list("gpu_id", "task__attempt__job__project_id"):
        projects[gpu].add(project)
    mixed = Gpu.objects.filter(pk__in=[gpu for gpu, found in projects.items() if len(found) > 1])
    rows = list(mixed.select_related("node__pool"))
    settings = effective_pool_settings({row.node.pool for row in rows}) if rows else {}
    for row in rows:
        if settings[row.node.pool_id]["gpu_sharing_scope"] != "any":
            raise Conflict(
                _("GPU {uuid} is shared by another project.").format(uuid=row.uuid),
                code="gpu_shared_elsewhere",
            )


def allocate_running_gpus(shares: Iterable[tuple[int, int]]) -> None:
    """Add to ``used_milli`` for (GPU id, milli) already in use by a running task, whatever the GPU's health.

    Raise Conflict, naming the holder, if a GPU has too little left.
    """
    wanted = _milli_by_gpu(shares)
    rows = Gpu.objects.select_for_update(of=("self",), no_key=True).select_related("node").order_by("pk")
    for row in rows.filter(pk__in=wanted):
        if row.used_milli + wanted[row.pk] > 1000:
            held = Allocation.objects.filter(gpu=row, ended_at__isnull=True).select_related(
                "task__attempt__job"
            )
            names = ", ".join(sorted({one.task.attempt.job.name for one in held}))
            raise Conflict(
                _(
                    "GPU {index} of {name} is still allocated to {names}. When its end is proved, or it "
                    "is cancelled, this container can be adopted."
                ).format(index=row.index, name=row.node.name, names=names),
                code="gpu_taken",
                details={"gpu": row.uuid, "used_milli": row.used_milli},
            )
    _add_used_milli(wanted)


def create_allocations(
    placed: Sequence[tuple[Task, NodePool, Sequence[tuple[int, int]]]], now: dt.datetime
) -> None:
    """Create allocations and usage intervals of tasks; ``used_milli`` must already include them."""
    made = [
        (Allocation(task=task, gpu_id=gpu, milli=milli, whole=milli == 1000, started_at=now), pool)
        for task, pool, gpus in placed
        for gpu, milli in gpus
    ]
    Allocation.objects.bulk_create(allocation for allocation, _ in made)
    UsageInterval.objects.bulk_create(
        UsageInterval(
            allocation=allocation,
            project_id=allocation.task.attempt.job.project_id,
            user_id=allocation.task.attempt.job.owner_id,
            pool=pool,
            job=allocation.task.attempt.job,
            milli=allocation.milli,
            started_at=now,
        )
        for allocation, pool in made
    )


def release_gpus(proofs: Mapping[Task, str]) -> None:
    """End the allocations of tasks, each with its proof, and free their GPUs."""
    now = timezone.now()
    rows = Allocation.objects.filter(task__in=proofs, ended_at__isnull=True).values_list(
        "pk", "task_id", "gpu_id", "milli"
    )
    held = list(rows)
    freed = _milli_by_gpu((gpu, -milli) for _, _, gpu, milli in held)
    list(Gpu.objects.select_for_update(no_key=True).filter(pk__in=freed).order_by("pk").values_list("pk"))
    _add_used_milli(freed)
    by_proof: dict[str, list[int]] = defaultdict(list)
    proof_of = {task.pk: proof for task, proof in proofs.items()}
    for allocation, task, *__ in held:
        by_proof[proof_of[task]].append(allocation)
    for proof, ids in by_proof.items():
        Allocation.objects.filter(pk__in=ids).update(ended_at=now, proof=proof)
    UsageInterval.objects.filter(allocation__in=[row[0] for row in held]).update(ended_at=now)
    Task.objects.filter(pk__in=proof_of).update(container_removed=True)


def _milli_by_gpu(shares: Iterable[tuple[int, int]]) -> Counter[int]:
    sums: Counter[int] = Counter()
    for gpu, milli in shares:
        sums[gpu] += milli
    return sums


def _add_used_milli(delta_by_gpu: Counter[int]) -> None:
    """Change ``used_milli`` of locked rows, with one query per distinct amount."""
    by_milli: dict[int, list[int]] = {}
    for gpu, milli in delta_by_gpu.items():
        by_milli.setdefault(milli, []).append(gpu)
    for milli, gpus in by_milli.items():
        Gpu.objects.filter(pk__in=gpus).update(used_milli=F("used_milli") + milli)
