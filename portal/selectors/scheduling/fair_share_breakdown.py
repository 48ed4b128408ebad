"""Reads the receipts of the newest cycle: how each project's fair share came about, step by step."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from django.db import connection

from portal.access import Requester, visible_projects
from portal.domain.tree import path_to_root
from portal.models import Job, NodePool, Project


@dataclass(frozen=True)
class FairShareBreakdown:
    """A project's fair share of a pool in the newest cycle, GPU milli; its steps add up to ``fair_share_milli``.

    A step has ``kind`` (guaranteed, round, remainder), ``amount_milli`` and the ``numbers`` it was made of.
    """

    project: Project
    pool: NodePool
    guaranteed_milli: int
    limit_milli: int | None
    allocated_milli: int
    requested_milli: int
    fair_share_milli: float
    steps: list[dict[str, Any]]

    @property
    def wants_more(self) -> bool:
        """It asks for more than it holds."""
        return self.requested_milli > self.allocated_milli


def latest_breakdown_rows(projects: Collection[str]) -> list[dict[str, Any]]:
    """As they are stored, those of these projects (public ids): one query, which reads no others out."""
    if not projects:
        return []
    with connection.cursor() as cursor:
        cursor.execute(
            """
            SELECT receipt FROM (SELECT fair_share_breakdown FROM portal_cycle ORDER BY id DESC LIMIT 1) AS newest,
                   jsonb_array_elements(newest.receipts) AS receipt
             WHERE receipt ->> 'project' = ANY(%s)
            """,
            [list(projects)],
        )
        return [parse_json_column(receipt) for (receipt,) in cursor.fetchall()]


def list_breakdowns(requester: Requester, job: Job) -> list[FairShareBreakdown]:
    """Those of the job's project, then of those above it which the person may see, in the pools it asks for."""
    line = _visible_ancestors(requester, job.project)
    found = latest_breakdown_rows([project.public_id for project in line])
    pools = {pool.public_id: pool for pool in NodePool.objects.all()}
    kept = [
        FairShareBreakdown(
            project,
            pools[one["pool"]],
            one["guaranteed_milli"],
            one["limit_milli"],
            one["allocated_milli"],
            one["requested_milli"],
            one["fair_share_milli"],
            one["steps"],
        )
        for project in line
        for one in found
        if one["project"] == project.public_id and one["pool"] in pools
    ]
    if job.pool_id is not None:
        return [receipt for receipt in kept if receipt.pool.pk == job.pool_id]
    return [receipt for receipt in kept if receipt.wants_more]


def parse_json_column(value: Any) -> Any:
    """A JSON column of a plain cursor: Django's connection hands it over as text."""
    return json.loads(value) if isinstance(value, str | bytes) else value


def _visible_ancestors(requester: Requester, project: Project) -> list[Project]:
    """The project and those above it, nearest first, that the person may see: two queries."""
    seen = {row.pk: row for row in visible_projects(requester)}
    return path_to_root(seen.get(project.pk), lambda below: seen.get(below.parent_id or 0))
