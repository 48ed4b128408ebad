"""REST: how the scheduler does, and what its failed cycles had to decide on."""

from __future__ import annotations

import io
from typing import Any

from django.http import FileResponse, HttpResponse
from django.http.response import HttpResponseBase
from rest_framework import serializers
from rest_framework.request import Request

from portal.access import Policy, policy
from portal.api.route import PageQuery, Route, operation, page_of
from portal.api.shapes.words import when
from portal.models import Cycle, FailedCycle
from portal.selectors.forecasts import measured
from portal.selectors.scheduler import failed_cycles, health
from portal.services.failed_cycles import do_give_out_failed
from portal.services.tokens import Scope

STOPPED = "The scheduler has stopped; administrators see why."


class CycleOut(serializers.Serializer[Any]):
    """A cycle that decided something."""

    started_at = serializers.DateTimeField()
    woken_by = serializers.CharField()
    snapshot_ms = serializers.FloatField()
    decide_ms = serializers.FloatField()
    commit_ms = serializers.FloatField()
    pending = serializers.IntegerField()
    started_jobs = serializers.IntegerField()
    evicted_jobs = serializers.IntegerField()
    refused_commits = serializers.IntegerField(help_text="Starts that the record did not take; planned anew.")
    steps = serializers.IntegerField()
    truncated = serializers.BooleanField(help_text="The budget of steps ended before every job was reached.")


class MeasuredOut(serializers.Serializer[Any]):
    """How the first forecasts of jobs that started in the last days did; jobs that waited a minute or more."""

    days = serializers.IntegerField()
    scored = serializers.IntegerField()
    inside = serializers.IntegerField()
    coverage = serializers.FloatField(allow_null=True, help_text="The part that held; 0.8 is meant.")
    mean_score_s = serializers.FloatField(
        allow_null=True, help_text="Mean interval score (Winkler, alpha 0.2), seconds; less is better."
    )


class SchedulerOut(serializers.Serializer[Any]):
    """How the scheduler does."""

    alarm = serializers.CharField(
        allow_blank=True, help_text="Why nothing is started, in full for administrators; blank: it works."
    )
    alarm_at = serializers.DateTimeField(allow_null=True)
    last_cycle = CycleOut(allow_null=True)
    forecasts = MeasuredOut()


class FailedCycleOut(serializers.Serializer[Any]):
    """A cycle that decided nothing."""

    id = serializers.CharField()
    first_at = serializers.DateTimeField()
    last_at = serializers.DateTimeField()
    times = serializers.IntegerField(help_text="Cycles that failed alike, one after the other.")
    kind = serializers.ChoiceField(["snapshot", "policy", "fault"])
    field = serializers.CharField(allow_blank=True, help_text="What of the snapshot or policy is wrong.")
    sentence = serializers.CharField()
    woken_by = serializers.CharField(allow_blank=True)
    size_bytes = serializers.IntegerField(help_text="0: it could not be saved.")


def cycle(row: Cycle) -> dict[str, Any]:
    """A cycle as JSON."""
    return {
        "started_at": when(row.started_at),
        "woken_by": row.woken_by,
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


def failed(row: FailedCycle) -> dict[str, Any]:
    """A failed cycle as JSON."""
    return {
        "id": row.public_id,
        "first_at": when(row.first_at),
        "last_at": when(row.last_at),
        "times": row.times,
        "kind": row.kind,
        "field": row.field,
        "sentence": row.sentence,
        "woken_by": row.woken_by,
        "size_bytes": row.size_bytes,
    }


@policy(Policy.SIGNED_IN)
class SchedulerRoute(Route):
    """The alarm and the newest cycle."""

    @operation(
        "scheduler_get", "How the scheduler does", tag="scheduler", scope=Scope.READ, answer=SchedulerOut
    )
    def get(self, request: Request) -> HttpResponse:
        """As it stands now."""
        now, forecasts = health(), measured()
        return self.answer(
            {
                "alarm": now.alarm.alarm if self.person.is_admin or not now.alarm.alarm else STOPPED,
                "alarm_at": when(now.alarm.alarm_at),
                "last_cycle": cycle(now.last) if now.last else None,
                "forecasts": {
                    "days": forecasts.days,
                    "scored": forecasts.scored,
                    "inside": forecasts.inside,
                    "coverage": forecasts.coverage,
                    "mean_score_s": forecasts.mean_score_s,
                },
            }
        )


@policy(Policy.ADMIN)
class FailedCyclesRoute(Route):
    """Cycles that decided nothing."""

    @operation(
        "failed_cycles",
        "List failed cycles",
        tag="scheduler",
        scope=Scope.ADMIN,
        query=PageQuery,
        answer=page_of(FailedCycleOut),
        detail="A snapshot or a policy that the scheduler refuses, or a fault of its own. The newest 20 of the "
        "last 30 days are kept.",
    )
    def get(self, request: Request) -> HttpResponse:
        """Newest first."""
        return self.page(failed_cycles(), failed)


@policy(Policy.ADMIN)
class FailedCycleRoute(Route):
    """One of them as a file."""

    @operation(
        "failed_cycles_download",
        "Download a failed cycle",
        tag="scheduler",
        scope=Scope.ADMIN,
        answer=str,
        media_type="application/gzip",
        refusals=[404, 409],
        detail="Snapshot and policy as gzip JSON, for `python -m scheduler.replay snapshot FILE`. Audited.",
    )
    def get(self, request: Request, cycle: str) -> HttpResponseBase:
        """The file."""
        name, content = do_give_out_failed(self.person, cycle)
        answer = FileResponse(
            io.BytesIO(content), as_attachment=True, filename=name, content_type="application/gzip"
        )
        answer["Cache-Control"] = "no-store"
        return answer
