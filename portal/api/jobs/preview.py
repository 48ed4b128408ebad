"""REST: whether a request would start now, without submitting it."""

from __future__ import annotations

import datetime as dt
from types import SimpleNamespace

from django.http import HttpResponse
from rest_framework import serializers
from rest_framework.request import Request

from portal.api.framework.responses import ResponseSerializer
from portal.api.framework.views import SignedInView, operation
from portal.api.jobs.job_requests import JobPreviewBody, build_job_request
from portal.api.serializers.references import Reference
from portal.selectors.jobs.jobs import visible_job_ids
from portal.selectors.jobs.preemption_preview import (
    preemption_candidates,
    total_lost_gpu_seconds,
)
from portal.services.accounts.tokens import Scope
from portal.services.jobs.submission import preview_start, validate_request
from portal.valkey import rate_limits


class PreviewInterval(ResponseSerializer):
    """The expected start: 8 of 10 such intervals should contain the actual one."""

    p10_at = serializers.DateTimeField()
    p50_at = serializers.DateTimeField()
    p90_at = serializers.DateTimeField()


class PreviewVictim(ResponseSerializer):
    """A running job that would be preempted."""

    job = Reference(allow_null=True, help_text="null: a job that one may not see.")
    project = Reference(allow_null=True, source="job.project")
    reason = serializers.ChoiceField(["reclaimed", "preempted", "migrated", "gang_incomplete"])
    milli = serializers.IntegerField(help_text="What it would give back.")
    lost_gpu_seconds = serializers.FloatField(
        help_text="GPU-seconds since it last saved, else since it started."
    )
    checkpoint_at = serializers.DateTimeField(
        allow_null=True, help_text="When it last saved its work; null: it has not said so."
    )


class JobPreview(ResponseSerializer):
    """Whether a request fits this cluster, and whether it would start now."""

    feasible = serializers.BooleanField(
        help_text="This cluster could run it. What no node could ever hold gets 422 with the nearest request."
    )
    starts_now = serializers.BooleanField(
        allow_null=True, help_text="null: the scheduler did not answer within a second."
    )
    nodes = serializers.ListField(child=serializers.CharField(), help_text="Nodes it would start on.")
    verdict = serializers.DictField(allow_null=True, help_text="Why it would wait: code, message, details.")
    interval = PreviewInterval(
        allow_null=True,
        help_text="When it would start otherwise; null: it starts now, or there is no estimate.",
    )
    interval_missing = serializers.CharField(
        allow_null=True, help_text="Why it would wait without an estimate; null: there is one, or no answer."
    )
    victims = PreviewVictim(many=True, help_text="Running jobs that would be asked to leave for it.")
    lost_gpu_seconds = serializers.FloatField(
        allow_null=True, help_text="GPU-seconds of work that they would lose together; null: no answer."
    )
    alternatives = serializers.ListField(
        child=serializers.DictField(), help_text="Changes of the request that would start now."
    )


class JobPreviewView(SignedInView):
    @operation(
        "jobs_preview",
        "Would this start now",
        tag="jobs",
        scope=Scope.READ,
        body=JobPreviewBody,
        response=JobPreview,
        rate=rate_limits.JOB_SUBMITS,
        error_statuses=[404, 422],
        detail="Takes what a submit takes, and submits nothing.",
    )
    def post(self, request: Request) -> HttpResponse:
        """The scheduler's answer, or null when it takes longer than a second."""
        wanted = build_job_request(self.user, self.raw_body, JobPreviewBody)
        validate_request(self.user, wanted)
        reported = preview_start(self.user, wanted) or {}
        verdict = reported.get("verdict")
        if verdict is not None:
            seen = visible_job_ids(self.user, verdict.get("jobs_ahead") or [])
            verdict = {
                **verdict,
                "jobs_ahead": [job for job in verdict.get("jobs_ahead") or [] if job in seen],
            }
        victims = preemption_candidates(self.user, reported.get("victims") or [])
        return self.json_response(
            JobPreview.compose(
                feasible=True,
                starts_now=reported.get("starts_now"),
                nodes=reported.get("where", []),
                verdict=verdict,
                interval=_interval(reported.get("interval")),
                interval_missing=reported.get("interval_missing"),
                victims=victims,
                lost_gpu_seconds=total_lost_gpu_seconds(victims) if reported else None,
                alternatives=reported.get("alternatives", []),
            )
        )


def _interval(given: dict[str, float] | None) -> SimpleNamespace | None:
    """Return the times of the scheduler's interval, which are in Unix seconds."""
    if given is None:
        return None
    return SimpleNamespace(
        **{
            f"{name}_at": dt.datetime.fromtimestamp(given[f"{name}_s"], dt.UTC)
            for name in ("p10", "p50", "p90")
        }
    )
