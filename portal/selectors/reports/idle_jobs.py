"""Reads the jobs whose GPUs were idle longest in a period."""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass

from django.db import connection
from django.db.models import QuerySet, Sum

from portal.access import Requester, visible_gpu_days
from portal.models import AttemptGpuDay
from portal.selectors.reports.held_time import TimeRange
from portal.selectors.reports.report_figures import on_days_of

IDLE_JOBS = 10
FIRST_DAYS_LISTED = 100
MAX_CANDIDATES = 1_000
_SUMS = ("measured_gpu_s", "busy_gpu_s", "idle_gpu_s")


@dataclass(frozen=True)
class IdleJob:
    """A job whose GPUs were idle while it held them."""

    job: str
    name: str
    owner: str
    idle_gpu_hours: float
    utilisation_percent: float


def most_idle_jobs(requester: Requester, start: dt.datetime, end: dt.datetime) -> list[IdleJob]:
    """Return the jobs whose GPUs were idle longest on the days (UTC) of a period, longest first, in two queries."""
    days = visible_gpu_days(requester).filter(on_days_of([TimeRange(start, end)]), idle_gpu_s__gt=0)
    candidates = _candidates(days)
    if candidates is not None:
        days = days.filter(attempt__job__in=candidates)
    columns = ("job__public_id", "job__name", "job__owner__username")
    sums = days.order_by().values(*columns).annotate(**{column: Sum(column) for column in _SUMS})
    return [
        IdleJob(
            row[columns[0]],
            row[columns[1]],
            row[columns[2]],
            row["idle_gpu_s"] / 3600,
            100 * row["busy_gpu_s"] / row["measured_gpu_s"],
        )
        for row in sums.order_by("-idle_gpu_s", columns[0])[:IDLE_JOBS]
    ]


def _candidates(days: QuerySet[AttemptGpuDay]) -> list[int] | None:
    """Return jobs (ids) among which those with the longest sums are; None if that is not certain.

    Most jobs end on their first day, so sums are compared without the first day of jobs, except the longest first
    days. What is left out is at most one day of a job, no longer than the shortest of those.
    """
    of_days, values = days.order_by().values("job_id", "idle_gpu_s", "is_continued").query.sql_with_params()
    query = f"""
        WITH measured AS NOT MATERIALIZED ({of_days}),
             first_days AS (SELECT job_id, idle_gpu_s FROM measured WHERE NOT is_continued
                            ORDER BY idle_gpu_s DESC LIMIT {FIRST_DAYS_LISTED}),
             counted AS (SELECT job_id, idle_gpu_s FROM measured WHERE is_continued
                         UNION ALL SELECT job_id, idle_gpu_s FROM first_days)
        SELECT job_id, sum(idle_gpu_s), (SELECT CASE WHEN count(*) = {FIRST_DAYS_LISTED} THEN min(idle_gpu_s)
                                                ELSE 0 END FROM first_days)
        FROM counted GROUP BY job_id ORDER BY 2 DESC LIMIT {MAX_CANDIDATES + 1}
    """  # noqa: S608 - only constants and a query of Django are interpolated
    with connection.cursor() as cursor:
        cursor.execute(query, values)
        rows = cursor.fetchall()
    if not rows:
        return []
    left_out_s = rows[0][2]
    least_s = rows[min(IDLE_JOBS, len(rows)) - 1][1]
    found = [job for job, idle_s, _ in rows if idle_s >= least_s - left_out_s]
    if left_out_s > (least_s if len(rows) >= IDLE_JOBS else 0) or len(found) > MAX_CANDIDATES:
        return None
    return found
