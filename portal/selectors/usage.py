"""Reads what was used from the ledger: GPU-hours of a span of time, by project, person, pool or day."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

from django.db import connection
from django.db.models import Q

from portal.access import Person, visible_usage


class UsageBy(StrEnum):
    """What usage is summed by."""

    PROJECT = "project"
    USER = "user"
    POOL = "pool"
    DAY = "day"


@dataclass(frozen=True)
class UsageRow:
    """One sum: the key (public id, or a date), its name, GPU-hours, and the number of jobs behind it."""

    key: str
    name: str
    gpu_hours: float
    jobs: int


_KEYS = {
    UsageBy.PROJECT: ("k.public_id", "k.name", "project_id", "JOIN portal_project k ON k.id = u.project_id"),
    UsageBy.USER: ("k.public_id", "k.username", "user_id", "JOIN portal_user k ON k.id = u.user_id"),
    UsageBy.POOL: ("k.public_id", "k.name", "pool_id", "JOIN portal_nodepool k ON k.id = u.pool_id"),
}


def usage_for(
    person: Person, start: datetime, end: datetime, by: UsageBy, *, project: str = "", user: str = ""
) -> list[UsageRow]:
    """GPU-hours between two times, of what the person may see; one query after the rights.

    Spans that are still open count up to now. Days are days of UTC; a span over midnight is split.
    """
    rows = visible_usage(person).filter(Q(ended_at__isnull=True) | Q(ended_at__gt=start), started_at__lt=end)
    if project:
        rows = rows.filter(Q(project__public_id=project) | Q(project__name=project))
    if user:
        rows = rows.filter(Q(user__public_id=user) | Q(user__username=user))
    spans, span_values = (
        rows.order_by()
        .values("project_id", "user_id", "pool_id", "job_id", "milli", "started_at", "ended_at")
        .query.sql_with_params()
    )
    if by is UsageBy.DAY:
        return _by_day(spans, list(span_values), start, end)
    key, name, column, join = _KEYS[by]
    # Only our own constants are written into the text; every value travels as a parameter.
    query = f"""
        SELECT {key}, {name}, u.milli_s / 3600000, u.jobs FROM (
            SELECT {column}, sum(milli_s) AS milli_s, count(*) AS jobs FROM (
                SELECT {column}, job_id, sum(milli * date_part(
                           'epoch', least(coalesce(ended_at, now()), %s) - greatest(started_at, %s))) AS milli_s
                FROM ({spans}) span GROUP BY 1, 2
            ) by_job GROUP BY 1
        ) u {join} ORDER BY 3 DESC, 1
    """  # noqa: S608
    with connection.cursor() as cursor:
        cursor.execute(query, [end, start, *span_values])
        return [UsageRow(*_plain(row)) for row in cursor.fetchall()]


def _by_day(spans: str, span_values: list[Any], start: datetime, end: datetime) -> list[UsageRow]:
    first = start.astimezone(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    # Most spans lie within one day; only the others are cut at each midnight.
    query = f"""
        WITH span AS (
            SELECT job_id, milli, greatest(started_at, %s) AS began,
                   least(coalesce(ended_at, now()), %s) AS ended
            FROM ({spans}) whole
        ), piece AS (
            SELECT date_trunc('day', began) AS day, job_id, milli * date_part('epoch', ended - began) AS milli_s
            FROM span WHERE ended <= date_trunc('day', began) + interval '1 day'
            UNION ALL
            SELECT cut.day, job_id, milli * date_part('epoch',
                       least(ended, cut.day + interval '1 day') - greatest(began, cut.day))
            FROM span, LATERAL generate_series(
                date_trunc('day', began), ended - interval '1 microsecond', interval '1 day') AS cut(day)
            WHERE ended > date_trunc('day', began) + interval '1 day'
        ), by_day AS (
            SELECT day, sum(milli_s) AS milli_s, count(DISTINCT job_id) AS jobs FROM piece GROUP BY day
        )
        SELECT to_char(days.day, 'YYYY-MM-DD'), to_char(days.day, 'YYYY-MM-DD'),
               coalesce(by_day.milli_s, 0) / 3600000, coalesce(by_day.jobs, 0)
        FROM generate_series(
            %s::timestamptz, %s::timestamptz - interval '1 microsecond', interval '1 day') AS days(day)
        LEFT JOIN by_day USING (day) ORDER BY 1
    """  # noqa: S608
    with connection.cursor() as cursor:
        cursor.execute(query, [start, end, *span_values, first, end])
        return [UsageRow(*_plain(row)) for row in cursor.fetchall()]


def _plain(row: tuple[str, str, object, int]) -> tuple[str, str, float, int]:
    key, name, hours, jobs = row
    return key, name, max(0.0, round(float(str(hours)), 6)), jobs
