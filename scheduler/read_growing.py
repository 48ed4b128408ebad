"""Reads the tasks that elastic jobs wait for while they run, as rows of a photograph."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from portal.models import Job
from scheduler.album import INVALID_DATA, Built
from scheduler.core.cluster import WHOLE_MILLI, NodeId, PendingRow, PoolId
from scheduler.read_running import Holding
from scheduler.read_waiting import pending_row, read_rows, typed_columns
from scheduler.unfit import Unfit

Source = tuple[dict[str, Any], Holding, tuple[NodeId, ...], list[str]]
"""A job's columns, what it holds, the nodes that cannot run it, and those it avoids for a while."""


def read_growing(
    held: Mapping[int, Holding],
    unfit: Unfit,
    built: Built[Source, PendingRow],
) -> tuple[PendingRow, ...]:
    """A row for each running job that may grow, with the numbers of the tasks it waits for.

    Two queries, and none where nobody may grow.
    """
    grow = {attempt.row["job_id"]: attempt for attempt in held.values() if attempt.waits}
    if not grow:
        return built.of({}, None, _row)
    avoided: dict[int, list[str]] = defaultdict(list)
    for job, node in Job.avoid_nodes.through.objects.filter(job__in=grow).values_list(
        "job_id", "node__public_id"
    ):
        avoided[job].append(node)

    def cannot(row: dict[str, Any]) -> tuple[NodeId, ...]:
        shares = row["milli_per_gpu"] < WHOLE_MILLI
        return unfit.nodes(
            row["environment_id"],
            row["gpus_per_task"],
            shares=shares,
            volumes=row["volumes"],
            project=row["project__public_id"],
        )

    sources = {}
    for id_, row in read_rows(list(grow)):
        if row["held"]:
            continue
        try:
            sources[id_] = (row, grow[id_], cannot(row), sorted(avoided[id_]))
        except INVALID_DATA:
            continue  # ``read_running`` says of the same job that it cannot be read
    return built.of(
        sources, None, _row, lambda id_, source: _row(id_, (typed_columns(source[0]), *source[1:]))
    )


def _row(_: int, source: Source) -> PendingRow:
    row, attempt, avoid, avoided = source
    return replace(
        pending_row(row, (), avoid, avoided, None),
        pools=(PoolId(attempt.row["pool__public_id"]),),
        tasks=len(attempt.waits),
        ranks=attempt.waits,
        kept=(),  # with the row of what runs
        not_before_s=attempt.row["grow_after_s"],
    )
