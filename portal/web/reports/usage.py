"""The reports page: GPU-hours held, useful, lost and idle, their energy and cost, and how long jobs waited."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable

from django.core.paginator import Paginator
from django.http import HttpRequest, StreamingHttpResponse
from django.http.response import HttpResponseBase
from django.shortcuts import render
from django.utils import timezone
from django.utils.dateparse import parse_date
from django.utils.translation import gettext as _

from portal.access import AccessPolicy
from portal.domain.jobs.phases import Phase
from portal.models import User
from portal.selectors.reports.held_time import UsageGrouping
from portal.selectors.reports.idle_jobs import most_idle_jobs
from portal.selectors.reports.report import DayHours, ReportRow, read_report
from portal.selectors.scheduling.start_phases import start_phases_by_pool
from portal.web.display.csv_download import csv_response
from portal.web.display.formatting import ENERGY_UNITS, TIME_UNITS, common_unit
from portal.web.jobs.job.overview import PHASE_NAMES
from portal.web.views import page

PERIODS = {"7d": 7, "30d": 30, "90d": 90}
GROUPINGS = {each.value: each for each in UsageGrouping}
MAX_DAYS = 366
ROWS = 50
"""Of a page of the table."""
CHART_SIZE = 1000
_CSV_COLUMNS = (
    *("key", "name", "jobs", "gpu_hours", "cost", "useful_gpu_hours", "startup_gpu_hours", "lost_gpu_hours"),
    *("measured_gpu_hours", "busy_gpu_hours", "idle_gpu_hours", "idle_cost", "energy_kwh", "co2_kg"),
    *("started_jobs", "wait_p50_s", "wait_p90_s"),
)


@page(AccessPolicy.SIGNED_IN)
def usage(request: HttpRequest, user: User) -> HttpResponseBase:
    start, end, period, problem = _period(request)
    by = GROUPINGS.get(request.GET.get("by", ""), UsageGrouping.PROJECT)
    report = read_report(user, start, end, by)
    last = end - dt.timedelta(microseconds=1)
    rows = Paginator(report.rows, ROWS).get_page(request.GET.get("page"))
    phases = start_phases_by_pool()
    names = [_(PHASE_NAMES[phase]) for phase in Phase if phase is not Phase.RUNNING]
    units = [
        common_unit(TIME_UNITS, [pool.phases[number].p90_s for pool in phases])
        for number in range(len(names))
    ]
    context = {
        "report": report,
        "rows": rows,
        "energy_unit": common_unit(ENERGY_UNITS, [row.energy_joules for row in rows]),
        "wait_unit": common_unit(TIME_UNITS, [row.wait_p90_s for row in rows]),
        "waits": report.waits,
        "size_wait_unit": common_unit(TIME_UNITS, [row.p90_s for row in report.waits]),
        "idle_jobs": most_idle_jobs(user, start, end),
        "chart": _chart(report.days),
        "start": start.date(),
        "last": last.date(),
        "period": period,
        "periods": PERIODS,
        "problem": problem,
        "by": by.value,
        "groupings": list(GROUPINGS),
        "start_phases": [(pool, list(zip(names, units, pool.phases, strict=True))) for pool in phases],
        "phase_columns": list(zip(names, units, strict=True)),
    }
    return render(request, "reports/page.html", context)


@page(AccessPolicy.SIGNED_IN)
def usage_csv(request: HttpRequest, user: User) -> StreamingHttpResponse:
    """Download the report as a table: hours with six decimals, costs in the currency of the settings."""
    start, end = _period(request)[:2]
    by = GROUPINGS.get(request.GET.get("by", ""), UsageGrouping.PROJECT)
    rows = read_report(user, start, end, by).rows
    name = f"report-{by.value}-{start:%Y-%m-%d}-{end - dt.timedelta(microseconds=1):%Y-%m-%d}.csv"
    return csv_response(name, _CSV_COLUMNS, ([_cell(row, column) for column in _CSV_COLUMNS] for row in rows))


def _cell(row: ReportRow, column: str) -> object:
    value = getattr(row, column)
    if value is None:
        return ""
    return f"{value:.6f}" if isinstance(value, float) else value


def _period(request: HttpRequest) -> tuple[dt.datetime, dt.datetime, str, str]:
    """Return start, end, the name of the period (blank: chosen dates), and what is wrong with chosen dates."""
    now, problem = timezone.now(), ""
    first, last = _date(request, "from"), _date(request, "until")
    if first or last:
        zone = timezone.get_current_timezone()
        last = last or now.astimezone(zone).date()
        if first is None or first > last:
            problem = _("Give a first day that is not after the last one.")
        elif (last - first).days >= MAX_DAYS:
            problem = _("Choose at most {max_days} days.").format(max_days=MAX_DAYS)
        else:
            start = dt.datetime.combine(first, dt.time(), zone)
            end = dt.datetime.combine(last + dt.timedelta(days=1), dt.time(), zone)
            return start, min(end, max(now, start + dt.timedelta(seconds=1))), "", ""
    elif request.GET.get("from") or request.GET.get("until"):
        problem = _("Give days as 2026-03-31.")
    period = request.GET.get("period", "30d")
    period = period if period in PERIODS else "30d"
    return now - dt.timedelta(days=PERIODS[period]), now, period, problem


def _date(request: HttpRequest, name: str) -> dt.date | None:
    try:
        found = parse_date(request.GET.get(name, ""))
    except ValueError:
        return None
    return found if found and 1970 <= found.year < 9999 else None


def _chart(days: list[DayHours]) -> dict[str, object] | None:
    """Return bars of the held and of the idle GPU-hours of each day as SVG paths in a square of ``CHART_SIZE``."""
    highest = max((row.gpu_hours for row in days), default=0.0)
    if not highest:
        return None
    width = CHART_SIZE / len(days)

    def bars(hours: Iterable[float]) -> str:
        tops = (
            (place, round(CHART_SIZE * (1 - min(1.0, value / highest)))) for place, value in enumerate(hours)
        )
        return " ".join(
            f"M{width * (place + 0.1):.1f} {CHART_SIZE}V{top}H{width * (place + 0.9):.1f}V{CHART_SIZE}Z"
            for place, top in tops
            if top < CHART_SIZE
        )

    return {
        "held": bars(row.gpu_hours for row in days),
        "idle": bars(row.idle_gpu_hours for row in days),
        "highest": highest,
        "first": days[0].name,
        "last": days[-1].name,
    }
