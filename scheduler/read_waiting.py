"""Reads the jobs that wait out of the record, as rows of a photograph."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from agents.launchers import NEED_THE_OTHERS
from portal.models import Job
from portal.words.ends import OWN_FAILURES, pause_s
from portal.words.reasons import EndReason
from portal.words.states import Desired, JobState
from scheduler.album import Built, Known, blocks_of
from scheduler.awaited import waits_of
from scheduler.core.cluster import (
    WHOLE_MILLI,
    JobId,
    NodeId,
    PendingRow,
    PoolId,
    PoolRow,
    ProjectId,
    UserId,
)
from scheduler.keeps import kept_tasks
from scheduler.read_running import Seconds, home_of, min_tasks_of, near_of
from scheduler.unfit import Unfit

_WAITING = Job.objects.filter(state=JobState.PENDING.value, desired=Desired.RUN.value)
_PAUSED_AFTER = OWN_FAILURES | {
    EndReason.START_REFUSED,
    EndReason.IMAGE_MISSING,
    EndReason.DISK_FULL,
    EndReason.NODES_APART,
}


def read_waiting(
    pools: tuple[PoolRow, ...],
    unfit: Unfit,
    homes: dict[str, NodeId],
    known: Known[dict[str, Any]],
    built: Built[dict[str, Any], PendingRow],
) -> tuple[tuple[PendingRow, ...], dict[int, dict[str, Any]]]:
    """Waiting jobs, and their columns by row number in the same order.

    Nodes that can never run a job are among those it avoids.
    """
    every_pool = tuple(pool.id for pool in pools)
    avoided: dict[int, list[str]] = defaultdict(list)
    for job, node in Job.avoid_nodes.through.objects.filter(job__in=_WAITING).values_list(
        "job_id", "node__public_id"
    ):
        avoided[job].append(node)
    waiting = known.read_blocks(
        blocks_of(
            "portal_job", "id", "state = %s AND desired = %s", [JobState.PENDING.value, Desired.RUN.value]
        ),
        read_rows,
    )

    def make(id_: int, row: dict[str, Any]) -> PendingRow:
        home = home_of(row["kind"], row["owner__public_id"], homes)
        meets = bool(launcher_of(row["tasks"], row["launcher"]))
        cannot = unfit.nodes(
            row["environment_id"],
            row["gpus_per_task"],
            shares=row["milli_per_gpu"] < WHOLE_MILLI,
            gang=row["tasks"] > 1 and min_tasks_of(row["tasks"], row["min_tasks"]) is None,
            meets=meets,
            volumes=row["volumes"],
            project=row["project__public_id"],
        )
        cuda = unfit.cuda_of(row["environment_id"], row["gpus_per_task"])
        return pending_row(row, every_pool, cannot, avoided.get(id_, []), home, cuda)

    def without(_: int, row: dict[str, Any]) -> PendingRow:
        return pending_row(typed_columns(row), every_pool, (), [], None)

    pending = built.of(waiting, (every_pool, unfit, homes, dict(avoided)), make, without)
    if waits := waits_of(_WAITING):
        told = zip(waiting, pending, strict=True)
        pending = tuple(waits[id_].told(row) if id_ in waits else row for id_, row in told)
    return pending, waiting


def typed_columns(row: dict[str, Any]) -> dict[str, Any]:
    """A job's columns without its JSON, of which some cannot be read."""
    return row | {"near": None, "volumes": [], "kept": None}


def read_rows(jobs: Sequence[int] | None) -> Iterator[tuple[int, dict[str, Any]]]:
    """Columns of jobs by row number, as ``pending_row`` wants them; None is all that wait."""
    chosen = _WAITING if jobs is None else Job.objects.filter(pk__in=jobs)
    for row in chosen.annotate(submitted_s=Seconds("submitted_at"), queued_s=Seconds("queued_at")).values(
        "id",
        "public_id",
        "name",
        "kind",
        "held",
        "version",
        "submitted_s",
        "queued_s",
        "reason",
        "attempts_made",
        "kept",
        "priority",
        "preemptible",
        "tasks",
        "min_tasks",
        "gpus_per_task",
        "milli_per_gpu",
        "gpu_model",
        "min_gpu_memory_mib",
        "near",
        "mig_profile",
        "min_compute_capability",
        "cpu_milli",
        "memory_mib",
        "time_limit_s",
        "project__public_id",
        "owner__public_id",
        "pool__public_id",
        "environment_id",
        "launcher",
        "volumes",
        "secrets",
        "owner_id",
        "project_id",
    ):
        yield row["id"], dict(row)


def pending_row(
    row: dict[str, Any],
    every_pool: tuple[PoolId, ...],
    avoid: tuple[NodeId, ...],
    avoided: list[str],
    home: NodeId | None,
    cuda: str = "",
) -> PendingRow:
    """One waiting job as the decision sees it; ``avoid`` are the nodes that cannot run its environment."""
    return PendingRow(
        job=JobId(row["public_id"]),
        name=row["name"],
        project=ProjectId(row["project__public_id"]),
        user=UserId(row["owner__public_id"]),
        pools=(PoolId(row["pool__public_id"]),) if row["pool__public_id"] else every_pool,
        submitted_s=row["submitted_s"],
        priority=row["priority"],
        preemptible=row["preemptible"],
        tasks=row["tasks"],
        min_tasks=min_tasks_of(row["tasks"], row["min_tasks"]),
        gpus_per_task=row["gpus_per_task"],
        milli_per_gpu=row["milli_per_gpu"],
        gpu_model=row["gpu_model"] or None,
        min_gpu_memory_mib=row["min_gpu_memory_mib"],
        cpu_milli=row["cpu_milli"],
        memory_mib=row["memory_mib"],
        time_limit_s=row["time_limit_s"],
        held=row["held"],
        not_before_s=_not_before_s(row),
        avoid_nodes=(*avoid, *map(NodeId, avoided)) if avoided else avoid,
        unfit_nodes=avoid,
        node_affinity=home,
        cuda=cuda,
        version=row["version"],
        kept=kept_tasks(row["kept"], row["cpu_milli"], row["memory_mib"]),
        near=near_of(row["near"]),
        mig_profile=row["mig_profile"] or None,
        min_compute_capability=row["min_compute_capability"],
        launcher=launcher_of(row["tasks"], row["launcher"]),
    )


def launcher_of(tasks: int, launcher: str) -> str | None:
    """The launcher of a job whose tasks must reach each other; None where they need not."""
    return launcher if tasks > 1 and launcher in NEED_THE_OTHERS else None


def _not_before_s(row: dict[str, Any]) -> float | None:
    """When a job whose last start failed may be tried again."""
    if row["reason"] not in _PAUSED_AFTER:
        return None
    return float(row["queued_s"] + pause_s(row["attempts_made"]))
