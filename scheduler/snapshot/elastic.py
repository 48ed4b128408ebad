"""Reads the missing tasks of running elastic jobs as snapshot rows."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from portal.models import Job
from scheduler.core.model.snapshot import WHOLE_MILLI, NodeId, PendingRow, PoolId
from scheduler.snapshot.node_eligibility import IneligibleNodes
from scheduler.snapshot.pending import build_pending_row, fetch_columns, without_json
from scheduler.snapshot.row_cache import INVALID_DATA, DerivedCache
from scheduler.snapshot.running import LiveAttempt

ScaleUpSource = tuple[dict[str, Any], LiveAttempt, tuple[NodeId, ...], list[str]]
"""Columns of the job, its attempt, ineligible nodes, and nodes it avoids for a while."""


def read_scale_ups(
    attempts: Mapping[int, LiveAttempt],
    ineligible: IneligibleNodes,
    cache: DerivedCache[ScaleUpSource, PendingRow],
) -> tuple[PendingRow, ...]:
    """Return a pending row with the missing ranks of each running job that may grow.

    Two queries, or none when no job may grow.
    """
    growing = {attempt.row["job_id"]: attempt for attempt in attempts.values() if attempt.missing_ranks}
    if not growing:
        return cache.map({}, None, _build_row)
    excluded: dict[int, list[str]] = defaultdict(list)
    for job, node in Job.avoid_nodes.through.objects.filter(job__in=growing).values_list(
        "job_id", "node__public_id"
    ):
        excluded[job].append(node)

    def find_ineligible(row: dict[str, Any]) -> tuple[NodeId, ...]:
        shares = row["milli_per_gpu"] < WHOLE_MILLI
        return ineligible.for_task(
            row["environment_id"],
            row["gpus_per_task"],
            shares_gpu=shares,
            volumes=row["volumes"],
            project=row["project__public_id"],
        )

    sources = {}
    for id_, row in fetch_columns(list(growing)):
        if row["held"]:
            continue
        try:
            sources[id_] = (row, growing[id_], find_ineligible(row), sorted(excluded[id_]))
        except INVALID_DATA:
            continue  # ``read_running`` reports the same job
    return cache.map(
        sources, None, _build_row, lambda id_, source: _build_row(id_, (without_json(source[0]), *source[1:]))
    )


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
