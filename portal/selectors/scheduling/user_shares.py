"""Reads how a user's past usage ranks among the users of their projects, and when it will have decayed."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

from portal.domain.scheduling.policy_settings import default_value
from portal.models import NodePool, Project, User
from portal.selectors.scheduling.decayed_usage import decayed_usage
from portal.selectors.scheduling.settings import cluster_settings, pool_settings


@dataclass(frozen=True)
class UserShare:
    """One user in one project and pool. Jobs of users with less decayed usage start first.

    ``recovery_s`` is the time until the usage has decayed to the mean of the users, if the user starts nothing and
    the mean stays; 0 if it is not above it.
    """

    project: Project
    pool: NodePool
    gpu_hours: float
    mean_gpu_hours: float
    rank: int
    users: int
    half_life_s: float
    recovery_s: float


def list_user_shares(user: User, projects: Sequence[Project]) -> list[UserShare]:
    """Return the user's rank in each pool where the user has used GPUs within these projects."""
    if not projects:
        return []
    settings = cluster_settings()
    half_life_s = float(settings.get("usage_half_life_s", default_value("usage_half_life_s")))
    rows = decayed_usage(time.time(), half_life_s, [each.pk for each in projects])
    pools = {pool.public_id: pool for pool in NodePool.objects.all()} if rows else {}
    by_key: dict[tuple[int, str], dict[int, float]] = {}
    for row in rows:
        by_key.setdefault((row.project_row, row.pool), {})[row.user_row] = row.gpu_seconds / 3600
    found = []
    for project in projects:
        for pool in pools.values():
            hours = by_key.get((project.pk, pool.public_id), {})
            own = hours.get(user.pk)
            if own is None:
                continue
            half_life_s = float(pool_settings(pool, settings)["usage_half_life_s"])
            mean = sum(hours.values()) / len(hours)
            found.append(
                UserShare(
                    project,
                    pool,
                    own,
                    mean,
                    1 + sum(other < own for other in hours.values()),
                    len(hours),
                    half_life_s,
                    half_life_s * math.log2(own / mean) if own > mean > 0 else 0.0,
                )
            )
    return found
