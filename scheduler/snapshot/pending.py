"""Reads pending jobs, and the missing tasks of running elastic jobs, as snapshot rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from portal.domain.jobs.end_states import BACKOFF_REASONS, backoff_s
from portal.domain.states import DesiredState, JobState
from portal.models import Job
from portal.services.jobs.failures import LOG_WAIT
from scheduler.core.model.snapshot import (
    JobId,
    NodeId,
    PendingRow,
    PoolId,
    PoolRow,
    ProjectId,
    UserId,
)
from scheduler.nominations import parse_nomination
from scheduler.snapshot.dependencies import read_dependencies
from scheduler.snapshot.job_columns import (
    PLACEMENT_COLUMNS,
    elastic_min_tasks,
    gang_launcher,
    home_node,
    mixes_gpus,
    parse_topology_constraint,
    pending_values,
    rank_amounts,
    role_requests,
)
from scheduler.snapshot.node_eligibility import IneligibleNodes
from scheduler.snapshot.row_cache import INVALID_DATA, DerivedCache, RowCache, row_version_blocks
from scheduler.snapshot.running import EpochSeconds, LiveAttempt

_PENDING = Job.objects.filter(state=JobState.PENDING.value, desired_state=DesiredState.RUN.value)


def read_pending(
    pools: tuple[PoolRow, ...],
    ineligible: IneligibleNodes,
    avoided: Mapping[int, list[str]],
    home_nodes: dict[str, NodeId],
    columns_cache: RowCache[dict[str, Any]],
    rows_cache: DerivedCache[dict[str, Any], PendingRow],
) -> tuple[tuple[PendingRow, ...], dict[int, dict[str, Any]]]:
    """Return the rows of pending jobs, and their columns by primary key in the same order.

    Nodes that can never run a job are among those it avoids; ``avoided`` are others, by primary key of the job.
    """
    all_pools = tuple(pool.id for pool in pools)
    waiting = columns_cache.refresh_blocks(
        row_version_blocks(
            "portal_job",
            "id",
            "state = %s AND desired_state = %s",
            [JobState.PENDING.value, DesiredState.RUN.value],
        ),
        fetch_columns,
    )

    def make(id_: int, row: dict[str, Any]) -> PendingRow:
        return build_placeable_row(row, all_pools, ineligible, avoided.get(id_, []), home_nodes)

    def fallback(_: int, row: dict[str, Any]) -> PendingRow:
        return build_pending_row(_without_json(row), all_pools, (), [], None)

    pending = rows_cache.map(waiting, (all_pools, ineligible, home_nodes, avoided), make, fallback)
    if dependencies := read_dependencies(_PENDING):
        pairs = zip(waiting, pending, strict=True)
        pending = tuple(dependencies[id_].apply(row) if id_ in dependencies else row for id_, row in pairs)
    return pending, waiting


def _without_json(row: dict[str, Any]) -> dict[str, Any]:
    """Return the columns with JSON values blanked, for a row with invalid JSON."""
    return row | {
        "topology_constraint": None,
        "volumes": [],
        "nominated_placement": None,
        "roles": [],
        "preferred_nodes": [],
    }


def fetch_columns(jobs: Sequence[int] | None) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield columns by primary key as ``build_pending_row`` needs them; None reads all pending jobs."""
    chosen = _PENDING if jobs is None else Job.objects.filter(pk__in=jobs)
    for row in chosen.annotate(
        submitted_s=EpochSeconds("submitted_at"),
        queued_s=EpochSeconds("pending_since"),
        start_after_s=EpochSeconds("start_after"),
    ).values(
        "id",
        "public_id",
        "held",
        "version",
        "submitted_s",
        "queue_rank",
        "queued_s",
        "start_after_s",
        "reason",
        "attempt_count",
        "awaits_failure_rule",
        "retry_backoff_s",
        "retry_max_backoff_s",
        "nominated_placement",
        *PLACEMENT_COLUMNS,
        "project__public_id",
        "owner__public_id",
        "pool__public_id",
        "environment_id",
        "secrets",
        "owner_id",
        "project_id",
    ):
        yield row["id"], dict(row)


def build_placeable_row(
    row: dict[str, Any],
    all_pools: tuple[PoolId, ...],
    ineligible: IneligibleNodes,
    excluded_nodes: list[str],
    home_nodes: dict[str, NodeId],
) -> PendingRow:
    """Return the snapshot row of a job with the nodes that can never run it, and its home node."""
    ineligible_nodes = ineligible.for_job(row)
    home = home_node(row["kind"], row["owner__public_id"], home_nodes)
    cuda = ineligible.required_cuda(row["environment_id"], row["gpus_per_task"])
    return build_pending_row(row, all_pools, ineligible_nodes, excluded_nodes, home, cuda)


def build_pending_row(
    row: dict[str, Any],
    all_pools: tuple[PoolId, ...],
    ineligible_nodes: tuple[NodeId, ...],
    excluded_nodes: list[str],
    node_affinity: NodeId | None,
    cuda: str = "",
) -> PendingRow:
    """Return the snapshot row of a pending job; ``ineligible_nodes`` cannot run its environment."""
    found = PendingRow(
        job=JobId(row["public_id"]),
        project=ProjectId(row["project__public_id"]),
        user=UserId(row["owner__public_id"]),
        pools=(PoolId(row["pool__public_id"]),) if row["pool__public_id"] else all_pools,
        submitted_s=max(row["submitted_s"], row["start_after_s"] or 0.0),
        queue_rank=row["queue_rank"],
        tasks=row["tasks"],
        min_tasks=elastic_min_tasks(row["tasks"], row["min_tasks"]),
        held=row["held"],
        not_before_s=_not_before_s(row),
        avoid_nodes=(*ineligible_nodes, *map(NodeId, excluded_nodes)) if excluded_nodes else ineligible_nodes,
        ineligible_nodes=ineligible_nodes,
        node_affinity=node_affinity,
        required_cuda=cuda,
        version=row["version"],
        nominated_tasks=parse_nomination(row["nominated_placement"], rank_amounts(row)),
        topology_constraint=parse_topology_constraint(row["topology_constraint"]),
        launcher=gang_launcher(row["tasks"], row["launcher"]),
        preferred_nodes=tuple(row["preferred_nodes"]),
        allow_mixed_gpus=mixes_gpus(row),
        **pending_values(row),
    )
    return replace(found, task_requests=role_requests(row["roles"], found.request)) if row["roles"] else found


def _not_before_s(row: dict[str, Any]) -> float | None:
    """Return the requested start time, or the end of the backoff after a failed start; None without one.

    Until the failure rules are applied to the last attempt, it is at least when that is due.
    """
    if row.get("awaits_failure_rule"):  # not in the row of a request
        return float(row["queued_s"] + LOG_WAIT.total_seconds())
    if row["reason"] not in BACKOFF_REASONS:
        start_after_s: float | None = row["start_after_s"]
        return start_after_s
    delay_s = backoff_s(row["attempt_count"], row["retry_backoff_s"], row["retry_max_backoff_s"])
    return float(row["queued_s"] + delay_s)


ScaleUpSource = tuple[dict[str, Any], LiveAttempt, tuple[NodeId, ...], list[str]]
"""Columns of the job, its attempt, ineligible nodes, and nodes it avoids for a while."""


def read_scale_ups(
    attempts: Mapping[int, LiveAttempt],
    ineligible: IneligibleNodes,
    avoided: Mapping[int, list[str]],
    cache: DerivedCache[ScaleUpSource, PendingRow],
) -> tuple[tuple[PendingRow, ...], dict[int, dict[str, Any]]]:
    """Return a pending row with the missing ranks of each running job that may grow, and the columns of these jobs.

    One query, or none when no job may grow.
    """
    growing = {attempt.row["job_id"]: attempt for attempt in attempts.values() if attempt.missing_ranks}
    if not growing:
        return cache.map({}, None, _build_row), {}
    sources = {}
    for id_, row in fetch_columns(list(growing)):
        if row["held"]:
            continue
        try:
            sources[id_] = (row, growing[id_], ineligible.for_job(row), avoided.get(id_, []))
        except INVALID_DATA:
            continue  # ``read_running`` reports the same job
    rows = cache.map(
        sources,
        None,
        _build_row,
        lambda id_, source: _build_row(id_, (_without_json(source[0]), *source[1:])),
    )
    return rows, {id_: columns for id_, (columns, *_) in sources.items()}


def _build_row(_: int, source: ScaleUpSource) -> PendingRow:
    row, attempt, avoid, avoided = source
    return replace(
        build_pending_row(row, (), avoid, avoided, None),
        pools=(PoolId(attempt.row["pool__public_id"]),),
        tasks=len(attempt.missing_ranks),
        ranks=attempt.missing_ranks,
        nominated_tasks=(),  # they are in the running row
        not_before_s=attempt.row["grow_after_s"],
    )
