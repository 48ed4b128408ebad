"""Serializers of idle status, idle settings and exemptions."""

from __future__ import annotations

from typing import Any

from rest_framework import serializers

from portal.api.framework.responses import ResponseSerializer
from portal.api.serializers.references import Reference, UserReference, reference, timestamp, user_reference
from portal.models import IdleExemption as IdleExemptionRow
from portal.selectors.jobs.idle import IdleStatus


class IdleExemption(serializers.Serializer[Any]):
    """Why an idle workspace is kept."""

    id = serializers.CharField()
    job = Reference()
    by = UserReference()
    reason = serializers.CharField()
    at = serializers.DateTimeField()
    until = serializers.DateTimeField()
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


class IdleDetail(serializers.Serializer[Any]):
    """Activity of a running workspace, and the action when it stays idle."""

    action = serializers.ChoiceField(["off", "notify", "suspend"], help_text="What the policy does.")
    idle_after_s = serializers.IntegerField()
    last_active_at = serializers.DateTimeField(
        allow_null=True, help_text="When it was last known to be used."
    )
    inactive_since = serializers.DateTimeField(
        allow_null=True, help_text="Since when nobody used it; null: it is not called idle."
    )
    idle_notified_at = serializers.DateTimeField(allow_null=True, help_text="Since when its people are told.")
    suspend_at = serializers.DateTimeField(
        allow_null=True, help_text="When it is suspended unless it is used or kept; null: it is not."
    )
    snoozed_until = serializers.DateTimeField(allow_null=True, help_text="It may have passed.")
    snoozes_left = serializers.IntegerField()
    rules = IdleSettingDetail(many=True, help_text="Each rule as it holds for it, and whose word that is.")
    exemption = IdleExemption(allow_null=True, help_text="The reason that keeps it now.")


def idle_exemption(row: IdleExemptionRow) -> dict[str, Any]:
    return {
        "id": row.public_id,
        "job": reference(row.job),
        "by": user_reference(row.requested_by),
        "reason": row.reason,
        "at": timestamp(row.created_at),
        "until": timestamp(row.expires_at),
        "revoked_at": timestamp(row.revoked_at),
    }


def idle_status(found: IdleStatus | None) -> dict[str, Any] | None:
    """Return the idle status of a workspace; null where activity is not monitored."""
    if found is None:
        return None
    return {
        "action": found.action,
        "idle_after_s": found.idle_after_s,
        "last_active_at": timestamp(found.row.last_active_at),
        "inactive_since": timestamp(found.row.inactive_since),
        "idle_notified_at": timestamp(found.row.idle_notified_at),
        "suspend_at": timestamp(found.row.suspend_at),
        "snoozed_until": timestamp(found.row.snoozed_until),
        "snoozes_left": found.snoozes_left,
        "rules": [IdleSettingDetail.represent(each) for each in found.settings_sheet.rules.values()],
        "exemption": idle_exemption(found.exemption) if found.exemption else None,
    }
