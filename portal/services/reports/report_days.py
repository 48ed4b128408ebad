"""Stores the figures of days that have ended, so that reports of long periods need not read the ledger again."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable

from django.db import connection, transaction
from django.utils import timezone

from portal.models import AttemptGpuDay, AttemptWork, Job, ReportDay, ReportDayRow, UsageInterval
from portal.selectors.reports.held_time import TimeRange, UsageGrouping, number_of_day, start_of_day
from portal.selectors.reports.report_figures import (
    ReportSources,
    compute_figures,
    stored_rows,
    stored_size_rows,
)

SETTLED_AFTER = dt.timedelta(minutes=30)
"""After its end: longer than any transaction that began before it."""
STORED_DAYS = 370
"""At least as many as a report can have."""
MAX_DAYS_PER_PASS = 20


def store_report_days() -> int:
    """Store the newest days that have ended and are not stored, a bounded number; return how many."""
    newest = number_of_day((timezone.now() - SETTLED_AFTER).astimezone(dt.UTC).date()) - 1
    wanted = range(newest, newest - STORED_DAYS, -1)
    rows = ReportDay.objects.filter(format=ReportDay.FORMAT, day__gte=start_of_day(wanted[-1]).date())
    stored = {number_of_day(day) for day in rows.values_list("day", flat=True)}
    missing = [day for day in wanted if day not in stored][:MAX_DAYS_PER_PASS]
    for day in missing:
        _store_day(day)
    ReportDay.objects.filter(day__lt=start_of_day(wanted[-1]).date()).delete()
    return len(missing)


def forget_report_days(days: Iterable[dt.date]) -> None:
    """Delete the stored figures of those of these days (UTC) that have ended.

    Called after a row was written that may belong to such a day, in the same transaction.
    """
    today = timezone.now().astimezone(dt.UTC).date()
    if ended := {day for day in days if day < today}:
        _lock()
        ReportDay.objects.filter(day__in=ended).delete()


@transaction.atomic
def _store_day(day: int) -> None:
    _lock()
    sources = ReportSources(
        UsageInterval.objects.all(),
        AttemptWork.objects.all(),
        AttemptGpuDay.objects.all(),
        Job.objects.all(),
    )
    whole_day = TimeRange(start_of_day(day), start_of_day(day + 1))
    rows: list[ReportDayRow] = []
    for by in (UsageGrouping.PROJECT, UsageGrouping.USER, UsageGrouping.POOL):
        figures = compute_figures(sources, [whole_day], by)
        rows += stored_rows(figures, day, by.value)
        if by is UsageGrouping.PROJECT:
            rows += stored_size_rows(figures, day)
    ReportDay.objects.filter(day=whole_day.start.date()).delete()
    ReportDay.objects.create(day=whole_day.start.date(), format=ReportDay.FORMAT)
    ReportDayRow.objects.bulk_create(rows, batch_size=500)


def _lock() -> None:
    """Wait until no other transaction stores days or changes one that has ended.

    Each statement after it sees what those have committed: transactions are READ COMMITTED.
    """
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_advisory_xact_lock(%s)", [ReportDay.LOCK])
