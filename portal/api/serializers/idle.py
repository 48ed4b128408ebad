"""Serializers of idle status, idle settings and exemptions."""

from __future__ import annotations

from rest_framework import serializers

from portal.api.framework.responses import ResponseSerializer
from portal.api.serializers.references import Reference, UserReference
from portal.selectors.jobs.idle import IdleStatus
from portal.selectors.scheduling.project_settings import EffectiveRule


class IdleExemption(ResponseSerializer):
    """Why an idle workspace is kept."""

    id = serializers.CharField(source="public_id")
    job = Reference()
    by = UserReference(source="requested_by")
    reason = serializers.CharField()
    at = serializers.DateTimeField(source="created_at")
    until = serializers.DateTimeField(source="expires_at")
    revoked_at = serializers.DateTimeField(
        allow_null=True, help_text="When somebody cut it short; null: nobody did."
    )


class IdleSettingDetail(ResponseSerializer):
    """An idle setting as it applies to a project in a pool."""

    name = serializers.CharField()
    value = serializers.JSONField(help_text="A number, or one of the setting's options.")
    set_by = serializers.ChoiceField(
        ["project", "above", "pool", "cluster", "default"],
        source="source",
        help_text="Where the value is set; above: in a project above this one.",
    )
    loosest_allowed = serializers.JSONField(help_text="The least strict value that the pool allows.")
    is_clamped = serializers.BooleanField(
        help_text="The project sets a less strict value, which is not in effect."
    )


class IdleDetail(ResponseSerializer):
    """Activity of a running workspace, and the action when it stays idle."""

    action = serializers.ChoiceField(["off", "notify", "suspend"], help_text="What the policy does.")
    idle_after_s = serializers.IntegerField()
    last_active_at = serializers.DateTimeField(
        source="row.last_active_at", allow_null=True, help_text="When it was last known to be used."
    )
    inactive_since = serializers.DateTimeField(
        source="row.inactive_since",
        allow_null=True,
        help_text="Since when nobody used it; null: it is not called idle.",
    )
    idle_notified_at = serializers.DateTimeField(
        source="row.idle_notified_at", allow_null=True, help_text="Since when its people are told."
    )
    suspend_at = serializers.DateTimeField(
        source="row.suspend_at",
        allow_null=True,
        help_text="When it is suspended unless it is used or kept; null: it is not.",
    )
    snoozed_until = serializers.DateTimeField(
        source="row.snoozed_until", allow_null=True, help_text="It may have passed."
    )
    snoozes_left = serializers.IntegerField()
    rules = IdleSettingDetail(many=True, help_text="Each rule as it holds for it, and whose word that is.")
    exemption = IdleExemption(allow_null=True, help_text="The reason that keeps it now.")

    @staticmethod
    def get_rules(found: IdleStatus, context: object) -> list[EffectiveRule]:
        return list(found.settings_sheet.rules.values())
