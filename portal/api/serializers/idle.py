"""Serializers of idle status, idle settings and exemptions."""

from __future__ import annotations

from rest_framework import serializers

from portal.api.framework.responses import ResponseSerializer
from portal.api.serializers.references import Reference, UserReference
from portal.selectors.jobs.idle import IdleStatus
from portal.selectors.scheduling.project_settings import EffectiveRule


class IdleExemption(ResponseSerializer):
    """An exemption of a job from idle suspension."""

    id = serializers.CharField(source="public_id")
    job = Reference()
    by = UserReference(source="requested_by")
    reason = serializers.CharField()
    at = serializers.DateTimeField(source="created_at")
    until = serializers.DateTimeField(source="expires_at")
    revoked_at = serializers.DateTimeField(
        allow_null=True, help_text="When it was revoked; null if it was not."
    )


class IdleSettingDetail(ResponseSerializer):
    """An idle setting as it applies to a project in a pool."""

    name = serializers.CharField()
    value = serializers.JSONField(help_text="A number, or one of the setting's options.")
    set_by = serializers.ChoiceField(
        ["project", "above", "pool", "cluster", "default"],
        source="source",
        help_text="Where the value is set; above: in an ancestor of the project.",
    )
    loosest_allowed = serializers.JSONField(help_text="The least strict value that the pool allows.")
    is_clamped = serializers.BooleanField(
        help_text="The project sets a less strict value, which is not in effect."
    )


class IdleDetail(ResponseSerializer):
    """Activity of a running job, and the action of the policy when it is idle."""

    action = serializers.ChoiceField(
        ["off", "notify", "suspend"], help_text="Action when the job is idle; a service is scaled to zero."
    )
    idle_after_s = serializers.IntegerField()
    last_active_at = serializers.DateTimeField(
        source="row.last_active_at", allow_null=True, help_text="When it was last active; null if unknown."
    )
    inactive_since = serializers.DateTimeField(
        source="row.inactive_since",
        allow_null=True,
        help_text="Start of its inactivity; null if it is not idle.",
    )
    idle_notified_at = serializers.DateTimeField(
        source="row.idle_notified_at",
        allow_null=True,
        help_text="When its users were notified that it is idle; null if they were not.",
    )
    suspend_at = serializers.DateTimeField(
        source="row.suspend_at",
        allow_null=True,
        help_text="When it will be suspended unless it is used or exempted; null if no suspension is scheduled.",
    )
    snoozed_until = serializers.DateTimeField(
        source="row.snoozed_until",
        allow_null=True,
        help_text="End of the last snooze, possibly in the past; null if it was not snoozed.",
    )
    snoozes_left = serializers.IntegerField()
    rules = IdleSettingDetail(many=True, help_text="Effective idle settings of the job.")
    exemption = IdleExemption(allow_null=True, help_text="The exemption in force; null if there is none.")

    @staticmethod
    def get_rules(found: IdleStatus, context: object) -> list[EffectiveRule]:
        return list(found.settings_sheet.rules.values())
