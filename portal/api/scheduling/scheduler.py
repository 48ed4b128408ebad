"""REST: status of the scheduler, and the input of failed cycles."""

from __future__ import annotations

import io
from typing import Any

from django.http import FileResponse, HttpResponse
from django.http.response import HttpResponseBase
from rest_framework import serializers
from rest_framework.request import Request

from portal.access import AccessPolicy, access_policy
from portal.api.framework.views import ApiView, ListQuery, list_schema, operation
from portal.api.serializers.references import timestamp
from portal.models import Cycle, FailedCycle
from portal.selectors.scheduling.cycles import failed_cycles, scheduler_health
from portal.selectors.scheduling.forecasts import forecast_accuracy
from portal.services.accounts.tokens import Scope
from portal.services.cluster.failed_cycles import do_export_failed_cycle

STOPPED_MESSAGE = "The scheduler has stopped; administrators see why."


class SchedulingCycle(serializers.Serializer[Any]):
    """A completed cycle."""

    started_at = serializers.DateTimeField()
    trigger = serializers.CharField()
    snapshot_ms = serializers.FloatField()
    decide_ms = serializers.FloatField()
    commit_ms = serializers.FloatField()
    pending = serializers.IntegerField()
    started_jobs = serializers.IntegerField()
    evicted_jobs = serializers.IntegerField()
    refused_commits = serializers.IntegerField(help_text="Starts that the record did not take; planned anew.")
    steps = serializers.IntegerField()
    truncated = serializers.BooleanField(help_text="The budget of steps ended before every job was reached.")


class ForecastAccuracy(serializers.Serializer[Any]):
    """How the first forecasts of recently started jobs did; only jobs that waited at least a minute."""

    days = serializers.IntegerField()
    scored = serializers.IntegerField()
    covered = serializers.IntegerField()
    coverage = serializers.FloatField(allow_null=True, help_text="The part that held; 0.8 is meant.")
    mean_score_s = serializers.FloatField(
        allow_null=True, help_text="Mean interval score (Winkler, alpha 0.2), seconds; less is better."
    )


class SchedulerStatus(serializers.Serializer[Any]):
    """Status of the scheduler."""

    alert = serializers.CharField(
        allow_blank=True, help_text="Why nothing is started, in full for administrators; blank: it works."
    )
    alert_since = serializers.DateTimeField(allow_null=True)
    last_cycle = SchedulingCycle(allow_null=True)
    forecasts = ForecastAccuracy()


class FailedSchedulingCycle(serializers.Serializer[Any]):
    """A cycle that failed before it had a plan."""

    id = serializers.CharField()
    first_at = serializers.DateTimeField()
    last_at = serializers.DateTimeField()
    repeat_count = serializers.IntegerField(help_text="Cycles that failed alike, one after the other.")
    kind = serializers.ChoiceField(["snapshot", "policy", "fault"])
    field = serializers.CharField(allow_blank=True, help_text="What of the snapshot or policy is wrong.")
    message = serializers.CharField()
    trigger = serializers.CharField(allow_blank=True)
    size_bytes = serializers.IntegerField(help_text="0: it could not be saved.")


def serialize_cycle(row: Cycle) -> dict[str, Any]:
    return {
        "started_at": timestamp(row.started_at),
        "trigger": row.trigger,
        "snapshot_ms": row.snapshot_ms,
        "decide_ms": row.decide_ms,
        "commit_ms": row.commit_ms,
        "pending": row.pending,
        "started_jobs": row.started_jobs,
        "evicted_jobs": row.evicted_jobs,
        "refused_commits": row.refused_commits,
        "steps": row.steps,
        "truncated": row.truncated,
    }


def serialize_failed_cycle(row: FailedCycle) -> dict[str, Any]:
    return {
        "id": row.public_id,
        "first_at": timestamp(row.first_at),
        "last_at": timestamp(row.last_at),
        "repeat_count": row.repeat_count,
        "kind": row.kind,
        "field": row.field,
        "message": row.message,
        "trigger": row.trigger,
        "size_bytes": row.size_bytes,
    }


@access_policy(AccessPolicy.SIGNED_IN)
class SchedulerView(ApiView):
    @operation(
        "scheduler_get", "How the scheduler does", tag="scheduler", scope=Scope.READ, response=SchedulerStatus
    )
    def get(self, request: Request) -> HttpResponse:
        """The current alarm and the newest cycle."""
        now, forecasts = scheduler_health(), forecast_accuracy()
        return self.json_response(
            {
                "alert": now.alarm.scheduler_alert
                if self.user.is_admin or not now.alarm.scheduler_alert
                else STOPPED_MESSAGE,
                "alert_since": timestamp(now.alarm.scheduler_alert_at),
                "last_cycle": serialize_cycle(now.last_cycle) if now.last_cycle else None,
                "forecasts": {
                    "days": forecasts.days,
                    "scored": forecasts.scored,
                    "covered": forecasts.covered,
                    "coverage": forecasts.coverage,
                    "mean_score_s": forecasts.mean_score_s,
                },
            }
        )


@access_policy(AccessPolicy.ADMIN)
class FailedCyclesView(ApiView):
    @operation(
        "failed_cycles_list",
        "List failed cycles",
        tag="scheduler",
        scope=Scope.ADMIN,
        query=ListQuery,
        response=list_schema(FailedSchedulingCycle),
        detail="A snapshot or a policy that the scheduler refuses, or a fault of its own. The newest 20 of the "
        "last 30 days are kept.",
    )
    def get(self, request: Request) -> HttpResponse:
        """Failed cycles, newest first."""
        return self.paginated_response(failed_cycles(), serialize_failed_cycle)


@access_policy(AccessPolicy.ADMIN)
class FailedCycleView(ApiView):
    @operation(
        "failed_cycles_download",
        "Download a failed cycle",
        tag="scheduler",
        scope=Scope.ADMIN,
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
