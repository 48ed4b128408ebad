"""Serializers of projects, members, quotas and their history."""

from __future__ import annotations

from typing import Any

from rest_framework import serializers

from portal.api.serializers.references import Reference, UserReference, reference, timestamp, user_reference
from portal.api.serializers.users import ROLES
from portal.domain.states import Role
from portal.models import Membership, NodePool, Quota, QuotaChange
from portal.models import Project as ProjectRow
from portal.selectors.projects.projects import ProjectCounts
from portal.services.projects.projects import DEFAULT_QUOTA_VALUES, quota_values


class Project(serializers.Serializer[Any]):
    """A project in lists."""

    id = serializers.CharField()
    name = serializers.CharField()
    title = serializers.CharField(allow_blank=True)
    parent = Reference(allow_null=True)
    role = serializers.ChoiceField(ROLES, allow_null=True, help_text="My role in effect; null for admins.")
    created_at = serializers.DateTimeField()
    archived_at = serializers.DateTimeField(allow_null=True)
    egress_allow = serializers.ListField(
        child=serializers.CharField(),
        help_text="Where jobs may connect while the policy is listed; its own list.",
    )
    members = serializers.IntegerField()
    running_jobs = serializers.IntegerField()
    pending_jobs = serializers.IntegerField()
    running_milli = serializers.IntegerField(help_text="GPU milli asked for by running jobs.")


class Member(serializers.Serializer[Any]):
    """A user's direct role in a project."""

    user = UserReference()
    role = serializers.ChoiceField(ROLES)
    since = serializers.DateTimeField()


class QuotaValues(serializers.Serializer[Any]):
    """The values of a quota; GPUs in thousandths."""

    guaranteed_milli = serializers.IntegerField()
    limit_milli = serializers.IntegerField(allow_null=True, help_text="null: no limit.")
    weight = serializers.FloatField()
    priority = serializers.IntegerField()
    user_limit_milli = serializers.IntegerField(
        allow_null=True, help_text="What one person may hold at once; null: no limit."
    )


class QuotaDetail(QuotaValues):
    """What a project may use of a pool. ``id`` and ``updated_at`` are null for defaults."""

    id = serializers.CharField(allow_null=True)
    project = Reference()
    pool = Reference()
    version = serializers.IntegerField(help_text="0 where no quota was ever set.")
    etag = serializers.CharField()
    updated_at = serializers.DateTimeField(allow_null=True)


class QuotaChangeDetail(serializers.Serializer[Any]):
    """One edit of a quota."""

    number = serializers.IntegerField()
    at = serializers.DateTimeField()
    actor = UserReference(allow_null=True)
    before = QuotaValues(allow_null=True)
    after = QuotaValues()
    reason = serializers.CharField(allow_blank=True)
    undoes = serializers.IntegerField(allow_null=True, help_text="Number of the change this one undid.")


def project(row: ProjectRow, role: Role | None, counts: ProjectCounts) -> dict[str, Any]:
    return {
        "id": row.public_id,
        "name": row.name,
        "title": row.title,
        "parent": reference(row.parent),
        "role": role.value if role else None,
        "created_at": timestamp(row.created_at),
        "archived_at": timestamp(row.archived_at),
        "egress_allow": row.egress_allow,
        "members": counts.members,
        "running_jobs": counts.running_jobs,
        "pending_jobs": counts.pending_jobs,
        "running_milli": counts.running_milli,
    }


def member(row: Membership) -> dict[str, Any]:
    return {"user": user_reference(row.user), "role": row.role, "since": timestamp(row.created_at)}


def quota(row: Quota) -> dict[str, Any]:
    return {
        "id": row.public_id,
        "project": reference(row.project),
        "pool": reference(row.pool),
        **quota_values(row),
        "version": row.version,
        "etag": row.etag,
        "updated_at": timestamp(row.updated_at),
    }


def default_quota(project_row: ProjectRow, pool: NodePool) -> dict[str, Any]:
    """Return the quota of a project where none was set."""
    return {
        "id": None,
        "project": reference(project_row),
        "pool": reference(pool),
        **DEFAULT_QUOTA_VALUES,
        "version": 0,
        "etag": unset_etag(project_row, pool),
        "updated_at": None,
    }


def unset_etag(project_row: ProjectRow, pool: NodePool) -> str:
    """Return the entity tag of a quota that was never set."""
    return f'"{project_row.public_id}.{pool.public_id}.0"'


def quota_change(row: QuotaChange) -> dict[str, Any]:
    return {
        "number": row.pk,
        "at": timestamp(row.at),
        "actor": user_reference(row.actor) if row.actor else None,
        "before": DEFAULT_QUOTA_VALUES | row.before if row.before else None,
        "after": DEFAULT_QUOTA_VALUES | row.after,
        "reason": row.reason,
        "undoes": row.undoes_id,
    }
