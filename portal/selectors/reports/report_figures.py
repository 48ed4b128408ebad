"""Reads the figures of a report: sums, jobs and waits of parts of a period, or of days whose figures are stored.

Figures of parts of a period without a common day add up to those of the period.
"""

from __future__ import annotations

import datetime as dt
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache, reduce
from operator import or_

from django.db.models import Aggregate, BinaryField, F, Q, QuerySet, Sum

from portal.access import (
    Requester,
    sees_all_usage,
    visible_gpu_days,
    visible_usage,
    visible_waits,
    visible_work,
)
from portal.domain.jobs.lost_work import LossCause
from portal.models import AttemptGpuDay, AttemptWork, Job, ReportDay, ReportDayRow, UsageInterval
from portal.selectors.reports.held_time import (
    TimeRange,
    UsageGrouping,
    day_of_number,
    number_of_day,
    read_held_time,
    start_of_day,
    within,
)
from portal.selectors.reports.usage import read_work
from portal.selectors.reports.waits import read_waits

SIZE_GROUPING = "size"
"""Of stored rows: their groups are the classes of sizes of requests."""
NO_POOL = 0
MAX_TRIES = 2
READ_PERIODS = 8
"""Number of periods whose stored figures a process keeps; those of a month with 100,000 jobs have 2 MB."""
LOST_COLUMNS = {cause.value: f"lost_{cause.value}_gpu_s" for cause in LossCause}
MEASURED_COLUMNS = ("measured_gpu_s", "busy_gpu_s", "idle_gpu_s", "joules")
SUM_COLUMNS = (
    *("held_gpu_s", "startup_gpu_s", "useful_gpu_s", "lost_gpu_s"),
    *LOST_COLUMNS.values(),
    *MEASURED_COLUMNS,
)
"""Columns of ``ReportDayRow``."""
_GPU_DAY_COLUMNS = {
    UsageGrouping.PROJECT: "project_id",
    UsageGrouping.USER: "user_id",
    UsageGrouping.POOL: "pool_id",
    UsageGrouping.DAY: "day",
}


class _Concatenated(Aggregate):
    """Binary values, one after the other."""

    function = "STRING_AGG"
    template = "%(function)s(%(expressions)s, '')"
    output_field = BinaryField()


@dataclass(frozen=True)
class ReportSources:
    """The rows from which figures are computed."""

    intervals: QuerySet[UsageInterval]
    work: QuerySet[AttemptWork]
    gpu_days: QuerySet[AttemptGpuDay]
    jobs: QuerySet[Job]


@dataclass
class Figures:
    """Values of ``SUM_COLUMNS`` by (group, pool); the rest by group, by class of sizes, or by number of the day.

    ``jobs`` and ``waits`` are packed as in ``ReportDayRow``, in several parts; ids of jobs may be repeated. ``days``
    are the held and the idle GPU-seconds.
    """

    sums: dict[tuple[int, int], dict[str, float]] = field(
        default_factory=lambda: defaultdict(lambda: dict.fromkeys(SUM_COLUMNS, 0.0))
    )
    jobs: dict[int, list[bytes]] = field(default_factory=lambda: defaultdict(list))
    waits: dict[int, list[bytes]] = field(default_factory=lambda: defaultdict(list))
    waits_by_size: dict[int, list[bytes]] = field(default_factory=lambda: defaultdict(list))
    days: dict[int, list[float]] = field(default_factory=lambda: defaultdict(lambda: [0.0, 0.0]))


def read_figures(requester: Requester, start: dt.datetime, end: dt.datetime, by: UsageGrouping) -> Figures:
    """Return the visible figures of a period in at most nine queries, plus permissions.

    Whoever sees all usage gets stored days from their rows. Measurements are kept by day (UTC): those of the
    first and the last day count whole.
    """
    period = TimeRange(start, end)
    sources = ReportSources(
        visible_usage(requester),
        visible_work(requester),
        visible_gpu_days(requester),
        visible_waits(requester),
    )
    if sees_all_usage(requester):
        for _ in range(MAX_TRIES):
            stored = _stored_days(period)
            figures = compute_figures(sources, _ranges_without([each.number for each in stored], period), by)
            if not stored:
                return figures
            _add(figures, _read_stored(stored, by))
            if set(stored) <= set(_stored_days(period)):  # none was deleted meanwhile
                return figures
    return compute_figures(sources, [period], by)


def compute_figures(sources: ReportSources, ranges: Sequence[TimeRange], by: UsageGrouping) -> Figures:
    """Return the figures of parts of a period from the sources, in four queries."""
    figures = Figures()
    if not ranges:
        return figures
    held = read_held_time(sources.intervals, ranges, by)
    for key, milli_s in held.milli_s.items():
        figures.sums[key]["held_gpu_s"] += milli_s / 1000
    figures.jobs = held.jobs
    for day, milli_s in held.days.items():
        figures.days[day][0] += milli_s / 1000
    for work in read_work(sources.work.filter(within(ranges, "ended_at")), by):
        sums = figures.sums[work.group, work.pool]
        sums["startup_gpu_s"] += work.startup_gpu_s
        sums["useful_gpu_s"] += work.useful_gpu_s
        sums["lost_gpu_s"] += work.lost_gpu_s
        if work.cause:
            sums[LOST_COLUMNS[work.cause]] += work.lost_gpu_s
    _add_measurements(figures, sources.gpu_days.filter(on_days_of(ranges)), by)
    for group, size, packed in read_waits(sources.jobs, ranges, by):
        figures.waits[group].append(packed)
        figures.waits_by_size[size].append(packed)
    return figures


def on_days_of(ranges: Sequence[TimeRange]) -> Q:
    """Return the filter of rows whose ``day`` is touched by one of the ranges; there must be one."""
    days = [each.days for each in ranges]
    return reduce(
        or_, (Q(day__gte=day_of_number(each[0]), day__lte=day_of_number(each[-1])) for each in days)
    )


def _add_measurements(figures: Figures, rows: QuerySet[AttemptGpuDay], by: UsageGrouping) -> None:
    sums = (
        rows.order_by()
        .annotate(group=F(_GPU_DAY_COLUMNS[by]))
        .values_list("group", "pool_id", "day")
        .annotate(**{f"sum_{column}": Sum(column) for column in MEASURED_COLUMNS})
    )
    for group, pool, day, *values in sums:
        number = number_of_day(day)
        found = figures.sums[number if by is UsageGrouping.DAY else group, pool]
        for column, value in zip(MEASURED_COLUMNS, values, strict=True):
            found[column] += value or 0.0
        figures.days[number][1] += values[MEASURED_COLUMNS.index("idle_gpu_s")]


@dataclass(frozen=True)
class _StoredDay:
    """A day whose figures are stored; they never change, another ``stored_at`` is another row."""

    number: int
    stored_at: dt.datetime


def _stored_days(period: TimeRange) -> tuple[_StoredDay, ...]:
    """Return the whole days of the period that are stored, ascending."""
    whole = [
        day_of_number(day)
        for day in period.days
        if period.start <= start_of_day(day) and start_of_day(day + 1) <= period.end
    ]
    if not whole:
        return ()
    rows = ReportDay.objects.filter(day__gte=whole[0], day__lte=whole[-1], format=ReportDay.FORMAT)
    return tuple(
        _StoredDay(number_of_day(day), stored_at)
        for day, stored_at in rows.order_by("day").values_list("day", "stored_at")
    )


def _ranges_without(days: Sequence[int], period: TimeRange) -> list[TimeRange]:
    """Return what these days leave of the period."""
    ranges, start = [], period.start
    for day in days:
        if start < start_of_day(day):
            ranges.append(TimeRange(start, start_of_day(day)))
        start = start_of_day(day + 1)
    return [*ranges, TimeRange(start, period.end)] if start < period.end else ranges


def _add(figures: Figures, others: Figures) -> None:
    """Add the figures of other parts of the period."""
    for key, values in others.sums.items():
        sums = figures.sums[key]
        for column, value in values.items():
            sums[column] += value
    for mine, theirs in (
        (figures.jobs, others.jobs),
        (figures.waits, others.waits),
        (figures.waits_by_size, others.waits_by_size),
    ):
        for group, packed in theirs.items():
            mine[group] += packed
    for day, (held, idle) in others.days.items():
        of_day = figures.days[day]
        of_day[0] += held
        of_day[1] += idle


@lru_cache(maxsize=READ_PERIODS)
def _read_stored(days: Sequence[_StoredDay], by: UsageGrouping) -> Figures:
    """Return the figures of stored days, in three queries unless they are cached; not to be changed."""
    figures = Figures()
    stored = ReportDayRow.objects.filter(day__in=[day_of_number(each.number) for each in days]).order_by()
    of_pools = stored.filter(grouping=UsageGrouping.POOL.value)
    if by is UsageGrouping.DAY:
        rows = of_pools.annotate(key=F("day_id"))
    else:
        rows = stored.filter(grouping=by.value).annotate(key=F("group"))
    sums = {f"sum_{column}": Sum(column) for column in SUM_COLUMNS}
    packed = {"all_jobs": _Concatenated("jobs"), "all_waits": _Concatenated("waits_s")}
    for key, pool, *values, jobs, waits in rows.values_list("key", "pool").annotate(**sums, **packed):
        group = number_of_day(key) if by is UsageGrouping.DAY else key
        if pool == NO_POOL:
            figures.jobs[group].append(bytes(jobs))
            figures.waits[group].append(bytes(waits))
            continue
        found = figures.sums[group, pool]
        for column, value in zip(SUM_COLUMNS, values, strict=True):
            found[column] += value
    sizes = stored.filter(grouping=SIZE_GROUPING).values_list("group")
    for size, waits in sizes.annotate(all_waits=_Concatenated("waits_s")):
        figures.waits_by_size[size].append(bytes(waits))
    for day, held, idle in of_pools.values_list("day").annotate(Sum("held_gpu_s"), Sum("idle_gpu_s")):
        of_day = figures.days[number_of_day(day)]
        of_day[0] += held
        of_day[1] += idle
    return figures


def stored_rows(figures: Figures, day: int, grouping: str) -> list[ReportDayRow]:
    """Return the rows that store the figures of one day by a grouping."""
    date = day_of_number(day)
    rows = [
        ReportDayRow(day_id=date, grouping=grouping, group=group, pool=pool, **sums)
        for (group, pool), sums in figures.sums.items()
    ]
    for group in {*figures.jobs, *figures.waits}:
        jobs, waits_s = b"".join(figures.jobs.get(group, ())), b"".join(figures.waits.get(group, ()))
        rows.append(
            ReportDayRow(
                day_id=date, grouping=grouping, group=group, pool=NO_POOL, jobs=jobs, waits_s=waits_s
            )
        )
    return rows


def stored_size_rows(figures: Figures, day: int) -> list[ReportDayRow]:
    """Return the rows that store the waits of one day by size of the request."""
    return [
        ReportDayRow(
            day_id=day_of_number(day),
            grouping=SIZE_GROUPING,
            group=size,
            pool=NO_POOL,
            waits_s=b"".join(packed),
        )
        for size, packed in figures.waits_by_size.items()
    ]
