"""The report of a period: use, idle GPUs, energy, cost and waits add up to known numbers, for page, CSV and REST."""

from __future__ import annotations

import csv
import datetime as dt
import io

import pytest
from django.db import transaction
from django.test import Client
from django.urls import reverse
from django.utils import timezone

from portal.models import Attempt, ClusterSettings, Job, NodePool, UsageInterval
from portal.selectors.reports.held_time import UsageGrouping
from portal.selectors.reports.report import read_report
from portal.selectors.reports.usage import gpu_hours_by
from portal.services.nodes.metrics_rollup import save_node_metrics
from tests import factories
from tests.api.fixture_data import FixtureData

HOUR = dt.timedelta(hours=1)
REPORT = "/api/v1/usage/report/"


@pytest.fixture
def used(fixture_data: FixtureData) -> FixtureData:
    """One job of the member that waited 10 minutes and held a GPU for 2 h: 1 h idle, half busy, 0.36 kWh."""
    now = timezone.now()
    first, *others = UsageInterval.objects.order_by("id")
    UsageInterval.objects.filter(pk__in=[row.pk for row in others]).update(started_at=now, ended_at=now)
    UsageInterval.objects.filter(pk=first.pk).update(started_at=now - 2 * HOUR, ended_at=now, milli=1000)
    Job.objects.update(started_at=None)
    Job.objects.filter(pk=first.job_id).update(
        submitted_at=now - 2 * HOUR, started_at=now - 2 * HOUR + dt.timedelta(minutes=10)
    )
    attempt = Attempt.objects.get(task_rows__allocations=first.allocation_id)
    use = (0.36 * 3_600_000, 7200.0, 3600.0, 3600.0, None)
    save_node_metrics([], {(attempt.job.public_id, attempt.number, now.date()): use})
    NodePool.objects.update(policy={"gpu_hour_price": 1.5})
    ClusterSettings.objects.filter(id=1).update(policy={"grid_co2_g_per_kwh": 500, "price_currency": "CHF"})
    return fixture_data


@pytest.mark.parametrize("by", ["project", "user", "pool", "day"])
def test_the_figures_of_each_grouping_add_up(used: FixtureData, by: str) -> None:
    found = used.client("member").get(REPORT, {"by": by}).json()
    total = found["total"]
    assert total["gpu_hours"] == pytest.approx(2) and total["cost"] == pytest.approx(3)
    assert total["idle_gpu_hours"] == 1 and total["idle_cost"] == 1.5
    assert total["energy_joules"] == pytest.approx(1_296_000) and total["co2_kg"] == pytest.approx(0.18)
    assert total["wait_p50_s"] == total["wait_p90_s"] == 600
    assert found["currency"] == "CHF"
    for name in ("gpu_hours", "cost", "idle_gpu_hours", "idle_cost", "energy_joules", "started_jobs"):
        assert sum(row[name] for row in found["items"]) == pytest.approx(total[name]), name
    assert found["waits_by_size"] == [{"name": "2 to 4 GPUs", "jobs": 1, "p50_s": 600.0, "p90_s": 600.0}]


def test_hours_of_the_chart_are_those_of_the_report_by_day(used: FixtureData) -> None:
    now = timezone.now()
    rows = list(UsageInterval.objects.order_by("id"))
    for row, (begin_h, hours) in zip(rows, [(40, 1), (75, 60), (30, 27), (100, None)], strict=False):
        began = now - begin_h * HOUR
        ended = None if hours is None else began + hours * HOUR
        UsageInterval.objects.filter(pk=row.pk).update(started_at=began, ended_at=ended, milli=500)
    member, start = used.people["member"], now - 80 * HOUR
    with transaction.atomic():  # one time for intervals that are open
        by_day = gpu_hours_by(member, start, now, UsageGrouping.DAY)
        chart = read_report(member, start, now, UsageGrouping.PROJECT).days
    assert [day.name for day in chart] == [row.key for row in by_day]
    assert [day.gpu_hours for day in chart] == pytest.approx([row.gpu_hours for row in by_day], abs=1e-5)
    assert sum(day.gpu_hours for day in chart) > 0


def test_measurements_of_the_day_after_a_period_do_not_count(used: FixtureData) -> None:
    today = timezone.now().astimezone(dt.UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    period = {"start": (today - 24 * HOUR).isoformat(), "end": today.isoformat(), "by": "day"}
    found = used.client("admin").get(REPORT, period).json()
    assert [row["key"] for row in found["items"]] == [str((today - HOUR).date())]
    assert found["total"]["energy_joules"] == 0


def test_waits_are_interpolated_between_jobs(used: FixtureData) -> None:
    now, member = timezone.now(), used.people["member"]
    Job.objects.update(started_at=None)
    jobs = list(Job.objects.filter(owner=member).order_by("id")[:2])
    for job, wait_s in zip(jobs, (100, 300), strict=True):
        begun = now - HOUR
        Job.objects.filter(pk=job.pk).update(
            started_at=begun, submitted_at=begun - dt.timedelta(seconds=wait_s), tasks=1, gpus_per_task=1
        )
    found = used.client("member").get(REPORT).json()
    assert found["total"]["wait_p50_s"] == pytest.approx(200)
    assert found["total"]["wait_p90_s"] == pytest.approx(280)
    assert [row["jobs"] for row in found["waits_by_size"]] == [2]


def test_page_and_csv_agree(used: FixtureData) -> None:
    client = used.client("member")
    page = client.get(reverse("usage")).content.decode()
    for text in (
        "3.00\u00a0CHF",
        "1.50\u00a0CHF",
        "360\u00a0Wh",
        "50&nbsp;%",
        "Most idle GPU time",
        "10\u00a0min",
    ):
        assert text in page, text
    table = client.get(reverse("usage-csv"), {"by": "user"})
    (row,) = csv.DictReader(io.StringIO(b"".join(table.streaming_content).decode()))
    assert (row["cost"], row["idle_gpu_hours"], row["wait_p50_s"]) == ("3.000000", "1.000000", "600.000000")
    assert "report-user-" in table["Content-Disposition"]


def test_without_prices_and_measurements_no_costs_are_shown(fixture_data: FixtureData) -> None:
    page = fixture_data.client("member").get(reverse("usage")).content.decode()
    assert "not measured" in page and "Cost" not in page and "CO₂" not in page


def test_other_users_cannot_see_the_report(used: FixtureData) -> None:
    client = Client()
    client.force_login(factories.user("eve"))
    assert client.get(REPORT).json()["items"] == []
    assert "No GPU time in this period" in client.get(reverse("usage")).content.decode()


@pytest.mark.parametrize(
    ("days", "problem"),
    [
        ({"from": "2026-05-02", "until": "2026-05-01"}, "not after the last one"),
        ({"from": "2020-01-01", "until": "2026-05-01"}, "at most 366 days"),
        ({"from": "soon"}, "Give days as"),
        ({"from": "2026-02-31"}, "Give days as"),
    ],
)
def test_impossible_days_are_named(used: FixtureData, days: dict[str, str], problem: str) -> None:
    page = used.client("member").get(reverse("usage"), days).content.decode()
    assert problem in page and "The last 30 days are shown" in page


def test_chosen_days_include_the_last_one(used: FixtureData) -> None:
    today = timezone.localdate()
    page = used.client("member").get(reverse("usage"), {"from": today - dt.timedelta(1), "until": today})
    assert "3.00\u00a0CHF" in page.content.decode()
    gone = used.client("member").get(reverse("usage"), {"from": "2026-01-01", "until": "2026-01-02"})
    assert "No GPU time in this period" in gone.content.decode()
