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
from portal.api.jobs.launchers import PAGE_RANKS, RankLaunchDetail
from portal.api.serializers.effects import PreviewVictim
from portal.api.serializers.progress import CheaperSize, ScalePoint
from portal.domain.scaling import cheaper_size
from portal.selectors.jobs.jobs import visible_job_ids
from portal.selectors.jobs.preemption_preview import (
    preemption_candidates,
    total_lost_gpu_seconds,
)
from portal.selectors.jobs.progress import measure_scaling
from portal.services.accounts.tokens import Scope
from portal.services.jobs.launching import preview_ranks
from portal.services.jobs.submission import preview_start, validate_request
from portal.valkey import rate_limits


class PreviewInterval(ResponseSerializer):
    """Expected start. The interval from p10 to p90 should contain the actual start in 80% of cases."""

    p10_at = serializers.DateTimeField()
    p50_at = serializers.DateTimeField()
    p90_at = serializers.DateTimeField()


class JobPreview(ResponseSerializer):
    """Whether a request fits this cluster, and whether it would start now."""

    feasible = serializers.BooleanField(
        help_text="Always true: a request that could never run here gets 422, with the nearest one that could."
    )
    starts_now = serializers.BooleanField(
        allow_null=True, help_text="null if the scheduler did not respond within a second."
    )
    nodes = serializers.ListField(
        child=serializers.CharField(), help_text="Names of the nodes on which it would start."
    )
    verdict = serializers.DictField(
        allow_null=True,
        help_text="Why it would be pending: code, message, details. null if it would start now.",
    )
    interval = PreviewInterval(
        allow_null=True,
        help_text="Expected start; null if it would start now, or there is no forecast.",
    )
    interval_missing = serializers.CharField(
        allow_null=True,
        help_text="Why there is no forecast; null if there is one, it would start now, or there was no response.",
    )
    victims = PreviewVictim(many=True, help_text="Running jobs that would be preempted for it.")
    lost_gpu_seconds = serializers.FloatField(
        allow_null=True,
        help_text="GPU-seconds that all victims would lose; null if the scheduler did not respond.",
    )
    scaling = ScalePoint(
        many=True,
        help_text="Measured numbers of GPUs of the same program, fewest first; empty unless two are known.",
    )
    cheaper = CheaperSize(
        allow_null=True,
        help_text="The measured number of GPUs with the least GPU-seconds for each unit of work; null if the "
        "requested one was not measured, or no other one saves 5 percent.",
    )
    ranks = RankLaunchDetail(
        many=True,
        help_text=f"What the first {PAGE_RANKS} ranks would run; addresses and ports follow from the placement.",
    )
    alternatives = serializers.ListField(
        child=serializers.DictField(), help_text="Changes of the request with which it would start now."
    )


class JobPreviewView(SignedInView):
    @operation(
        "jobs_preview",
        "Preview the start of a job",
        tag="jobs",
        scope=Scope.READ,
        body=JobPreviewBody,
        response=JobPreview,
        rate=rate_limits.JOB_SUBMITS,
        error_statuses=[404, 422],
        detail="Takes the same body as a submission, but submits nothing.",
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
        scaling = measure_scaling(wanted)
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
                scaling=scaling,
                cheaper=cheaper_size(scaling, wanted.total_gpus),
                ranks=preview_ranks(wanted, PAGE_RANKS),
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
