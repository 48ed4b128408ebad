"""Reports with stored days: the same figures as computed from the ledger, for any period, and never stale ones."""

from __future__ import annotations

import datetime as dt
from dataclasses import fields
from typing import Any

import pytest
from django.db.models.functions import Now
from django.utils import timezone
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from portal.domain.jobs.lost_work import LossCause
from portal.models import (
    Attempt,
    AttemptGpuDay,
    AttemptWork,
    Job,
    ReportDay,
    ReportDayRow,
    UsageInterval,
    User,
)
from portal.selectors.reports import report_figures
from portal.selectors.reports.held_time import UsageGrouping
from portal.selectors.reports.report import Report, read_report
from portal.selectors.reports.report_figures import LOST_COLUMNS, Figures
from portal.services.nodes.metrics_rollup import save_node_metrics
from portal.services.reports import report_days
from portal.services.reports.report_days import forget_report_days, store_report_days
from tests import factories
from tests.api.fixture_data import FixtureData, running
from tests.table_owner import execute_as_owner

DAY = dt.timedelta(days=1)
HOUR = dt.timedelta(hours=1)
STORED = 6

# Rows that begin or end at midnight or a microsecond beside it, that last days or no time at all, or are open.
OFFSETS = st.sampled_from([dt.timedelta(microseconds=n) for n in (-1, 0, 1)]) | st.timedeltas(
    dt.timedelta(0), DAY
)
INSTANTS = st.builds(lambda days, offset: -days * DAY + offset, st.integers(1, STORED + 2), OFFSETS)
"""Before today's midnight (UTC)."""
LENGTHS = st.sampled_from([dt.timedelta(0), DAY]) | st.timedeltas(dt.timedelta(0), 4 * DAY)
SECONDS = st.sampled_from([0.0, 60.0, 3_600.5])


@pytest.fixture
def used(fixture_data: FixtureData, monkeypatch: pytest.MonkeyPatch) -> FixtureData:
    """Jobs of two users in two pools on two GPUs each; few days are stored in one pass."""
    monkeypatch.setattr(report_days, "MAX_DAYS_PER_PASS", STORED)
    people = [fixture_data.people["member"], fixture_data.people["colleague"]]
    pools = [fixture_data.rows["pool"], factories.pool("other")]
    for number in range(4):
        job = factories.job(
            people[number % 2], fixture_data.rows["project"], fixture_data.rows["batch"], tasks=2
        )
        running(job, factories.node(pools[number // 2], gpus=2))
    return fixture_data


def midnight() -> dt.datetime:
    return timezone.now().astimezone(dt.UTC).replace(hour=0, minute=0, second=0, microsecond=0)


def figures(report: Report) -> dict[str, Any]:
    """Return the report as one table, without the order of rows with equal use."""

    def columns(row: Any) -> dict[str, Any]:
        values = {each.name: getattr(row, each.name) for each in fields(row)}
        return values.pop("lost_by_cause", {}) | values

    tables = {"row": [*report.rows, report.total], "size": report.waits, "day": report.days}
    return {
        f"{kind} {row.name} {name}": value
        for kind, rows in tables.items()
        for row in rows
        for name, value in columns(row).items()
    }


@settings(
    max_examples=40, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)
@given(data=st.data())
def test_stored_days_change_no_figure(used: FixtureData, data: st.DataObject) -> None:
    today, admin = midnight(), User.objects.get(username="admin-x")
    _draw_rows(data, today)
    start, end = sorted(today + data.draw(INSTANTS) for _ in range(2))
    end = data.draw(st.sampled_from([end + dt.timedelta(microseconds=1), today + HOUR / 60, today]))
    ReportDay.objects.all().delete()
    computed = {by: figures(read_report(admin, start, end, by)) for by in UsageGrouping}
    assert store_report_days() == STORED
    left_out = data.draw(st.integers(1, STORED))
    ReportDay.objects.filter(day=(today - left_out * DAY).date()).delete()
    for by in UsageGrouping:
        stored = figures(read_report(admin, start, end, by))
        assert stored == pytest.approx(computed[by], abs=2e-6), by


def _draw_rows(data: st.DataObject, today: dt.datetime) -> None:
    now = User.objects.values_list(Now(), flat=True)[0]
    intervals = list(UsageInterval.objects.order_by("id"))
    for row in intervals:
        row.started_at, length = today + data.draw(INSTANTS), data.draw(st.none() | LENGTHS)
        row.milli = data.draw(st.sampled_from([1000, 250]))
        row.ended_at = None if length is None else min(row.started_at + length, now)
    UsageInterval.objects.bulk_update(intervals, ["started_at", "ended_at", "milli"])
    Job.objects.update(started_at=None)
    jobs = list(Job.objects.filter(attempts__isnull=False).distinct())
    for job in jobs:
        job.started_at = today + data.draw(INSTANTS)
        job.submitted_at = job.started_at - data.draw(LENGTHS)
        job.gpus_per_task = data.draw(st.integers(0, 9))
    Job.objects.bulk_update(jobs, ["started_at", "submitted_at", "gpus_per_task"])
    # rows of the last 400 days cannot be deleted
    execute_as_owner("UPDATE portal_attemptwork SET ended_at = '2000-01-01'; DELETE FROM portal_attemptwork")
    AttemptGpuDay.objects.all().delete()
    for attempt in Attempt.objects.select_related("job"):
        AttemptWork.objects.create(
            attempt=attempt,
            project_id=attempt.job.project_id,
            user_id=attempt.job.owner_id,
            pool_id=attempt.pool_id,
            ended_at=today + data.draw(INSTANTS),
            cause=data.draw(st.sampled_from(["", *LossCause])),
            startup_gpu_s=data.draw(SECONDS),
            useful_gpu_s=data.draw(SECONDS),
            lost_gpu_s=data.draw(SECONDS),
        )
        for place, number in enumerate(sorted(data.draw(st.sets(st.integers(0, STORED + 1))))):
            AttemptGpuDay.objects.create(
                attempt=attempt,
                job=attempt.job,
                project_id=attempt.job.project_id,
                user_id=attempt.job.owner_id,
                pool_id=attempt.pool_id,
                day=(today - number * DAY).date(),
                is_continued=place > 0,
                joules=data.draw(st.none() | SECONDS),
                measured_gpu_s=3_600.5,
                busy_gpu_s=data.draw(SECONDS),
                idle_gpu_s=data.draw(SECONDS),
            )


def test_only_those_who_see_all_usage_get_stored_figures(used: FixtureData) -> None:
    UsageInterval.objects.update(started_at=midnight() - 30 * HOUR, ended_at=midnight() - 28 * HOUR)
    store_report_days()
    period = (midnight() - 4 * DAY, midnight())
    before = {
        actor: read_report(used.people[actor], *period, UsageGrouping.PROJECT).total.gpu_hours
        for actor in used.people
    }
    ReportDayRow.objects.update(held_gpu_s=3_600_000.0)
    ReportDay.objects.update(stored_at=timezone.now())  # or the figures that were read above would be used
    for actor, hours in before.items():
        found = read_report(used.people[actor], *period, UsageGrouping.PROJECT).total.gpu_hours
        assert (found >= 1_000) if actor == "admin" else (found == hours), actor


def test_samples_that_arrive_late_are_in_the_report(used: FixtureData) -> None:
    attempt, admin = Attempt.objects.select_related("job").earliest("id"), used.people["admin"]
    yesterday = (midnight() - DAY).date()
    store_report_days()
    period = (midnight() - 3 * DAY, midnight())
    assert read_report(admin, *period, UsageGrouping.USER).total.energy_joules == 0
    key = (attempt.job.public_id, attempt.number, yesterday - DAY)
    save_node_metrics([], {key: (500.0, 60.0, 30.0, 30.0, None)})
    for _ in range(2):
        assert read_report(admin, *period, UsageGrouping.USER).total.energy_joules == 500.0
        store_report_days()
    assert ReportDay.objects.filter(day=yesterday - DAY).exists()


def test_today_is_not_stored_and_other_formats_are_not_used(used: FixtureData) -> None:
    store_report_days()
    assert not ReportDay.objects.filter(day__gte=midnight().date()).exists()
    forget_report_days([midnight().date()])
    count = ReportDay.objects.count()
    ReportDay.objects.update(format=ReportDay.FORMAT + 1)
    ReportDayRow.objects.update(held_gpu_s=3_600_000.0)
    period = (midnight() - 4 * DAY, midnight())
    assert read_report(used.people["admin"], *period, UsageGrouping.POOL).total.gpu_hours < 1_000
    store_report_days()
    assert ReportDay.objects.filter(format=ReportDay.FORMAT).count() == count == STORED


def test_a_day_that_is_deleted_while_a_report_reads_is_computed(
    used: FixtureData, monkeypatch: pytest.MonkeyPatch
) -> None:
    UsageInterval.objects.update(started_at=midnight() - 30 * HOUR, ended_at=midnight() - 28 * HOUR)
    admin, period = used.people["admin"], (midnight() - 4 * DAY, midnight())
    hours = read_report(admin, *period, UsageGrouping.PROJECT).total.gpu_hours
    store_report_days()
    read_stored = report_figures._read_stored

    def delete_first(*arguments: Any) -> Figures:
        ReportDay.objects.filter(day=(midnight() - 2 * DAY).date()).delete()
        return read_stored(*arguments)

    monkeypatch.setattr(report_figures, "_read_stored", delete_first)
    assert read_report(admin, *period, UsageGrouping.PROJECT).total.gpu_hours == pytest.approx(hours)


def test_days_of_long_ago_are_deleted(used: FixtureData) -> None:
    old = midnight().date() - 500 * DAY
    ReportDay.objects.create(day=old, format=ReportDay.FORMAT)
    store_report_days()
    assert not ReportDay.objects.filter(day=old).exists()


def test_each_cause_of_loss_has_a_column() -> None:
    columns = {each.name for each in ReportDayRow._meta.get_fields()}
    assert set(LOST_COLUMNS.values()) <= columns
