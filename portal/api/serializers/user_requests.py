"""Serializers of requests of users, and of temporary additions to quotas."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from rest_framework import serializers

from portal.api.framework.responses import ResponseSerializer
from portal.api.serializers.effects import QuotaEffectDetail
from portal.api.serializers.references import Reference, UserReference
from portal.domain.requests.user_requests import RequestKind, RequestState
from portal.models import UserRequest
from portal.selectors.projects.quota_effect import QuotaEffect
from portal.selectors.requests.user_requests import RequestEfficiency


class RequestSummary(ResponseSerializer):
    """A request, and its answer. Fields of other kinds are null."""

    id = serializers.CharField(source="public_id")
    kind = serializers.ChoiceField([kind.value for kind in RequestKind])
    state = serializers.ChoiceField([state.value for state in RequestState])
    project = Reference(source="target_project")
    reason = serializers.CharField(allow_blank=True)
    requested_by = UserReference()
    requested_at = serializers.DateTimeField()
    decided_by = UserReference(
        allow_null=True,
        help_text="null if it was not decided by a user: open, withdrawn, expired, or more time that was approved at "
        "once.",
    )
    decided_at = serializers.DateTimeField(allow_null=True)
    answer = serializers.CharField(allow_blank=True)
    role = serializers.CharField(allow_blank=True, help_text="Requested role, for the kind `project`.")
    environment = Reference(allow_null=True)
    pool = Reference(allow_null=True)
    extra_milli = serializers.IntegerField(
        allow_null=True, help_text="GPU milli added to the guarantee, and to the limit if there is one."
    )
    starts_at = serializers.DateTimeField(allow_null=True)
    ends_at = serializers.DateTimeField(allow_null=True, help_text="null: permanent.")
    job = Reference(allow_null=True)
    attempt = serializers.IntegerField(allow_null=True, source="attempt.number")
    extra_s = serializers.IntegerField(allow_null=True, help_text="Seconds added to the time limit.")
    impact_known = serializers.BooleanField(
        help_text="false if the scheduler did not report in time which jobs more time would delay."
    )
    delayed_count = serializers.IntegerField(
        help_text="Number of pending jobs that would start later with more time."
    )
    reservations = serializers.ListField(
        child=serializers.CharField(), help_text="Names of reservations that the added time would delay."
    )


class StartDelay(ResponseSerializer):
    """A pending job that would start later."""

    job = serializers.CharField(allow_null=True, help_text="Id of the job; null if it is not visible to you.")
    by_s = serializers.FloatField(allow_null=True, help_text="Delay in seconds; null if unknown.")


class HeldTime(ResponseSerializer):
    """GPU time of ended attempts."""

    held_gpu_hours = serializers.FloatField()
    useful_percent = serializers.FloatField(help_text="The rest was start-up, or lost.")


class RequestEfficiencyDetail(ResponseSerializer):
    """How GPUs were used; null where you may see none, or none ended."""

    user = HeldTime(allow_null=True)
    project = HeldTime(allow_null=True)


@dataclass(frozen=True)
class RequestContext:
    """What the reader may see of a request's consequences."""

    visible_jobs: Collection[str]
    effect: QuotaEffect | None
    efficiency: RequestEfficiency | None


class RequestDetail(RequestSummary):
    """A request with its simulated consequences."""

    delays = StartDelay(many=True, help_text="More time: longest delay first, at most 20.")
    effect = QuotaEffectDetail(
        allow_null=True,
        source="context.effect",
        help_text="More quota: its effect when it was requested; null if the scheduler did not respond in time.",
    )

    efficiency = RequestEfficiencyDetail(
        allow_null=True, source="context.efficiency", help_text="More quota: of the last 30 days."
    )

    @staticmethod
    def get_delays(row: UserRequest, context: RequestContext) -> list[dict[str, Any]]:
        """Return the jobs that it delays, named only if the reader may see them."""
        seen = context.visible_jobs
        return [{**each, "job": each["job"] if each["job"] in seen else None} for each in row.delays]


class QuotaAdditionDetail(ResponseSerializer):
    """GPUs added to a quota between two times."""

    id = serializers.CharField(source="public_id")
    project = Reference(source="quota.project")
    pool = Reference(source="quota.pool")
    extra_milli = serializers.IntegerField(
        help_text="GPU milli added to the guarantee, and to the limit if there is one."
    )
    starts_at = serializers.DateTimeField()
    ends_at = serializers.DateTimeField()
    reason = serializers.CharField(allow_blank=True)
    created_by = UserReference(allow_null=True)
    created_at = serializers.DateTimeField()
    ended_at = serializers.DateTimeField(allow_null=True, help_text="When its end was recorded.")
    ended_by = UserReference(allow_null=True, help_text="null if it was not ended early.")
    request = serializers.CharField(
        allow_null=True, source="request.public_id", help_text="Id of the request."
    )
