"""Reads what projects hold of each pool beside what they were given: the numbers behind a quota bar."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from django.db.models import Count, Sum

from portal.access import Requester, project_parents, require_user
from portal.domain.tree import path_to_root
from portal.models import Gpu, NodePool, Project, Quota, UsageInterval


@dataclass(frozen=True)
class QuotaUsage:
    """One project in one pool, in GPU milli; ``used`` includes the projects below. A limit of None is none."""

    project: Project
    pool: NodePool
    used_milli: int
    guaranteed_milli: int
    limit_milli: int | None
    pool_milli: int
    user_limit_milli: int | None = None

    @property
    def borrowed_milli(self) -> int:
        """What is held above the guarantee; it may be asked back."""
        return max(0, self.used_milli - self.guaranteed_milli)


def user_quota_usage(requester: Requester) -> list[QuotaUsage]:
    """The shares of the projects the person belongs to, where something is given or held; five queries."""
    user = require_user(requester)
    mine = list(Project.objects.filter(memberships__user=user, archived_at__isnull=True).order_by("name"))
    return project_quota_usage(mine)


def project_quota_usage(projects: Sequence[Project]) -> list[QuotaUsage]:
    """The shares of these projects in every pool that gives or lends them something; four queries."""
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
    quotas = {
        (quota.project_id, quota.pool_id): quota for quota in Quota.objects.filter(project__in=projects)
    }
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
                    quota.guaranteed_milli if quota else 0,
                    quota.limit_milli if quota else None,
                    sizes.get(pool.pk, 0) * 1000,
                    quota.user_limit_milli if quota else None,
                )
            )
    return shares


def _used_milli(parents: Mapping[int, int | None]) -> dict[tuple[int, int], int]:
    """Milli held now by project and pool; what a project holds counts for every project above it."""
    found: dict[tuple[int, int], int] = defaultdict(int)
    rows = (
        UsageInterval.objects.filter(ended_at__isnull=True)
        .order_by()
        .values_list("project_id", "pool_id")
        .annotate(milli=Sum("milli"))
    )
    for project, pool, milli in rows:
        for here in path_to_root(project, parents.get):
            found[here, pool] += milli
    return found
