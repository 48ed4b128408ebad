"""REST: status of the scheduler, and the input of failed cycles."""

from __future__ import annotations

import io
from functools import partial

from django.http import FileResponse, HttpResponse
from django.http.response import HttpResponseBase
from rest_framework import serializers
from rest_framework.request import Request

from portal.api.framework.responses import ResponseSerializer
from portal.api.framework.views import AdminView, SignedInView, operation
from portal.models import User
from portal.selectors.scheduling.cycles import SchedulerHealth, failed_cycles, scheduler_health
from portal.selectors.scheduling.forecasts import forecast_accuracy
from portal.services.accounts.tokens import Scope
from portal.services.scheduling.failed_cycles import do_export_failed_cycle

_admin = partial(operation, tag="scheduler", scope=Scope.ADMIN)

STOPPED_MESSAGE = "The scheduler has stopped; administrators can see the reason."


class SchedulingCycle(ResponseSerializer):
    """A completed cycle."""

    started_at = serializers.DateTimeField()
    trigger = serializers.CharField()
    snapshot_ms = serializers.FloatField()
    decide_ms = serializers.FloatField()
    commit_ms = serializers.FloatField()
    pending = serializers.IntegerField()
    started_jobs = serializers.IntegerField()
    evicted_jobs = serializers.IntegerField()
    refused_commits = serializers.IntegerField(
        help_text="Starts that were rejected at commit; the next cycle plans them again."
    )
    steps = serializers.IntegerField()
    truncated = serializers.BooleanField(
        help_text="The limit of steps was reached before every job was considered."
    )


class ForecastAccuracy(ResponseSerializer):
    """Accuracy of the first forecasts of recently started jobs; only jobs that waited at least a minute."""

    days = serializers.IntegerField()
    scored = serializers.IntegerField()
    covered = serializers.IntegerField()
    coverage = serializers.FloatField(
        allow_null=True, help_text="Fraction of correct intervals; the nominal value is 0.8."
    )
    mean_score_s = serializers.FloatField(
        allow_null=True, help_text="Mean interval score (Winkler, alpha 0.2), seconds; less is better."
    )


class SchedulerStatus(ResponseSerializer):
    """Status of the scheduler."""

    alert = serializers.CharField(
        allow_blank=True,
        help_text="Why no jobs are started; only administrators see the reason. Blank if there is no alert.",
    )
    alert_since = serializers.DateTimeField(allow_null=True, source="cluster.scheduler_alert_at")
    last_cycle = SchedulingCycle(allow_null=True)
    forecasts = ForecastAccuracy()

    @staticmethod
    def get_alert(row: SchedulerHealth, user: User) -> str:
        alert = row.cluster.scheduler_alert
        return alert if user.is_admin or not alert else STOPPED_MESSAGE

    @staticmethod
    def get_forecasts(row: SchedulerHealth, user: User) -> object:
        return forecast_accuracy()


class FailedSchedulingCycle(ResponseSerializer):
    """A cycle that failed before it had a plan."""

    id = serializers.CharField(source="public_id")
    first_at = serializers.DateTimeField()
    last_at = serializers.DateTimeField()
    repeat_count = serializers.IntegerField(help_text="Consecutive cycles that failed with the same message.")
    kind = serializers.ChoiceField(["snapshot", "policy", "fault"])
    field = serializers.CharField(allow_blank=True, help_text="The invalid field of the snapshot or policy.")
    message = serializers.CharField()
    trigger = serializers.CharField(allow_blank=True)
    size_bytes = serializers.IntegerField(help_text="0: the input could not be saved.")


class SchedulerView(SignedInView):
    @operation(
        "scheduler_get",
        "Get the status of the scheduler",
        tag="scheduler",
        scope=Scope.READ,
        response=SchedulerStatus,
    )
    def get(self, request: Request) -> HttpResponse:
        """The current alert and the newest cycle."""
        return self.json_response(SchedulerStatus.represent(scheduler_health(), self.user))


class FailedCyclesView(AdminView):
    @_admin(
        "failed_cycles_list",
        "List failed cycles",
        response=[FailedSchedulingCycle],
        detail="A snapshot or a policy that the scheduler rejects, or an internal error. The newest 20 of the "
        "last 30 days are kept.",
    )
    def get(self, request: Request) -> HttpResponse:
        return self.paginated_response(failed_cycles(), FailedSchedulingCycle.represent)


class FailedCycleView(AdminView):
    @_admin(
        "failed_cycles_download",
        "Download a failed cycle",
        response=str,
        media_type="application/gzip",
        error_statuses=[409],
        detail="Snapshot and policy as gzip JSON, for `python -m scheduler.replay snapshot FILE`. Audited.",
    )
    def get(self, request: Request, cycle: str) -> HttpResponseBase:
        """The input of the cycle as a file."""
        name, content = do_export_failed_cycle(self.user, cycle)
        answer = FileResponse(
            io.BytesIO(content), as_attachment=True, filename=name, content_type="application/gzip"
        )
        answer["Cache-Control"] = "no-store"
        return answer
