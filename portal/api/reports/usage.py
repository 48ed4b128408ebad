"""REST: usage, from the ledger of starts and ends."""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping
from typing import Any

from django.http import HttpResponse
from django.utils import timezone
from rest_framework import serializers
from rest_framework.request import Request

from portal.api.framework.request_parsing import StrictCharField, StrictSerializer
from portal.api.framework.responses import ResponseSerializer
from portal.api.framework.views import SignedInView, operation
from portal.domain.jobs.lost_work import LossCause
from portal.domain.jobs.phases import Phase
from portal.errors import InvalidRequest
from portal.selectors.reports.held_time import UsageGrouping
from portal.selectors.reports.report import read_report
from portal.selectors.reports.usage import gpu_hours_by, work_by
from portal.selectors.scheduling.start_phases import PERIOD_DAYS, start_phases_by_pool
from portal.services.accounts.tokens import Scope

MAX_PERIOD = dt.timedelta(days=366)
DEFAULT_PERIOD = dt.timedelta(days=30)
GROUPINGS = [word.value for word in UsageGrouping]


class ReportQuery(StrictSerializer):
    """The period and grouping of a report."""

    start = serializers.DateTimeField(required=False, help_text="Default: 30 days before `end`.")
    end = serializers.DateTimeField(required=False, help_text="Default: now.")
    by = serializers.ChoiceField(GROUPINGS, required=False, default=UsageGrouping.PROJECT.value)


class UsageQuery(ReportQuery):
    """The period, filters and grouping of a usage report."""

    project = StrictCharField(required=False, default="", max_length=63, help_text="Id or name.")
    user = StrictCharField(required=False, default="", max_length=63, help_text="Id or user name.")


class UsageItem(ResponseSerializer):
    """The GPU-hours of one group."""

    key = serializers.CharField(help_text="Public id, or the date (UTC) if grouped by day.")
    name = serializers.CharField()
    gpu_hours = serializers.FloatField()
    jobs = serializers.IntegerField()


class UsageReport(ResponseSerializer):
    """GPU-hours of a period."""

    start = serializers.DateTimeField()
    end = serializers.DateTimeField()
    by = serializers.ChoiceField(GROUPINGS)
    total_gpu_hours = serializers.FloatField()
    items = UsageItem(many=True)


class UsageView(SignedInView):
    @operation(
        "usage",
        "Get GPU-hours by project, user, pool or day",
        tag="usage",
        scope=Scope.READ,
        query=UsageQuery,
        response=UsageReport,
        detail="Your own usage and that of projects that you manage; for administrators, all usage. GPUs that are "
        "still held count up to now.",
    )
    def get(self, request: Request) -> HttpResponse:
        """GPU-hours from the ledger; a past period always gives the same result."""
        start, end = _period(self.query)
        by = UsageGrouping(self.query["by"])
        rows = gpu_hours_by(self.user, start, end, by, project=self.query["project"], user=self.query["user"])
        total = round(sum(row.gpu_hours for row in rows), 6)
        return self.json_response(
            UsageReport.compose(start=start, end=end, by=by.value, total_gpu_hours=total, items=rows)
        )


class PhaseStatistics(ResponseSerializer):
    """The duration of one phase."""

    phase = serializers.ChoiceField([each.value for each in Phase if each is not Phase.RUNNING])
    attempts = serializers.IntegerField(help_text="Starts that had this phase.")
    median_s = serializers.FloatField(allow_null=True)
    p90_s = serializers.FloatField(allow_null=True)


class PoolStartPhases(ResponseSerializer):
    """The phases before the run of a job in one pool."""

    pool = serializers.CharField()
    starts = serializers.IntegerField()
    phases = PhaseStatistics(many=True)


class StartPhasesReport(ResponseSerializer):
    """The phases of all starts of the last days."""

    period_days = serializers.IntegerField()
    pools = PoolStartPhases(many=True)


class StartPhasesView(SignedInView):
    @operation(
        "start_phases",
        "Get the time to start by pool and phase",
        tag="usage",
        scope=Scope.READ,
        response=StartPhasesReport,
        detail="Median and 90th percentile of the phases before the run, of all starts of the last 7 days.",
    )
    def get(self, request: Request) -> HttpResponse:
        return self.json_response(
            StartPhasesReport.compose(period_days=PERIOD_DAYS, pools=start_phases_by_pool())
        )


class WorkHours(ResponseSerializer):
    """How the GPU time of ended attempts of one group was used."""

    key = serializers.CharField(help_text="Public id, or the date (UTC) if grouped by day.")
    name = serializers.CharField()
    startup_gpu_hours = serializers.FloatField(help_text="Until containers ran.")
    useful_gpu_hours = serializers.FloatField(
        help_text="Of completed attempts, or until the last checkpoint."
    )
    lost_gpu_hours = serializers.FloatField(
        help_text="After the last checkpoint of attempts that did not complete."
    )
    lost_by_cause = serializers.DictField(
        child=serializers.FloatField(),
        help_text=f"GPU-hours lost by cause: {', '.join(each.value for each in LossCause)}.",
    )


class WorkItem(WorkHours):
    """The same with the number of attempts."""

    attempts = serializers.IntegerField()


class WorkReport(ResponseSerializer):
    """Start-up, useful and lost GPU-hours of attempts that ended in a period."""

    start = serializers.DateTimeField()
    end = serializers.DateTimeField()
    by = serializers.ChoiceField(GROUPINGS)
    items = WorkItem(many=True)


class WorkView(SignedInView):
    @operation(
        "usage_work",
        "Get useful and lost GPU-hours by project, user, pool or day",
        tag="usage",
        scope=Scope.READ,
        query=UsageQuery,
        response=WorkReport,
        detail="Booked when an attempt ends. Your own attempts and those of projects that you manage; for "
        "administrators, all.",
    )
    def get(self, request: Request) -> HttpResponse:
        """Work from the ledger; a past period always gives the same result."""
        start, end = _period(self.query)
        by = UsageGrouping(self.query["by"])
        rows = work_by(self.user, start, end, by, project=self.query["project"], user=self.query["user"])
        return self.json_response(WorkReport.compose(start=start, end=end, by=by.value, items=rows))


class ReportItem(WorkHours):
    """The figures of one group."""

    jobs = serializers.IntegerField(help_text="With GPUs in the period.")
    gpu_hours = serializers.FloatField(help_text="Held in the period.")
    cost = serializers.FloatField(help_text="Of the held GPU-hours, in `currency`; 0 without prices.")
    measured_gpu_hours = serializers.FloatField(help_text="Held, with samples of the utilisation.")
    busy_gpu_hours = serializers.FloatField(help_text="Measured, weighted with the utilisation.")
    idle_gpu_hours = serializers.FloatField(help_text="Measured, with a utilisation below 3 percent.")
    idle_cost = serializers.FloatField(help_text="Of the idle GPU-hours, in `currency`.")
    energy_joules = serializers.FloatField()
    co2_kg = serializers.FloatField(help_text="0 unless `grid_co2_g_per_kwh` is set.")
    started_jobs = serializers.IntegerField(help_text="Started for the first time in the period.")
    wait_p50_s = serializers.FloatField(
        allow_null=True, help_text="Median time from submission to the first start; null: no job started."
    )
    wait_p90_s = serializers.FloatField(allow_null=True, help_text="90th percentile.")


class SizeWait(ResponseSerializer):
    """The waits of jobs that requested a similar number of GPUs."""

    name = serializers.CharField()
    jobs = serializers.IntegerField()
    p50_s = serializers.FloatField()
    p90_s = serializers.FloatField()


class Report(ResponseSerializer):
    """Use, energy, cost and waits of a period."""

    start = serializers.DateTimeField()
    end = serializers.DateTimeField()
    by = serializers.ChoiceField(GROUPINGS)
    currency = serializers.CharField(allow_blank=True, help_text="Blank: no pool has a price.")
    items = ReportItem(many=True)
    total = ReportItem()
    waits_by_size = SizeWait(many=True)


class ReportView(SignedInView):
    @operation(
        "usage_report",
        "Get use, energy, cost and waits by project, user, pool or day",
        tag="usage",
        scope=Scope.READ,
        query=ReportQuery,
        response=Report,
        detail="Your own jobs and those of projects that you manage; for administrators, all. Measurements of the "
        "first and the last day (UTC) count whole.",
    )
    def get(self, request: Request) -> HttpResponse:
        """All figures of the page *Reports*."""
        start, end = _period(self.query)
        by = UsageGrouping(self.query["by"])
        report = read_report(self.user, start, end, by)
        return self.json_response(
            Report.compose(
                start=start,
                end=end,
                by=by.value,
                currency=report.currency,
                items=report.rows,
                total=report.total,
                waits_by_size=report.waits,
            )
        )


def _period(query: Mapping[str, Any]) -> tuple[dt.datetime, dt.datetime]:
    """Return start and end of the period. Raise InvalidRequest if it is empty or too long."""
    end = query.get("end") or timezone.now()
    start = query.get("start") or _before(end)
    if not start < end:
        raise InvalidRequest(fields={"start": "The start must be before the end."})
    if end - start > MAX_PERIOD:
        raise InvalidRequest(fields={"start": f"The period is longer than {MAX_PERIOD.days} days."})
    return start, end


def _before(end: dt.datetime) -> dt.datetime:
    try:
        return end - DEFAULT_PERIOD
    except OverflowError as error:
        raise InvalidRequest(fields={"end": "The date is too early."}) from error
