"""Reads GPU-hours of a period by project, user, pool or day, and how much of them was lost."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from itertools import accumulate
from typing import Any

from django.db import connection
from django.db.models import Count, Q, QuerySet, Sum
from django.db.models.functions import TruncDate

from portal.access import Requester, nameable_projects, visible_usage, visible_work
from portal.models import UsageInterval
from portal.selectors.lookup import matches_key
from portal.visibility import HIDDEN_PROJECT_NAME


class UsageGrouping(StrEnum):
    PROJECT = "project"
    USER = "user"
    POOL = "pool"
    DAY = "day"


@dataclass(frozen=True)
class UsageRow:
    """A sum: the key (public id, or a date), its name, GPU-hours, the number of jobs, and what the hours cost."""

    key: str
    name: str
    gpu_hours: float
    jobs: int
    cost: float = 0.0


_GROUP_COLUMNS = {
    UsageGrouping.PROJECT: (
        "k.public_id",
        "k.name",
        "project_id",
        "JOIN portal_project k ON k.id = u.project_id",
    ),
    UsageGrouping.USER: ("k.public_id", "k.username", "user_id", "JOIN portal_user k ON k.id = u.user_id"),
    UsageGrouping.POOL: ("k.public_id", "k.name", "pool_id", "JOIN portal_nodepool k ON k.id = u.pool_id"),
}


_PRICES = "LEFT JOIN unnest(%s::bigint[], %s::float8[]) AS price(pool_id, per_hour) USING (pool_id)"


def gpu_hours_by(
    requester: Requester,
    start: datetime,
    end: datetime,
    by: UsageGrouping,
    *,
    project: str = "",
    user: str = "",
    prices: Mapping[int, float] | None = None,
) -> list[UsageRow]:
    """Return visible GPU-hours between two times, in two queries plus permissions.

    Open intervals count up to now. Days are UTC; an interval across midnight is split. ``prices`` of a GPU-hour
    are by pool.
    """
    rows = _intervals(requester, start, end)
    if project:
        rows = rows.filter(matches_key(project, "project"))
    if user:
        rows = rows.filter(matches_key(user, "user", name="username"))
    spans, span_values = _span_query(rows)
    if by is UsageGrouping.DAY:
        return _sum_by_day(spans, list(span_values), start, end, prices or {})
    key, name, column, join = _GROUP_COLUMNS[by]
    # Only constants are interpolated; every value is a query parameter.
    query = f"""
        SELECT {key}, {name}, u.milli_s / 3600000, u.jobs, u.cost / 3600000 FROM (
            SELECT {column}, sum(milli * (ended - began)) AS milli_s, count(DISTINCT job_id) AS jobs,
                   sum(milli * (ended - began) * coalesce(per_hour, 0)) AS cost
            FROM ({_clipped_spans(spans, *{column, "pool_id"})}) span {_PRICES} GROUP BY 1
        ) u {join} ORDER BY 3 DESC, 1
    """  # noqa: S608
    with connection.cursor() as cursor:
        cursor.execute(query, [start, end, *span_values, *_price_values(prices or {})])
        found = [UsageRow(*_usage_values(row)) for row in cursor.fetchall()]
    if by is UsageGrouping.PROJECT:  # own usage may be in a project that the user has left
        seen = set(nameable_projects(requester).values_list("public_id", flat=True))
        return [row if row.key in seen else replace(row, name=HIDDEN_PROJECT_NAME) for row in found]
    return found


def gpu_hours_of_days(requester: Requester, start: datetime, end: datetime) -> dict[str, float]:
    """Return only the visible GPU-hours of each day (UTC) of a period, in order.

    Cheaper than ``gpu_hours_by``: intervals with the same first and last day are one row.
    """
    spans, span_values = _span_query(_intervals(requester, start, end))
    first_day = start.astimezone(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    day_count = -(-(end - first_day) // timedelta(days=1))
    # Seconds are counted from the first day. The sums of starts and ends are exact to a microsecond this way.
    query = f"""
        SELECT floor(began / 86400)::int AS first, ceil(ended / 86400)::int - 1 AS last,
               sum(milli * began), sum(milli * ended), sum(milli)
        FROM (SELECT milli, began - %s AS began, ended - %s AS ended FROM ({_clipped_spans(spans)}) absolute) span
        WHERE began < ended GROUP BY 1, 2
    """  # noqa: S608
    origin_s = first_day.timestamp()
    with connection.cursor() as cursor:
        cursor.execute(query, [origin_s, origin_s, start, end, *span_values])
        rows = cursor.fetchall()
    milli_s, whole_days = [0.0] * day_count, [0.0] * (day_count + 1)
    for first, last, began, ended, milli in rows:
        if first == last:
            milli_s[first] += ended - began
            continue
        milli_s[first] += milli * (first + 1) * 86400.0 - began
        milli_s[last] += ended - milli * last * 86400.0
        whole_days[first + 1] += milli * 86400.0
        whole_days[last] -= milli * 86400.0
    days = (f"{first_day + timedelta(days=number):%Y-%m-%d}" for number in range(day_count))
    return {
        day: max(0.0, round((partial + whole) / 3_600_000, 6))
        for day, partial, whole in zip(days, milli_s, accumulate(whole_days[:day_count]), strict=True)
    }


def _intervals(requester: Requester, start: datetime, end: datetime) -> QuerySet[UsageInterval]:
    return visible_usage(requester).filter(
        Q(ended_at__isnull=True) | Q(ended_at__gt=start), started_at__lt=end
    )


def _span_query(rows: QuerySet[UsageInterval]) -> tuple[str, tuple[Any, ...]]:
    columns = ("project_id", "user_id", "pool_id", "job_id", "milli", "started_at", "ended_at")
    query, values = rows.order_by().values(*columns).query.sql_with_params()
    return query, values


@dataclass(frozen=True)
class WorkRow:
    """GPU-hours of ended attempts: the key (public id, or a date), its name, and how the time was used."""

    key: str
    name: str
    startup_gpu_hours: float
    useful_gpu_hours: float
    lost_gpu_hours: float
    lost_by_cause: dict[str, float]
    """GPU-hours by cause; causes without losses are left out."""
    attempts: int

    @property
    def lost_percent(self) -> float:
        return 100.0 * self.lost_gpu_hours / self.held_gpu_hours if self.held_gpu_hours else 0.0

    @property
    def held_gpu_hours(self) -> float:
        return self.startup_gpu_hours + self.useful_gpu_hours + self.lost_gpu_hours

    @property
    def useful_percent(self) -> float:
        return 100.0 * self.useful_gpu_hours / self.held_gpu_hours if self.held_gpu_hours else 0.0


_WORK_COLUMNS = {
    UsageGrouping.PROJECT: ("project__public_id", "project__name"),
    UsageGrouping.USER: ("user__public_id", "user__username"),
    UsageGrouping.POOL: ("pool__public_id", "pool__name"),
    UsageGrouping.DAY: ("day", "day"),
}


def work_by(
    requester: Requester,
    start: datetime,
    end: datetime,
    by: UsageGrouping,
    *,
    project: str = "",
    user: str = "",
) -> list[WorkRow]:
    """Return the visible work of attempts that ended in a period, most lost work first; days (UTC) ascending."""
    rows = visible_work(requester).filter(ended_at__gte=start, ended_at__lt=end)
    if project:
        rows = rows.filter(matches_key(project, "project"))
    if user:
        rows = rows.filter(matches_key(user, "user", name="username"))
    key, name = _WORK_COLUMNS[by]
    sums = (
        rows.annotate(day=TruncDate("ended_at", tzinfo=UTC))
        .values(*{key, name}, "cause")
        .annotate(
            startup=Sum("startup_gpu_s"),
            useful=Sum("useful_gpu_s"),
            lost=Sum("lost_gpu_s"),
            count=Count("pk"),
        )
        .order_by()
    )
    groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in sums:
        groups[str(row[key])].append(row)
    found = [_work_row(group, str(rows[0][name]), rows) for group, rows in groups.items()]
    if by is UsageGrouping.DAY:
        return sorted(found, key=lambda row: row.key)
    if by is UsageGrouping.PROJECT:
        seen = set(nameable_projects(requester).values_list("public_id", flat=True))
        found = [row if row.key in seen else replace(row, name=HIDDEN_PROJECT_NAME) for row in found]
    return sorted(found, key=lambda row: (-row.lost_gpu_hours, row.key))


def _work_row(key: str, name: str, rows: list[dict[str, Any]]) -> WorkRow:
    def hours(column: str) -> float:
        return round(sum(float(row[column]) for row in rows) / 3600, 6)

    causes = {row["cause"]: round(row["lost"] / 3600, 6) for row in rows if row["cause"] and row["lost"]}
    attempts = sum(row["count"] for row in rows)
    return WorkRow(key, name, hours("startup"), hours("useful"), hours("lost"), causes, attempts)


def _sum_by_day(
    spans: str, span_values: list[Any], start: datetime, end: datetime, prices: Mapping[int, float]
) -> list[UsageRow]:
    # A UTC day is its number since 1970; an interval yields one piece per day that it touches.
    query = f"""
        WITH piece AS (
            SELECT generate_series(floor(began / 86400)::int,
                                   greatest(floor(began / 86400), ceil(ended / 86400) - 1)::int) AS day,
                   job_id, milli, began, ended, coalesce(per_hour, 0) AS price
            FROM ({_clipped_spans(spans, "pool_id")}) span {_PRICES}
        ), by_day AS (
            SELECT day, count(DISTINCT job_id) AS jobs, sum(milli * seconds) AS milli_s,
                   sum(milli * seconds * price) AS cost
            FROM piece CROSS JOIN LATERAL (
                SELECT least(ended, (day + 1) * 86400.0::float8) - greatest(began, day * 86400.0::float8) AS seconds
            ) clipped GROUP BY day
        )
        SELECT to_char(date '1970-01-01' + days.day, 'YYYY-MM-DD') AS key,
               to_char(date '1970-01-01' + days.day, 'YYYY-MM-DD'),
               coalesce(by_day.milli_s, 0) / 3600000, coalesce(by_day.jobs, 0),
               coalesce(by_day.cost, 0) / 3600000
        FROM generate_series(floor(date_part('epoch', %s::timestamptz) / 86400)::int,
                             ceil(date_part('epoch', %s::timestamptz) / 86400)::int - 1) AS days(day)
        LEFT JOIN by_day USING (day) ORDER BY 1
    """  # noqa: S608
    with connection.cursor() as cursor:
        cursor.execute(query, [start, end, *span_values, *_price_values(prices), start, end])
        return [UsageRow(*_usage_values(row)) for row in cursor.fetchall()]


def _price_values(prices: Mapping[int, float]) -> list[list[Any]]:
    return [list(prices), list(prices.values())]


def _clipped_spans(spans: str, *columns: str) -> str:
    """Return SQL for the intervals clipped to the period, in seconds since 1970 (faster than timestamps).

    Parameters: start, end, and those of ``spans``. OFFSET 0 makes PostgreSQL compute each value once.
    """
    return f"""
        SELECT * FROM (
            SELECT {", ".join((*columns, "job_id", "milli"))}, date_part('epoch', greatest(started_at, %s)) AS began,
                   date_part('epoch', least(coalesce(ended_at, now()), %s)) AS ended
            FROM ({spans}) whole OFFSET 0
        ) clipped WHERE began <= ended
    """  # noqa: S608


def _usage_values(row: tuple[str, str, object, int, object]) -> tuple[str, str, float, int, float]:
    key, name, hours, jobs, cost = row
    return key, name, max(0.0, round(float(str(hours)), 6)), jobs, max(0.0, round(float(str(cost)), 6))
