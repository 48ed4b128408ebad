"""REST: whether a request would start now, without submitting it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from django.http import HttpResponse
from rest_framework import serializers
from rest_framework.request import Request

from portal.api.framework.responses import ResponseSerializer
from portal.api.framework.views import SignedInView, operation
from portal.api.jobs.job_requests import JobPreviewBody, build_job_request
from portal.api.jobs.launchers import PAGE_RANKS, RankLaunchDetail
from portal.api.serializers.effects import PreviewVictim
from portal.api.serializers.progress import CheaperSize, LauncherRate, ScalePoint
from portal.domain.jobs.scaling import cheaper_size
from portal.models import User
from portal.selectors.jobs.jobs import get_job, visible_job_ids
from portal.selectors.jobs.progress import measure_program
from portal.selectors.scheduling.preemption_preview import preemption_candidates, total_lost_gpu_seconds
from portal.services.accounts.tokens import Scope
from portal.services.jobs.changes import job_start_alternatives
from portal.services.jobs.launching import preview_ranks
from portal.services.jobs.right_size import right_size_advice
from portal.services.jobs.start_alternatives import StartAlternatives as FoundAlternatives
from portal.services.jobs.start_alternatives import StartTimes, find_start_alternatives, json_fields
from portal.services.jobs.submission import JobRequest, preview_start, validate_request
from portal.valkey import rate_limits


class PreviewInterval(ResponseSerializer):
    """Expected start. The interval from p10 to p90 should contain the actual start in 80% of cases."""

    p10_at = serializers.DateTimeField()
    p50_at = serializers.DateTimeField()
    p90_at = serializers.DateTimeField()


class RightSize(ResponseSerializer):
    """What the latest runs used at most, and what would have been enough."""

    message = serializers.CharField()
    runs = serializers.IntegerField()
    used_gpus = serializers.FloatField(help_text="Highest mean number of busy GPUs of a run.")
    gpus = serializers.IntegerField(help_text="GPUs that this run held.")
    gpu_memory_used_mib = serializers.IntegerField(help_text="Highest use of one GPU's memory.")
    gpu_memory_mib = serializers.IntegerField(help_text="Memory of that GPU.")
    memory_used_mib = serializers.IntegerField(
        allow_null=True, help_text="Highest memory of a task; null if no less memory is suggested."
    )
    values = serializers.DictField(source="fields", help_text="New values of the request.")


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
    launcher_rates = LauncherRate(many=True)
    cheaper = CheaperSize(
        allow_null=True,
        help_text="The measured number of GPUs with the least GPU-seconds for each unit of work; null if the "
        "requested one was not measured, or no other one saves 5 percent.",
    )
    right_size = RightSize(
        allow_null=True,
        help_text="A smaller request that would have been enough for your latest runs of this template or "
        "environment; null unless at least three runs agree.",
    )
    ranks = RankLaunchDetail(
        many=True,
        help_text=f"What the first {PAGE_RANKS} ranks would run; addresses and ports follow from the placement.",
    )
    alternatives = serializers.ListField(
        child=serializers.DictField(),
        help_text="Changes of the request with which it would start now; preview/alternatives also has later ones.",
    )


class StartAlternative(ResponseSerializer):
    """A change of the request with which it would start sooner."""

    kind = serializers.CharField()
    change = serializers.CharField(help_text='Such as "with 4 GPUs instead of 8".')
    values = serializers.DictField(source="fields", help_text="New values of the request.")
    starts_now = serializers.BooleanField()
    interval = PreviewInterval(allow_null=True, help_text="Expected start; null if it would start now.")
    speed_percent = serializers.IntegerField(
        allow_null=True, help_text="Measured throughput in percent of that of the request; null if unknown."
    )


class StartAlternatives(ResponseSerializer):
    alternatives = StartAlternative(
        many=True,
        help_text="Soonest first; empty if it would start now, if no change helps, or without the scheduler.",
    )
    reason = serializers.CharField(
        allow_blank=True, help_text="Why there are none; blank if there are, or if it would start now."
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
        return self.json_response(represent_preview(self.user, wanted, preview_start(self.user, wanted)))


def represent_preview(user: User, wanted: JobRequest, answer: dict[str, Any] | None) -> dict[str, Any]:
    """Return the preview of a request with the scheduler's answer; None if there is none."""
    reported = answer or {}
    verdict = reported.get("verdict")
    if verdict is not None:
        seen = visible_job_ids(user, verdict.get("jobs_ahead") or [])
        verdict = {**verdict, "jobs_ahead": [job for job in verdict.get("jobs_ahead") or [] if job in seen]}
    victims = preemption_candidates(user, reported.get("victims") or [])
    measured = measure_program(wanted)
    return JobPreview.compose(
        feasible=True,
        starts_now=reported.get("starts_now"),
        nodes=reported.get("where", []),
        verdict=verdict,
        interval=StartTimes.from_answer(reported.get("interval")),
        interval_missing=reported.get("interval_missing"),
        victims=victims,
        lost_gpu_seconds=total_lost_gpu_seconds(victims) if reported else None,
        scaling=measured.points,
        launcher_rates=measured.launchers,
        cheaper=cheaper_size(measured.points, wanted.total_gpus),
        right_size=right_size_advice(user, wanted),
        ranks=preview_ranks(wanted, PAGE_RANKS),
        alternatives=reported.get("alternatives", []),
    )


class StartAlternativesView(SignedInView):
    @operation(
        "jobs_preview_alternatives",
        "Changes with which a job would start sooner",
        tag="jobs",
        scope=Scope.READ,
        body=JobPreviewBody,
        response=StartAlternatives,
        rate=rate_limits.START_ALTERNATIVES,
        error_statuses=[404, 422],
        detail="Each has its own forecast, so the answer takes up to four seconds.",
    )
    def post(self, request: Request) -> HttpResponse:
        wanted = build_job_request(self.user, self.raw_body, JobPreviewBody)
        validate_request(self.user, wanted)
        return self.json_response(represent_alternatives(find_start_alternatives(self.user, wanted)))


def represent_alternatives(found: FoundAlternatives) -> dict[str, Any]:
    rows = [
        SimpleNamespace(
            kind=each.kind, change=each.change, fields=json_fields(each), starts_now=each.starts_now,
            interval=each.interval, speed_percent=each.speed_percent,
        )
        for each in found.alternatives
    ]  # fmt: skip
    return StartAlternatives.compose(alternatives=rows, reason=found.reason)


class JobAlternativesView(SignedInView):
    @operation(
        "jobs_alternatives",
        "Changes with which a waiting job would start sooner",
        tag="jobs",
        scope=Scope.READ,
        response=StartAlternatives,
        rate=rate_limits.START_ALTERNATIVES,
        detail="Each can be made by `PATCH jobs/{id}/` with its `values`. Each has its own forecast, so the answer "
        "takes up to four seconds.",
    )
    def get(self, request: Request, job: str) -> HttpResponse:
        row = get_job(self.user, job)
        return self.json_response(represent_alternatives(job_start_alternatives(self.user, row)))
