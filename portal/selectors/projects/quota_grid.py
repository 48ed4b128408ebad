"""Reads the quotas of one pool as a tree with usage, demand and fair share, in seven queries."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from django.db.models import Q, Sum

from portal.access import Requester, visible_projects
from portal.domain.states import JobState
from portal.models import Allocation, Cycle, Gpu, Job, NodePool, Quota
from portal.models.jobs.jobs import total_milli
from portal.selectors.nodes.gpu_states import GpuCounts, count_gpus, count_gpus_by
from portal.selectors.projects.projects import (
    ProjectRow,
    in_tree_order,
    members_and_managers,
)
from portal.selectors.projects.quota_additions import with_effective_quota

_QUOTA_COLUMNS = ("guaranteed_milli", "limit_milli", "user_limit_milli", "weight", "priority", "version",
                  "extra_milli")  # fmt: skip


@dataclass
class QuotaGridRow(ProjectRow):
    """A project in a pool; milli amounts include its descendants."""

    guaranteed_milli: int = 0
    limit_milli: int | None = None
    """None means no limit, here and for the limit per user."""
    user_limit_milli: int | None = None
    weight: float = 1.0
    priority: int = 0
    version: int = 0
    """The version that an edit must name; 0 without a quota row."""
    extra_milli: int = 0
    """Temporary additions that are in force; the guarantee and the limit are without them."""
    used_milli: int = 0
    waiting_milli: int = 0
    fair_share_milli: int | None = None
    member_count: int = 0
    managers: list[str] = field(default_factory=list)

    @property
    def effective_guaranteed_milli(self) -> int:
        return self.guaranteed_milli + self.extra_milli

    @property
    def within_guarantee_milli(self) -> int:
        return min(self.used_milli, self.effective_guaranteed_milli)

    @property
    def borrowed_milli(self) -> int:
        return max(0, self.used_milli - self.effective_guaranteed_milli)


@dataclass
class QuotaGrid:
    """All rows of one pool, parents before children, and the pool's totals."""

    pool: NodePool
    total_milli: int
    rows: list[QuotaGridRow]

    @property
    def total_guaranteed_milli(self) -> int:
        """Guaranteed amount of the top-level projects."""
        return sum(row.effective_guaranteed_milli for row in self.rows if row.depth == 0)

    @property
    def used_milli(self) -> int:
        return sum(row.used_milli for row in self.rows if row.depth == 0)

    @property
    def overcommitted_milli(self) -> int:
        """Guaranteed amount beyond the capacity of the pool."""
        return max(0, self.total_guaranteed_milli - self.total_milli)


def pools_with_gpus() -> list[NodePool]:
    """Return the pools by name, each with ``gpu_count``, in two queries."""
    pools, counts = list(NodePool.objects.order_by("name")), count_gpus_by(Gpu.objects.all(), "node__pool_id")
    for pool in pools:
        pool.gpu_count = counts.get((pool.pk,), GpuCounts()).total  # type: ignore[attr-defined]
    return pools


def quota_grid(requester: Requester, pool: NodePool) -> QuotaGrid:
    """Return the quotas of visible projects as a tree."""
    projects = list(visible_projects(requester).filter(archived_at__isnull=True).order_by("name"))
    quotas: dict[int, dict[str, Any]] = {
        quota.project_id: {name: getattr(quota, name) for name in _QUOTA_COLUMNS}
        for quota in with_effective_quota(Quota.objects.filter(pool=pool))
    }
    live = Allocation.objects.filter(ended_at__isnull=True, task__attempt__pool=pool)
    held = dict(live.values_list("task__attempt__job__project").annotate(milli=Sum("milli")))
    pending = Job.objects.filter(Q(pool=pool) | Q(pool__isnull=True), state=JobState.PENDING.value)
    waiting = dict(pending.order_by().values_list("project").annotate(milli=Sum(total_milli())))
    users, managers = members_and_managers(projects)
    shares = _fair_shares(pool)
    rows = [
        QuotaGridRow(
            project=row.project,
            depth=row.depth,
            used_milli=held.get(row.project.pk, 0),
            waiting_milli=waiting.get(row.project.pk, 0),
            fair_share_milli=shares.get(row.project.public_id),
            member_count=users[row.project.pk],
            managers=managers.get(row.project.pk, []),
            **quotas.get(row.project.pk, {}),
        )
        for row in in_tree_order(projects)
    ]
    _add_upwards(rows)
    return QuotaGrid(
        pool=pool, total_milli=1000 * count_gpus(Gpu.objects.filter(node__pool=pool)).total, rows=rows
    )


def _add_upwards(rows: list[QuotaGridRow]) -> None:
    by_id = {row.project.pk: row for row in rows}
    for row in sorted(rows, key=lambda row: -row.depth):
        above = by_id.get(row.project.parent_id or 0)
        if above is not None:
            above.used_milli += row.used_milli
            above.waiting_milli += row.waiting_milli


def _fair_shares(pool: NodePool) -> dict[str, int]:
    newest = Cycle.objects.order_by("-id").values_list("fair_share_breakdown", flat=True).first() or []
    return {
        breakdown["project"]: breakdown["fair_share_milli"]
        for breakdown in newest
        if breakdown["pool"] == pool.public_id
    }
