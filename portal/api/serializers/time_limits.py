"""Serializers of requests to extend a time limit."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from rest_framework import serializers

from portal.api.framework.responses import ResponseSerializer
from portal.api.serializers.references import Reference, UserReference
from portal.models import TimeLimitExtension


class ExtensionSummary(ResponseSerializer):
    """A request to extend the time limit of a running job."""

    id = serializers.CharField(source="public_id")
    job = Reference()
    attempt = serializers.IntegerField(source="attempt.number")
    state = serializers.ChoiceField(["waiting", "granted", "refused", "lapsed"])
    extra_s = serializers.IntegerField()
    reason = serializers.CharField(allow_blank=True)
    requested_by = UserReference()
    requested_at = serializers.DateTimeField()
    impact_known = serializers.BooleanField(
        help_text="false if the scheduler did not report in time which jobs it would delay."
    )
    delayed_count = serializers.IntegerField(help_text="Number of pending jobs that would start later.")
    reservations = serializers.ListField(
        child=serializers.CharField(), help_text="Names of reservations that the added time would delay."
    )
    decided_by = UserReference(
        allow_null=True,
        help_text="null if it was not decided by a user: pending, lapsed, or granted at once.",
    )
    decided_at = serializers.DateTimeField(allow_null=True)
    answer = serializers.CharField(allow_blank=True)


class StartDelay(ResponseSerializer):
    """A pending job that would start later."""

    job = serializers.CharField(allow_null=True, help_text="Id of the job; null if it is not visible to you.")
    by_s = serializers.FloatField(allow_null=True, help_text="Delay in seconds; null if unknown.")


class ExtensionDetail(ExtensionSummary):
    """A request to extend a time limit, with the jobs that it would delay."""

    delays = StartDelay(many=True, help_text="Longest delay first, at most 20.")

    @staticmethod
    def get_delays(row: TimeLimitExtension, seen: Collection[str]) -> list[dict[str, Any]]:
        """Return the jobs that it delays, named only when in ``seen``."""
        return [{**each, "job": each["job"] if each["job"] in seen else None} for each in row.delays]
