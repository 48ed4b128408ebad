"""Serializer of the failure that a rule identified."""

from __future__ import annotations

from rest_framework import serializers

from portal.api.framework.responses import ResponseSerializer
from portal.domain.failure_rules import FailureAction


class Failure(ResponseSerializer):
    """Why a job failed, by a failure rule."""

    rule = serializers.CharField(source="rule.code")
    title = serializers.CharField(source="rule.title")
    cause = serializers.CharField(source="rule.cause")
    fix = serializers.CharField(source="rule.fix")
    action = serializers.ChoiceField(
        [action.value for action in FailureAction], source="rule.action", help_text="What `retry/` does."
    )
    line = serializers.CharField(
        allow_null=True,
        allow_blank=True,
        help_text="The line of the log that matched; blank: none, the exit signature did; null: not visible to you.",
    )
    rank = serializers.IntegerField(allow_null=True, help_text="Rank of that line.")
