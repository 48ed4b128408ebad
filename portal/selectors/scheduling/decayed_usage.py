"""Reads past usage as the scheduler counts it: GPU-seconds with exponential decay."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from django.db import connection

from portal.domain.scheduling.policy_settings import NUMBER_SETTINGS

MAX_HALF_LIVES = 20
"""Older usage counts less than a millionth and is not read."""


class DecayedUsage(NamedTuple):
    """Decayed GPU-seconds of one user in one project and pool, by public ids and row ids."""

    project: str
    pool: str
    user: str
    gpu_seconds: float
    project_row: int
    user_row: int


def decayed_usage(
    now_s: float, usage_half_life_s: float, projects: Sequence[int] | None = None
) -> list[DecayedUsage]:
    """Return decayed usage, unordered, in one query; ``projects`` (ids) None reads all.

    The decayed integral of an interval [a, b] is milli / 1000 * h / ln 2 * (2^-(now - b)/h - 2^-(now - a)/h);
    the half-life h may be a pool's own. The exponent is capped, because PostgreSQL raises an error if a power
    underflows.
    """
    with connection.cursor() as cursor:
        cursor.execute(
            """
            SELECT project.public_id, pool.public_id, person.public_id, span.seconds, project.id, person.id
              FROM (SELECT project_id, pool_id, user_id,
                           sum(milli / 1000.0::float8 * half.life / ln(2::float8) * (
                               power(0.5::float8, least(1000, greatest(0, %(now)s - coalesce(
                                   date_part('epoch', ended_at), %(now)s)) / half.life))
                             - power(0.5::float8, least(1000, greatest(0, %(now)s
                                   - date_part('epoch', started_at)) / half.life)))) AS seconds
                      FROM portal_usageinterval
                      JOIN (SELECT id, CASE WHEN jsonb_typeof(policy -> 'usage_half_life_s') = 'number'
                                             AND (policy ->> 'usage_half_life_s')::numeric BETWEEN %(low)s AND
                                             %(high)s
                                            THEN (policy ->> 'usage_half_life_s')::float8 ELSE %(h)s END AS life
                              FROM portal_nodepool) AS half ON half.id = pool_id
                     WHERE (ended_at IS NULL OR ended_at > to_timestamp(%(now)s - %(remembered)s * half.life))
                       AND (%(projects)s::bigint[] IS NULL OR project_id = ANY(%(projects)s::bigint[]))
                     GROUP BY 1, 2, 3) AS span
              JOIN portal_project project ON project.id = span.project_id
              JOIN portal_nodepool pool ON pool.id = span.pool_id
              JOIN portal_user person ON person.id = span.user_id
            """,
            {
                "now": now_s,
                "h": usage_half_life_s,
                "low": NUMBER_SETTINGS["usage_half_life_s"].minimum,
                "high": NUMBER_SETTINGS["usage_half_life_s"].maximum,
                "remembered": MAX_HALF_LIVES,
                "projects": None if projects is None else list(projects),
            },
        )
        return [DecayedUsage(*row) for row in cursor.fetchall()]
