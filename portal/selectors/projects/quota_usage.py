"""Reads usage and quota of projects by pool, as quota bars show them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from django.db.models import Count, Sum

from portal.access import Requester, project_parents, require_user
from portal.domain.project_tree import path_to_root
from portal.models import Gpu, NodePool, Project, Quota, UsageInterval
from portal.selectors.projects.quota_additions import with_effective_quota


@dataclass(frozen=True)
class QuotaUsage:
    """A project in a pool, GPU milli; ``used_milli`` includes descendants. A limit of None means no limit."""

    project: Project
    pool: NodePool
    used_milli: int
    guaranteed_milli: int
    limit_milli: int | None
    pool_milli: int
    user_limit_milli: int | None = None

    @property
    def borrowed_milli(self) -> int:
        """Usage beyond the guaranteed quota, which can be reclaimed."""
        return max(0, self.used_milli - self.guaranteed_milli)


def user_quota_usage(requester: Requester) -> list[QuotaUsage]:
    """Return usage and quota of the user's projects, where either is nonzero, in five queries."""
    user = require_user(requester)
    mine = list(Project.objects.filter(memberships__user=user, archived_at__isnull=True).order_by("name"))
    return project_quota_usage(mine)


def project_quota_usage(projects: Sequence[Project]) -> list[QuotaUsage]:
    """Return usage and quota of these projects in every pool where either is nonzero, in four queries."""
    if not projects:
        return []
    pools = {pool.pk: pool for pool in NodePool.objects.order_by("name")}
    sizes = dict(
        Gpu.objects.filter(present=True)
        .exclude(node__state="retired")
        .order_by()
        .values_list("node__pool_id")
        .annotate(n=Count("pk"))
    )
    rows = with_effective_quota(Quota.objects.filter(project__in=projects))
    quotas = {(quota.project_id, quota.pool_id): quota for quota in rows}
    parents = project_parents()
    used = _used_milli(parents)
    shares = []
    for project in projects:
        for pool in pools.values():
            quota = quotas.get((project.pk, pool.pk))
            held = used[project.pk, pool.pk]
            if quota is None and not held:
                continue
            shares.append(
                QuotaUsage(
                    project,
                    pool,
                    held,
                    quota.effective_guaranteed_milli if quota else 0,
                    quota.effective_limit_milli if quota else None,
                    sizes.get(pool.pk, 0) * 1000,
                    quota.user_limit_milli if quota else None,
                )
            )
    return shares


def _used_milli(parents: Mapping[int, int | None]) -> dict[tuple[int, int], int]:
    """Return the milli held by (project, pool); a project's usage counts for all its ancestors."""
    found: dict[tuple[int, int], int] = defaultdict(int)
    held = UsageInterval.objects.filter(ended_at__isnull=True).order_by().values_list("project_id", "pool_id")
    for project, pool, milli in held.annotate(milli=Sum("milli")):
        for here in path_to_root(project, parents.get):
            found[here, pool] += milli
    return found
