"""Stores nominated placements, so that the next plan keeps them."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import Any

from django.db import connection, transaction

from scheduler import leases
from scheduler.core.model.plan import JobPlacement, Plan
from scheduler.core.model.snapshot import GpuShare, GpuUuid, NodeId, RunningTask
from scheduler.leases import HeldLease

log = logging.getLogger(__name__)

NominatedPlacement = list[list[Any]]
"""``[rank, node, [[GPU uuid, milli], ...]]`` for each task."""


def save_nominations(leader: HeldLease, before: dict[str, NominatedPlacement], plan: Plan) -> int:
    """Write the nominations that changed since the snapshot and return their number. Raise LeaseLostError."""
    wanted = {str(start.job): _as_json(start) for start in plan.nominations}
    changed = {job: wanted.get(job) for job in {*before, *wanted} if before.get(job) != wanted.get(job)}
    if changed:
        with transaction.atomic(), connection.cursor() as cursor:
            leases.check(leader)
            cursor.execute(
                "UPDATE portal_job job SET nominated_placement = new.nominated_placement"
                "  FROM unnest(%(jobs)s::text[], %(kept)s::jsonb[]) AS new(job, nominated_placement)"
                " WHERE job.public_id = new.job",
                {
                    "jobs": list(changed),
                    "kept": [None if kept is None else json.dumps(kept) for kept in changed.values()],
                },
            )
    return len(changed)


def parse_nomination(
    placement: NominatedPlacement | None, amounts: Callable[[int], tuple[int, int]]
) -> tuple[RunningTask, ...]:
    """Return a stored nomination as tasks, with ``amounts`` (CPU, memory) of each rank; empty when it is invalid.

    An invalid value is harmless: only the scheduler writes it, and the next plan overwrites it.
    """
    try:
        return tuple(
            RunningTask(
                NodeId(str(node)),
                tuple(GpuShare(GpuUuid(str(uuid)), int(milli)) for uuid, milli in gpus),
                *amounts(int(rank)),
                rank=int(rank),
            )
            for rank, node, gpus in placement or ()
        )
    except (TypeError, ValueError):
        log.warning("an unreadable nominated placement was dropped: %.200r", placement)
        return ()


def _as_json(start: JobPlacement) -> NominatedPlacement:
    return [[task.rank, task.node, [list(share) for share in task.gpus]] for task in start.tasks]
