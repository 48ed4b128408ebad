"""Reads the fair-share breakdowns of the newest cycle: how each project's share was calculated."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from django.db import connection

from portal.access import Requester, visible_projects
from portal.domain.projects.project_tree import path_to_root
from portal.models import Job, NodePool, Project


@dataclass(frozen=True)
class FairShareBreakdown:
    """A project's fair share of a pool in the newest cycle, GPU milli.

    The steps add up to ``fair_share_milli``; each has ``kind`` (guaranteed, round, remainder),
    ``amount_milli`` and the ``details`` of its calculation.
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
        return self.requested_milli > self.allocated_milli


def latest_breakdown_rows(projects: Collection[str]) -> list[dict[str, Any]]:
    """Return the stored breakdowns of these projects (public ids), in one query that reads no others."""
    if not projects:
        return []
    with connection.cursor() as cursor:
        cursor.execute(
            """
            SELECT breakdown FROM (SELECT fair_share_breakdown FROM portal_cycle ORDER BY id DESC LIMIT 1) AS newest,
                   jsonb_array_elements(newest.fair_share_breakdown) AS breakdown
             WHERE breakdown ->> 'project' = ANY(%s)
            """,
            [list(projects)],
        )
        return [parse_json_column(breakdown) for (breakdown,) in cursor.fetchall()]


def list_breakdowns(requester: Requester, job: Job) -> list[FairShareBreakdown]:
    """Return the breakdowns of the job's project and its visible ancestors, in the pools that it requests."""
    kept = project_breakdowns(_visible_ancestors(requester, job.project))
    if job.pool_id is not None:
        return [breakdown for breakdown in kept if breakdown.pool.pk == job.pool_id]
    return [breakdown for breakdown in kept if breakdown.wants_more]


def project_breakdowns(projects: Sequence[Project]) -> list[FairShareBreakdown]:
    """Return the newest breakdowns of these projects in all pools, in two queries."""
    found = latest_breakdown_rows([project.public_id for project in projects])
    pools = {pool.public_id: pool for pool in NodePool.objects.all()}
    return [
        FairShareBreakdown(**one | {"project": project, "pool": pools[one["pool"]]})
        for project in projects
        for one in found
        if one["project"] == project.public_id and one["pool"] in pools
    ]


def parse_json_column(value: Any) -> Any:
    """Decode a JSON column of a raw cursor, which Django returns as text."""
    return json.loads(value) if isinstance(value, str | bytes) else value


def _visible_ancestors(requester: Requester, project: Project) -> list[Project]:
    """Return the project and its ancestors, nearest first, as far as visible to the user, in two queries."""
    seen = {row.pk: row for row in visible_projects(requester)}
    return path_to_root(seen.get(project.pk), lambda below: seen.get(below.parent_id or 0))
