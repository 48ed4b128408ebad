"""Reads GPU-hours of a period by project, user, pool or day, and how much of them was lost."""

from __future__ import annotations

import datetime as dt
from collections import defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from django.db.models import Count, F, QuerySet, Sum
from django.db.models.functions import TruncDate

from portal.access import Requester, nameable_projects, visible_usage, visible_work
from portal.hidden_fields import HIDDEN_PROJECT_NAME
from portal.models import AttemptWork, NodePool, Project, User
from portal.selectors.lookup import matches_key
from portal.selectors.reports.held_time import (
    TimeRange,
    UsageGrouping,
    count_distinct,
    day_of_number,
    number_of_day,
    read_held_time,
)

_S_PER_HOUR = 3600.0


@dataclass(frozen=True)
class UsageRow:
    """A sum: the key (public id, or a date), its name, GPU-hours, and the number of jobs."""

    key: str
    name: str
    gpu_hours: float
    jobs: int


def gpu_hours_by(
    requester: Requester,
    start: dt.datetime,
    end: dt.datetime,
    by: UsageGrouping,
    *,
    project: str = "",
    user: str = "",
) -> list[UsageRow]:
    """Return visible GPU-hours between two times, largest first, in two queries plus permissions.

    Open intervals count up to now. Days are UTC, ascending; an interval across midnight is split.
    """
    rows = visible_usage(requester)
    if project:
        rows = rows.filter(matches_key(project, "project"))
    if user:
        rows = rows.filter(matches_key(user, "user", name="username"))
    period = TimeRange(start, end)
    held = read_held_time(rows, [period], by)
    milli_s: dict[int, float] = defaultdict(float)
    if by is UsageGrouping.DAY:
        milli_s.update(dict.fromkeys(period.days, 0.0))
    for (group, _pool), found in held.milli_s.items():
        milli_s[group] += found
    labels = group_labels(requester, by, milli_s)
    sums = [
        UsageRow(*labels[group], as_hours(found / 1000), count_distinct(held.jobs.get(group, ())))
        for group, found in milli_s.items()
    ]
    return sorted(sums, key=lambda row: row.key if by is UsageGrouping.DAY else (-row.gpu_hours, row.key))


def as_hours(seconds: float) -> float:
    """Return seconds as hours, to a millionth; rounding of sums never makes them negative."""
    return max(0.0, round(seconds / _S_PER_HOUR, 6))


def group_labels(
    requester: Requester, by: UsageGrouping, groups: Collection[int]
) -> dict[int, tuple[str, str]]:
    """Return key and name of each group: public id and name of a row, or the date of a day.

    The name of a project that the user has left is hidden: own usage may be in it.
    """
    if by is UsageGrouping.DAY:
        return {number: (str(day_of_number(number)),) * 2 for number in groups}
    table, name = {
        UsageGrouping.PROJECT: (Project, "name"),
        UsageGrouping.USER: (User, "username"),
        UsageGrouping.POOL: (NodePool, "name"),
    }[by]
    rows = table._default_manager.filter(pk__in=groups).values_list("pk", "public_id", name)
    labels = {pk: (key, label) for pk, key, label in rows}
    if by is UsageGrouping.PROJECT:
        seen = set(nameable_projects(requester).filter(pk__in=labels).values_list("pk", flat=True))
        return {pk: row if pk in seen else (row[0], HIDDEN_PROJECT_NAME) for pk, row in labels.items()}
    return labels


class WorkSum(NamedTuple):
    """GPU-seconds of ended attempts of a group and pool with the same cause of loss."""

    group: int
    pool: int
    cause: str
    startup_gpu_s: float
    useful_gpu_s: float
    lost_gpu_s: float
    attempts: int


def read_work(rows: QuerySet[AttemptWork], by: UsageGrouping) -> Iterator[WorkSum]:
    """Return the sums of these rows, in one query."""
    column = {
        UsageGrouping.PROJECT: F("project_id"),
        UsageGrouping.USER: F("user_id"),
        UsageGrouping.POOL: F("pool_id"),
        UsageGrouping.DAY: TruncDate("ended_at", tzinfo=dt.UTC),
    }[by]
    sums = rows.order_by().annotate(group=column).values_list("group", "pool_id", "cause")
    for group, *values in sums.annotate(
        Sum("startup_gpu_s"), Sum("useful_gpu_s"), Sum("lost_gpu_s"), Count("pk")
    ):
        yield WorkSum(number_of_day(group) if by is UsageGrouping.DAY else group, *values)


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
    def held_gpu_hours(self) -> float:
        return self.startup_gpu_hours + self.useful_gpu_hours + self.lost_gpu_hours

    @property
    def useful_percent(self) -> float:
        return 100.0 * self.useful_gpu_hours / self.held_gpu_hours if self.held_gpu_hours else 0.0


def work_by(
    requester: Requester,
    start: dt.datetime,
    end: dt.datetime,
    by: UsageGrouping,
    *,
    project: str = "",
    user: str = "",
    groups: Collection[int | None] | None = None,
) -> list[WorkRow]:
    """Return the visible work of attempts that ended in a period, most lost work first; days (UTC) ascending.

    ``groups`` are primary keys of projects, users or pools; None: all.
    """
    rows = visible_work(requester).filter(ended_at__gte=start, ended_at__lt=end)
    if project:
        rows = rows.filter(matches_key(project, "project"))
    if user:
        rows = rows.filter(matches_key(user, "user", name="username"))
    if groups is not None:
        rows = rows.filter(**{f"{by.value}__in": groups})
    sums: dict[int, list[WorkSum]] = defaultdict(list)
    for row in read_work(rows, by):
        sums[row.group].append(row)
    labels = group_labels(requester, by, sums)
    found = [_work_row(*labels[group], each) for group, each in sums.items()]
    if by is UsageGrouping.DAY:
        return sorted(found, key=lambda row: row.key)
    return sorted(found, key=lambda row: (-row.lost_gpu_hours, row.key))


def _work_row(key: str, name: str, sums: list[WorkSum]) -> WorkRow:
    lost_s: dict[str, float] = defaultdict(float)
    for row in sums:
        if row.cause and row.lost_gpu_s:
            lost_s[row.cause] += row.lost_gpu_s
    return WorkRow(
        key,
        name,
        as_hours(sum(row.startup_gpu_s for row in sums)),
        as_hours(sum(row.useful_gpu_s for row in sums)),
        as_hours(sum(row.lost_gpu_s for row in sums)),
        {cause: as_hours(seconds) for cause, seconds in lost_s.items()},
        sum(row.attempts for row in sums),
    )
