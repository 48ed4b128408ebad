"""Reads running jobs as snapshot rows."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from django.db.models import Case, F, FloatField, Func, Q, When

from portal.domain.states import LIVE_ATTEMPT_STATES, AttemptState, DesiredState, JobState
from portal.models import (
    Allocation,
    Attempt,
    Job,
    Task,
    Volume,
)
from scheduler.core.model.snapshot import (
    GpuShare,
    GpuUuid,
    JobId,
    NodeId,
    PoolId,
    ProjectId,
    RunningRow,
    RunningTask,
    UserId,
)
from scheduler.core.model.validation import MAX_TASKS
from scheduler.nominations import NominatedPlacement, parse_nomination
from scheduler.snapshot.job_columns import (
    RUNNING_COLUMNS,
    elastic_min_tasks,
    home_node,
    mixes_gpus,
    parse_topology_constraint,
    rank_amounts,
    running_values,
)
from scheduler.snapshot.node_eligibility import IneligibleNodes
from scheduler.snapshot.row_cache import DerivedCache, RowCache, row_versions

_PREEMPTOR_STILL_PENDING = Q(
    preempted_for__state=JobState.PENDING.value,
    preempted_for__desired_state=DesiredState.RUN.value,
    preempted_for__attempt_count=F("preempted_for_attempt"),
)
_LIVE = tuple(state.value for state in LIVE_ATTEMPT_STATES)
_NOMINATABLE_STATES = (JobState.PENDING.value, JobState.RUNNING.value)


class EpochSeconds(Func):
    """A timestamp as seconds since the epoch, which is faster to read than a datetime and may be infinite."""

    template = "EXTRACT(EPOCH FROM %(expressions)s)::float8"
    output_field = FloatField()


@dataclass(frozen=True, eq=False)
class LiveAttempt:
    """An attempt that may hold GPUs: its columns, its job's, and its tasks whose container may exist."""

    row: dict[str, Any]
    tasks: tuple[RunningTask, ...]
    node_ids: tuple[int, ...]
    """Primary keys of the nodes of ``tasks``."""
    min_tasks: int | None = None
    """The fewest tasks it can run with; None when it is not elastic or is ending."""
    missing_ranks: tuple[int, ...] = ()
    """Ranks of the tasks that it is pending for while it runs."""


def read_live_attempts(cache: RowCache[LiveAttempt]) -> dict[int, LiveAttempt]:
    """Return the attempts that may hold GPUs, by primary key.

    Allocations need no version of their own: they start with a task and end with it.
    """
    return cache.refresh(
        row_versions(
            "SELECT attempt.id, concat_ws(' ', attempt.xmin, job.xmin,"
            "       (SELECT xmin FROM portal_job winner WHERE winner.id = attempt.preempted_for_id), tasks.here)"
            "  FROM portal_attempt attempt JOIN portal_job job ON job.id = attempt.job_id"
            "  LEFT JOIN (SELECT attempt_id, string_agg(id::text || ':' || node_id::text, ' ') AS here"
            "               FROM portal_task WHERE NOT container_removed GROUP BY attempt_id) tasks"
            "    ON tasks.attempt_id = attempt.id"
            " WHERE attempt.state = ANY(%s)",
            [list(_LIVE)],
        ),
        _fetch_attempts,
    )


def _fetch_attempts(attempts: Sequence[int] | None) -> Iterator[tuple[int, LiveAttempt]]:
    live = Attempt.objects.filter(state__in=_LIVE)
    chosen = live if attempts is None else live.filter(pk__in=attempts)
    shares: dict[int, list[GpuShare]] = defaultdict(list)
    for task_id, uuid, milli in (
        Allocation.objects.filter(ended_at__isnull=True, task__attempt__in=chosen)
        .order_by("gpu__index")
        .values_list("task_id", "gpu__uuid", "milli")
    ):
        shares[task_id].append(GpuShare(GpuUuid(uuid), milli))
    tasks: dict[int, list[Any]] = defaultdict(list)
    # of elastic jobs also removed tasks, because a replacement gets a new rank
    included = Q(container_removed=False) | Q(attempt__job__min_tasks__isnull=False)
    for task in (
        Task.objects.filter(included, attempt__in=chosen)
        .annotate(stopping=Q(eviction_requested_at__isnull=False))
        .order_by("attempt_id", "rank")
        .values_list(
            "attempt_id", "id", "rank", "node_id", "node__public_id", "container_removed", "state", "stopping",
            named=True,
        )
    ):  # fmt: skip
        tasks[task.attempt_id].append(task)
    preemptor = Case(When(_PREEMPTOR_STILL_PENDING, then=F("preempted_for__public_id")), default=None)
    for row in chosen.annotate(
        preemptor=preemptor,
        created_s=EpochSeconds("created_at"),
        checkpoint_s=EpochSeconds("checkpoint_at"),
        grow_after_s=EpochSeconds("scale_up_after"),
        submitted_s=EpochSeconds("job__submitted_at"),
        stopping=Q(stop_requested_at__isnull=False),
    ).values(
        "id",
        "job_id",
        "created_s",
        "checkpoint_s",
        "stopping",
        "preemptor",
        "failed_tasks",
        "grow_after_s",
        "pool__public_id",
        "job__public_id",
        *RUNNING_COLUMNS,
        "job__project__public_id",
        "job__owner__public_id",
        "job__gpus_per_task",
        "job__milli_per_gpu",
        "job__topology_constraint",
        "submitted_s",
        "job__kind",
        "job__environment_id",
        "job__volumes",
        "job__roles",
        "job__nominated_placement",
        "job__cpu_milli",
        "job__memory_mib",
        "job__tasks",
        "job__min_tasks",
        "job__launcher",
        "job__allow_mixed_gpus",
        "job__max_attempts",
        "job__desired_state",
    ):
        every = tasks[row["id"]]
        live_tasks = [task for task in every if not task.container_removed]
        amounts = rank_amounts(row, "job__")
        elastic = elastic_min_tasks(row["job__tasks"], row["job__min_tasks"]) is not None
        running_tasks = (
            RunningTask(
                NodeId(task.node__public_id),
                tuple(shares.get(task.id, ())),
                *amounts(task.rank),
                rank=task.rank if elastic else None,
                stopping=task.stopping,
            )
            for task in live_tasks
        )
        min_tasks, missing = _elastic_size(dict(row), every) if elastic else (None, ())
        yield (
            row["id"],
            LiveAttempt(
                dict(row),
                tuple(running_tasks),
                tuple(task.node_id for task in live_tasks),
                min_tasks,
                missing,
            ),
        )


def _elastic_size(row: dict[str, Any], tasks: Sequence[Any]) -> tuple[int | None, tuple[int, ...]]:
    """Return the fewest tasks an elastic attempt can run with, and its missing ranks."""
    ends = row["stopping"] or row["job__desired_state"] != DesiredState.RUN.value
    if ends or any(task.state == AttemptState.COMPLETED.value for task in tasks):
        return None, ()
    missing = row["job__tasks"] - sum(not task.container_removed for task in tasks)
    if row["failed_tasks"] >= row["job__max_attempts"] or missing > MAX_TASKS:
        missing = 0
    first = 1 + max((task.rank for task in tasks), default=-1)
    return row["job__min_tasks"], tuple(range(first, first + missing))


def read_avoided_nodes() -> dict[int, list[str]]:
    """Return the nodes (public ids, sorted) that pending and running jobs avoid for a while, by primary key."""
    avoided: dict[int, list[str]] = defaultdict(list)
    rows = Job.avoid_nodes.through.objects.filter(job__state__in=_NOMINATABLE_STATES)
    for job, node in rows.order_by("job_id", "node__public_id").values_list("job_id", "node__public_id"):
        avoided[job].append(node)
    return dict(avoided)


def read_running(
    attempts: dict[int, LiveAttempt],
    ineligible: IneligibleNodes,
    avoided: Mapping[int, list[str]],
    home_nodes: dict[str, NodeId],
    cache: DerivedCache[LiveAttempt, RunningRow],
) -> tuple[RunningRow, ...]:
    """Return the rows of running jobs, with what a new placement must satisfy if a task is moved.

    ``avoided`` are nodes that jobs avoid for a while, by primary key of the job.
    """

    def make(_: int, attempt: LiveAttempt) -> RunningRow:
        row = attempt.row
        home = home_node(row["job__kind"], row["job__owner__public_id"], home_nodes)
        avoid = (*ineligible.for_job(row, "job__"), *map(NodeId, avoided.get(row["job_id"], ())))
        return build_running_row(attempt, avoid, home)

    return cache.map(
        attempts, (ineligible, avoided, home_nodes), make, lambda _, attempt: _build_row_without_json(attempt)
    )


def _build_row_without_json(attempt: LiveAttempt) -> RunningRow:
    """Return the row of a job with invalid JSON: it holds its GPUs and cannot be evicted."""
    row = attempt.row | {"job__topology_constraint": None, "job__nominated_placement": None, "job__roles": []}
    return replace(build_running_row(replace(attempt, row=row), (), None), preemptible=False)


def build_running_row(attempt: LiveAttempt, avoid: tuple[NodeId, ...], home: NodeId | None) -> RunningRow:
    row = attempt.row
    return RunningRow(
        job=JobId(row["job__public_id"]),
        project=ProjectId(row["job__project__public_id"]),
        user=UserId(row["job__owner__public_id"]),
        pool=PoolId(row["pool__public_id"]),
        started_s=row["created_s"],
        tasks=attempt.tasks,
        stopping=row["stopping"],
        preempted_for=JobId(row["preemptor"]) if row["preemptor"] else None,
        checkpoint_s=row["checkpoint_s"],
        topology_constraint=parse_topology_constraint(row["job__topology_constraint"]),
        submitted_s=row["submitted_s"],
        avoid_nodes=avoid,
        node_affinity=home,
        min_tasks=attempt.min_tasks,
        nominated_tasks=_nominated_tasks(attempt),
        allow_mixed_gpus=mixes_gpus(row, "job__"),
        **running_values(row),
    )


def _nominated_tasks(attempt: LiveAttempt) -> tuple[RunningTask, ...]:
    """Return the nominated placement of tasks that are to move or to join.

    The nomination of a task that ended passes to its replacement, which has another rank.
    """
    row = attempt.row
    kept = parse_nomination(row["job__nominated_placement"], rank_amounts(row, "job__"))
    if not attempt.missing_ranks:
        return kept
    known = {task.rank for task in attempt.tasks} | {*attempt.missing_ranks}
    taken = {task.rank for task in kept}
    free = iter([rank for rank in attempt.missing_ranks if rank not in taken])
    return tuple(task if task.rank in known else replace(task, rank=next(free, task.rank)) for task in kept)


def read_nominations() -> dict[str, NominatedPlacement]:
    rows = Job.objects.filter(nominated_placement__isnull=False, state__in=_NOMINATABLE_STATES).order_by()
    return {job: kept for job, kept in rows.values_list("public_id", "nominated_placement") if kept}


def read_home_nodes() -> dict[str, NodeId]:
    rows = Volume.objects.filter(kind="home", scope="node", node__isnull=False, owner__isnull=False)
    return {
        str(owner): NodeId(node) for owner, node in rows.values_list("owner__public_id", "node__public_id")
    }
