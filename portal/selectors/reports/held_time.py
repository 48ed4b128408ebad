"""Reads how long GPUs were held in parts of a period, by group, pool and day (UTC), and by which jobs."""

from __future__ import annotations

import datetime as dt
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import reduce
from itertools import accumulate
from operator import or_
from typing import Any, NamedTuple

import numpy as np
from django.db import connection
from django.db.models import Q, QuerySet

from portal.models import UsageInterval

DAY_S = 86_400
_EPOCH = dt.date(1970, 1, 1).toordinal()


class UsageGrouping(StrEnum):
    PROJECT = "project"
    USER = "user"
    POOL = "pool"
    DAY = "day"


_GROUP_COLUMNS = {
    UsageGrouping.PROJECT: "project_id",
    UsageGrouping.USER: "user_id",
    UsageGrouping.POOL: "pool_id",
    UsageGrouping.DAY: "0",
}


class TimeRange(NamedTuple):
    """A part of a period, without its end. Two parts of one period share no day (UTC)."""

    start: dt.datetime
    end: dt.datetime

    @property
    def days(self) -> range:
        """The days (UTC) that it touches, by number."""
        last = self.end - dt.timedelta(microseconds=1)
        return range(number_of_day(_utc_date(self.start)), number_of_day(_utc_date(last)) + 1)


def number_of_day(day: dt.date) -> int:
    """Return the number of a day: 0 is 1970-01-01."""
    return day.toordinal() - _EPOCH


def day_of_number(number: int) -> dt.date:
    return dt.date.fromordinal(number + _EPOCH)


def start_of_day(number: int) -> dt.datetime:
    return dt.datetime.combine(day_of_number(number), dt.time(), dt.UTC)


def count_distinct(packed: Iterable[bytes]) -> int:
    """Return the number of different ids, of 8 bytes each."""
    return int(np.unique(np.frombuffer(b"".join(packed), np.int64)).size)


def within(ranges: Iterable[TimeRange], column: str) -> Q:
    """Return the filter of rows whose moment is in one of the ranges; there must be one."""
    return reduce(or_, (Q(**{f"{column}__gte": each.start, f"{column}__lt": each.end}) for each in ranges))


@dataclass
class HeldTime:
    """GPU milli-seconds by (group, pool) and by number of the day; the ids of jobs by group, of 8 bytes each.

    An id may be repeated. The group of a day is its number.
    """

    milli_s: dict[tuple[int, int], float] = field(default_factory=lambda: defaultdict(float))
    days: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    jobs: dict[int, list[bytes]] = field(default_factory=lambda: defaultdict(list))


def read_held_time(
    intervals: QuerySet[UsageInterval], ranges: Sequence[TimeRange], by: UsageGrouping
) -> HeldTime:
    """Return the time of these intervals in parts of a period, in one query. Open ones count up to now.

    An interval of no time counts as that of a job if it is not before the part. Intervals with the same group,
    pool, first and last day are one row: their days are computed from sums.
    """
    held = HeldTime()
    if not ranges:
        return held
    origin = min(each.start for each in ranges).astimezone(dt.UTC)
    first_day = number_of_day(origin.date())
    # Seconds are counted from the first day. The sums of starts and ends are exact to a microsecond this way.
    parts, values = zip(*(_clipped(intervals, each, first_day * DAY_S) for each in ranges), strict=True)
    query = f"""
        SELECT {_GROUP_COLUMNS[by]}, pool_id, floor(began / {DAY_S})::int AS first,
               greatest(floor(began / {DAY_S}), ceil(ended / {DAY_S}) - 1)::int AS last,
               sum(milli * began), sum(milli * ended), sum(milli), string_agg(int8send(job_id), ''::bytea)
        FROM ({" UNION ALL ".join(parts)}) clipped WHERE began <= ended GROUP BY 1, 2, 3, 4
    """  # noqa: S608 - only constants are interpolated
    with connection.cursor() as cursor:
        cursor.execute(query, [value for part in values for value in part])
        rows = cursor.fetchall()
    _add_days(held, rows, first_day, by)
    for group, pool, first, last, began, ended, _milli, jobs in rows:
        if by is UsageGrouping.DAY:
            for day in range(first, last + 1):
                held.jobs[first_day + day].append(bytes(jobs))
        else:
            held.milli_s[group, pool] += ended - began
            held.jobs[group].append(bytes(jobs))
    return held


def _add_days(held: HeldTime, rows: Sequence[tuple[Any, ...]], first_day: int, by: UsageGrouping) -> None:
    """Add the time of each day: that of first and last days, and whole days from where they begin and end."""
    partial: dict[tuple[int, int], float] = defaultdict(float)
    steps: dict[int, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    for _group, pool, first, last, began, ended, milli, _jobs in rows:
        if first == last:
            partial[pool, first] += ended - began
            continue
        partial[pool, first] += milli * (first + 1) * DAY_S - began
        partial[pool, last] += ended - milli * last * DAY_S
        steps[pool][first + 1] += milli * DAY_S
        steps[pool][last] -= milli * DAY_S
    for pool, changes in steps.items():
        days = range(min(changes), max(changes))
        for day, milli_s in zip(days, accumulate(changes.get(day, 0.0) for day in days), strict=True):
            partial[pool, day] += milli_s
    for (pool, day), milli_s in partial.items():
        held.days[first_day + day] += milli_s
        if by is UsageGrouping.DAY:
            held.milli_s[first_day + day, pool] += milli_s


def _clipped(
    intervals: QuerySet[UsageInterval], within: TimeRange, origin_s: int
) -> tuple[str, tuple[Any, ...]]:
    """Return SQL for the intervals clipped to a range, in seconds since the origin, and its parameters.

    Seconds are faster than timestamps. OFFSET 0 makes PostgreSQL compute each value once.
    """
    rows = intervals.filter(
        Q(ended_at__isnull=True)
        | Q(ended_at__gt=within.start)
        | Q(ended_at=within.start, started_at=within.start),
        started_at__lt=within.end,
    )
    columns = ("project_id", "user_id", "pool_id", "job_id", "milli", "started_at", "ended_at")
    query, values = rows.order_by().values(*columns).query.sql_with_params()
    clipped = f"""
        (SELECT project_id, user_id, pool_id, job_id, milli,
                date_part('epoch', greatest(started_at, %s)) - {origin_s} AS began,
                date_part('epoch', least(coalesce(ended_at, now()), %s)) - {origin_s} AS ended
         FROM ({query}) whole OFFSET 0)
    """  # noqa: S608 - only constants are interpolated
    return clipped, (within.start, within.end, *values)


def _utc_date(moment: dt.datetime) -> dt.date:
    return moment.astimezone(dt.UTC).date()
