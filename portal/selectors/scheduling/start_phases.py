"""How long the phases before the run of a job last, by pool: median and 90th percentile over the last days."""

from __future__ import annotations

from dataclasses import dataclass

from django.db import connection

from portal.domain.jobs.phases import Phase

PERIOD_DAYS = 7
# seconds of each phase as columns of an attempt; null where it has none
_SECONDS = {
    Phase.QUEUED: "created_at - queued_at",
    Phase.RESERVED: "coalesce(image_pull_started_at, start_sent_at) - created_at",
    Phase.PULLING: "image_pulled_at - image_pull_started_at",
    Phase.STARTING: "running_at - coalesce(image_pulled_at, start_sent_at)",
    Phase.STAGING: "code_ready_at - running_at",
    Phase.SERVER: "ready_at - coalesce(code_ready_at, running_at)",
}


@dataclass(frozen=True)
class PhaseDuration:
    """``attempts`` is the number of starts with this phase; times are None without one."""

    phase: Phase
    attempts: int
    median_s: float | None
    p90_s: float | None


@dataclass(frozen=True)
class PoolPhases:
    pool: str
    starts: int
    phases: list[PhaseDuration]


def start_phases_by_pool() -> list[PoolPhases]:
    """Return the pools in which an attempt ran in the last ``PERIOD_DAYS``, by name, in one query."""
    percentiles = (
        "percentile_cont(ARRAY[0.5, 0.9]) WITHIN GROUP (ORDER BY greatest(0, date_part('epoch', {0})))"
    )
    columns = ", ".join(f"count({span}), {percentiles.format(span)}" for span in _SECONDS.values())
    # Only constants are interpolated.
    query = f"""
        SELECT pool.name, count(*), {columns}
        FROM portal_attempt JOIN (SELECT id, name FROM portal_nodepool) pool ON pool.id = pool_id
        WHERE running_at > statement_timestamp() - make_interval(days => %s) AND queued_at IS NOT NULL
        GROUP BY pool.name ORDER BY pool.name
    """  # noqa: S608
    with connection.cursor() as cursor:
        cursor.execute(query, [PERIOD_DAYS])
        rows = cursor.fetchall()
    return [
        PoolPhases(
            name,
            starts,
            [
                PhaseDuration(phase, values[2 * number], *(values[2 * number + 1] or (None, None)))
                for number, phase in enumerate(_SECONDS)
            ],
        )
        for name, starts, *values in rows
    ]
