"""Serializers of projects, members, quotas and their history."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rest_framework import serializers

from portal.api.framework.responses import ResponseSerializer
from portal.api.serializers.references import Reference, UserReference
from portal.api.serializers.users import ROLES
from portal.domain.states import Role
from portal.models import Quota, QuotaChange
from portal.selectors.projects.projects import ProjectCounts
from portal.services.projects.projects import DEFAULT_QUOTA_VALUES


@dataclass(frozen=True)
class ProjectContext:
    """The role of the reader in a project, and what it contains."""

    role: Role | None
    counts: ProjectCounts


class Project(Reference):
    """A project in lists."""

    title = serializers.CharField(allow_blank=True)
    parent = Reference(allow_null=True)
    role = serializers.ChoiceField(
        ROLES,
        allow_null=True,
        source="context.role",
        help_text="Your effective role; null if you have none, as an administrator.",
    )
    created_at = serializers.DateTimeField()
    archived_at = serializers.DateTimeField(allow_null=True)
    egress_allow = serializers.ListField(
        child=serializers.CharField(),
        help_text="Networks and ports that jobs may connect to if the policy `egress` is `listed`; empty for those "
        "of the parent project.",
    )
    members = serializers.IntegerField(source="context.counts.members")
    running_jobs = serializers.IntegerField(source="context.counts.running_jobs")
    pending_jobs = serializers.IntegerField(source="context.counts.pending_jobs")
    running_milli = serializers.IntegerField(
        source="context.counts.running_milli", help_text="GPU milli requested by running jobs."
    )


class Member(ResponseSerializer):
    """A user's direct role in a project."""

    user = UserReference()
    role = serializers.ChoiceField(ROLES)
    since = serializers.DateTimeField(source="created_at")


class QuotaValues(ResponseSerializer):
    """The values of a quota; GPUs in thousandths (milli)."""

    guaranteed_milli = serializers.IntegerField()
    limit_milli = serializers.IntegerField(allow_null=True, help_text="null if unlimited.")
    weight = serializers.FloatField()
    priority = serializers.IntegerField()
    user_limit_milli = serializers.IntegerField(
        allow_null=True, help_text="GPU milli that one user may hold at once; null if unlimited."
    )


class _QuotaKey(ResponseSerializer):
    id = serializers.CharField(allow_null=True)
    project = Reference()
    pool = Reference()

    @staticmethod
    def get_id(row: Quota, context: None) -> str | None:
        return row.public_id if row.pk else None


class QuotaDetail(_QuotaKey, QuotaValues):
    """The quota of a project in a pool. ``id`` and ``updated_at`` are null if no quota was set."""

    version = serializers.IntegerField(help_text="0 if no quota was ever set.")
    etag = serializers.CharField()
    updated_at = serializers.DateTimeField(allow_null=True)


class QuotaChangeDetail(ResponseSerializer):
    """A change of a quota."""

    number = serializers.IntegerField(source="pk")
    at = serializers.DateTimeField()
    actor = UserReference(allow_null=True)
    before = QuotaValues(allow_null=True)
    after = QuotaValues()
    reason = serializers.CharField(allow_blank=True)
    undoes = serializers.IntegerField(
        allow_null=True,
        source="undoes_id",
        help_text="Number of the change that this one undid; null if it is not an undo.",
    )

    @staticmethod
    def get_before(row: QuotaChange, context: None) -> dict[str, Any] | None:
        return {**DEFAULT_QUOTA_VALUES, **row.before} if row.before else None

    @staticmethod
    def get_after(row: QuotaChange, context: None) -> dict[str, Any]:
        return {**DEFAULT_QUOTA_VALUES, **row.after}
