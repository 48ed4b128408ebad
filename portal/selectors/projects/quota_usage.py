"""Reads usage and quota of projects by pool, as quota bars show them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from django.db.models import Count, Sum

from portal.access import Requester, project_parents, require_user
from portal.domain.projects.project_tree import path_to_root
from portal.models import Gpu, NodePool, Project, Quota, UsageInterval, User
from portal.selectors.nodes.gpu_states import COUNTED_GPU
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
    has_quota: bool = True
    """False: the project has no quota row of its own here; it may use what its ancestors allow."""
    startable_milli: int | None = None
    """What its limits, those of its ancestors and those of the user leave; None means no limit."""
    bound_by_ancestor: bool = False
    """True if that is the limit of a project above, which the user may not be able to see."""

    @property
    def borrowed_milli(self) -> int:
        """Usage beyond the guaranteed quota, which can be reclaimed."""
        return max(0, self.used_milli - self.guaranteed_milli)


def user_quota_usage(requester: Requester) -> list[QuotaUsage]:
    """Return usage and quota of the user's projects in every pool with GPUs, in six queries."""
    user = require_user(requester)
    mine = list(Project.objects.filter(memberships__user=user, archived_at__isnull=True).order_by("name"))
    return project_quota_usage(mine, user, with_unlimited=True)


def project_quota_usage(
    projects: Sequence[Project], user: User, *, with_unlimited: bool = False
) -> list[QuotaUsage]:
    """Return usage and quota of these projects in every pool where either is nonzero, in five queries.

    ``with_unlimited`` adds all pools with GPUs: without a quota row, a project may use what others leave.
    """
    if not projects:
        return []
    pools = {pool.pk: pool for pool in NodePool.objects.order_by("name")}
    sizes = dict(
        Gpu.objects.filter(COUNTED_GPU).order_by().values_list("node__pool_id").annotate(n=Count("pk"))
    )
    parents = project_parents()
    paths: dict[int, list[int]] = {each.pk: path_to_root(each.pk, parents.get) for each in projects}
    rows = with_effective_quota(
        Quota.objects.filter(project__in={above for path in paths.values() for above in path})
    )
    quotas = {(quota.project_id, quota.pool_id): quota for quota in rows}
    used, used_by_user = _used_milli(parents), _used_milli(parents, user)
    shares = []
    for project in projects:
        for pool in pools.values():
            quota = quotas.get((project.pk, pool.pk))
            held = used[project.pk, pool.pk]
            if quota is None and not held and not (with_unlimited and pool.pk in sizes):
                continue
            limits = [
                (left, node != project.pk)
                for node in paths[project.pk]
                if (above := quotas.get((node, pool.pk))) is not None
                for left in (
                    _left(above.effective_limit_milli, used[node, pool.pk]),
                    _left(above.user_limit_milli, used_by_user[node, pool.pk]),
                )
                if left is not None
            ]
            startable_milli, bound_by_ancestor = min(limits, default=(None, False))
            shares.append(
                QuotaUsage(
                    project,
                    pool,
                    held,
                    quota.effective_guaranteed_milli if quota else 0,
                    quota.effective_limit_milli if quota else None,
                    sizes.get(pool.pk, 0) * 1000,
                    quota.user_limit_milli if quota else None,
                    quota is not None,
                    startable_milli,
                    bound_by_ancestor,
                )
            )
    return shares


def _left(limit_milli: int | None, used_milli: int) -> int | None:
    return None if limit_milli is None else max(0, limit_milli - used_milli)


def _used_milli(parents: Mapping[int, int | None], user: User | None = None) -> dict[tuple[int, int], int]:
    """Return the milli held by (project, pool), or of it by one user; usage counts for all ancestors."""
    found: dict[tuple[int, int], int] = defaultdict(int)
    rows = UsageInterval.objects.filter(ended_at__isnull=True)
    rows = rows if user is None else rows.filter(user=user)
    held = rows.order_by().values_list("project_id", "pool_id")
    for project, pool, milli in held.annotate(milli=Sum("milli")):
        for here in path_to_root(project, parents.get):
            found[here, pool] += milli
    return found
